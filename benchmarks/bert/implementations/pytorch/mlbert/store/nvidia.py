"""Folders of HDF5 shards that NVIDIA's data pipeline made, read as they are: fixed, variable and packed.

`mlbert.store.nvidia_files` describes the three kinds. Rows lie in memory maps of all files at once, so a step's
sequences from as many different shards are taken with a few array operations, by any number of threads; only shards in
an unusual form (compressed, chunked) go through the HDF5 library.

Token ids are stored as signed 16-bit numbers: ids up to 32,767, enough for the benchmark's 30,522 entries; negative
ones are refused. In fixed shards zeros fill the places of masked tokens; position 0 is [CLS] and never masked, so the
real positions are the ones above 0.

Legend: N sequences, S sequences asked for, R rows (sequences, or packs in packed shards), T tokens, M masked tokens.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mlbert.core.errors import UserError
from mlbert.store.base import Store, StoreInfo
from mlbert.store.bins import BinnedStore
from mlbert.store.file_map import FileMap
from mlbert.store.nvidia_files import (
    COLUMNS,
    HEADER_BYTES,
    REFERENCE,
    Shard,
    bin_name,
    bins_of,
    check_bins,
    inspect,
    item_dtype,
    list_shards,
    open_shard,
    read_column,
)
from mlbert.store.nvidia_index import Limits, gather_items, load_index
from mlbert.store.ragged import Ragged, offsets_of

KINDS = {"fixed": "nvidia-fixed", "variable": "nvidia-variable", "packed": "nvidia-packed"}
DEFAULT_LIMITS = Limits()
_Column = tuple[np.ndarray, np.ndarray]  # items back to back; int64 [rows], items of each row


def accepts(folder: Path) -> bool:
    """Whether the folder, or its sub-folders, hold HDF5 files."""
    return bool(list_shards(folder) or bins_of(folder))


def describe(folder: Path, limits: Limits = DEFAULT_LIMITS) -> StoreInfo:
    """What file names, sizes and the head of the first file tell; reads no sample.

    Raises:
        UserError: shards are missing or doubled, or the first is damaged.
    """
    return _describe(folder, [path for group in bins_of(folder) for path in group] or list_shards(folder), limits)


def _describe(folder: Path, paths: Sequence[Path], limits: Limits) -> StoreInfo:
    if not paths:
        raise UserError(folder, "holds no HDF5 file", "Give a folder of NVIDIA's HDF5 shards")
    first = inspect(paths[0])
    named = [f"{path.parent.name}/{path.name} {path.stat().st_size}" for path in paths]
    return StoreInfo(
        folder=folder,
        kind=KINDS[first.kind],
        identity=hashlib.sha256("\n".join(sorted(named)).encode()).hexdigest(),
        max_seq_length=first.max_tokens or limits.max_seq_length,
        max_predictions=first.max_masked or limits.max_predictions,
        num_sequences=None,
        vocab_size=None,
        vocabulary_sha256=None,
        max_pack_tokens=limits.max_seq_length if first.kind == "packed" else None,
    )


def open_folder(folder: Path, limits: Limits = DEFAULT_LIMITS) -> Store:
    """Open a folder of shards, or of bins by length: sub-folders of shards, or files named by ``bin<number>``.

    Raises:
        UserError: names the first file, and row, that is wrong.
    """
    groups = bins_of(folder)
    if not groups:
        return NvidiaStore(folder, limits=limits)
    bins = [NvidiaStore(folder, group, limits=limits) for group in groups]
    for store in bins:
        if store.num_packs:
            raise UserError(store.paths[0], "is a packed shard in a folder of bins", "Bins hold single sequences")
    filled = {bin_name(store.paths[0]): store.lengths for store in bins if len(store)}
    shortest = {name: int(lengths.min()) for name, lengths in filled.items()}
    check_bins(folder, shortest, {name: int(lengths.max()) for name, lengths in filled.items()})
    info = replace(
        describe(folder, limits),
        max_seq_length=max(store.info.max_seq_length for store in bins),
        max_predictions=max(store.info.max_predictions for store in bins),
        num_sequences=sum(len(store) for store in bins),
    )
    return BinnedStore(info, bins)


class NvidiaStore:
    """Shards of one folder as a `mlbert.store.base.Store`.

    Args:
        folder: where they lie, or one file.
        paths: the shards; None: all of the folder.
        limits: most tokens of a row and masked tokens of a sequence, where the shards do not say.
        strict: refuse the set when a row is wrong; otherwise only taking that row is an error.
        cached: keep what opening finds in the user's cache folder.

    Attributes:
        info: see `StoreInfo`.
        paths: the shards, in order.
        lengths: int32 [N], tokens of every sequence.
        num_packs: stored packs; 0 for single sequences.

    Raises:
        UserError: names the first file, and row, that is wrong.
    """

    def __init__(
        self,
        folder: Path | str,
        paths: Sequence[Path] | None = None,
        *,
        limits: Limits = DEFAULT_LIMITS,
        strict: bool = True,
        cached: bool = True,
    ) -> None:
        folder = Path(folder)
        self.paths = list(paths) if paths is not None else list_shards(folder)
        info = _describe(folder, self.paths, limits)
        self._map = FileMap(self.paths)
        self._index = load_index(self.paths, self._map, limits, cached)
        self._first_row = offsets_of(self._index.rows)
        if strict and self._index.problems:
            row = min(self._index.problems)
            raise self._error(row, self._index.problems[row])
        self._packed = self._index.kind == "packed"
        if self._packed:
            self._first_sequence: np.ndarray = offsets_of(self._index.counts)
        self.lengths: np.ndarray = self._index.lengths.astype(np.int32)
        self.num_packs: int = len(self._index.counts)
        self.info = replace(info, num_sequences=len(self.lengths))
        self._bad_rows = np.asarray(sorted(self._index.problems), np.int64)
        self._views = {size: self._map.view(np.dtype(f"<i{size}")) for size in (1, 2)}
        self._references = self._map.view(REFERENCE)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.lengths)

    def gather(self, indices: np.ndarray) -> Ragged:
        """The sequences ``indices`` (int64 [S], into `lengths`), in that order."""
        indices = np.asarray(indices, np.int64)
        if not self._packed:
            return self._rows(indices)
        pack_of = np.searchsorted(self._first_sequence, indices, side="right") - 1
        packs, place = np.unique(pack_of, return_inverse=True)
        rows, counts = self.gather_packs(packs)
        return rows.take(offsets_of(counts)[:-1][place] + indices - self._first_sequence[pack_of])

    def gather_packs(self, indices: np.ndarray) -> tuple[Ragged, np.ndarray]:
        """The packs ``indices`` (int64): their sequences pack by pack, and int64 [packs] sequences of each."""
        assert self._packed, "a set of single sequences"
        indices = np.asarray(indices, np.int64)
        return self._rows(indices), self._index.counts[indices].astype(np.int64)

    def _error(self, row: int, reason: str) -> UserError:
        number = int(np.searchsorted(self._first_row, row, side="right")) - 1
        reason = f"row {row - int(self._first_row[number])} {reason}"
        return UserError(self.paths[number], reason, "Restore the file, or import the folder with --skip-bad")

    def _rows(self, rows: np.ndarray) -> Ragged:
        """Sequences of the rows (int64 [R], of all files), in that order."""
        bad = rows[np.isin(rows, self._bad_rows)]
        if len(bad):
            raise self._error(int(bad[0]), self._index.problems[int(bad[0])])
        file_of = np.searchsorted(self._first_row, rows, side="right") - 1
        mapped = self._index.offsets[file_of, 0] >= 0
        if mapped.all():
            return self._ragged(rows, lambda name: self._mapped_column(name, rows, file_of))
        parts, order = [], []
        if mapped.any():
            chosen = np.flatnonzero(mapped)
            some, files = rows[chosen], file_of[chosen]
            parts.append(self._ragged(some, lambda name: self._mapped_column(name, some, files)))
            order.append(chosen)
        for number in np.unique(file_of[~mapped]).tolist():
            chosen = np.flatnonzero(file_of == number)
            parts.append(self._plain_rows(number, rows[chosen]))
            order.append(chosen)
        return _reorder(parts, np.concatenate(order), self._row_counts(rows))

    def _row_counts(self, rows: np.ndarray) -> np.ndarray:
        return self._index.counts[rows].astype(np.int64) if self._packed else np.ones(len(rows), np.int64)

    def _plain_rows(self, number: int, rows: np.ndarray) -> Ragged:
        """Through h5py; one file at a time, since its handles are shared by threads."""
        shard = Shard(self.paths[number], self._index.kind, int(self._index.rows[number]))
        inside = rows - self._first_row[number]
        with self._lock, open_shard(shard.path) as file:
            columns = {name: read_column(file, shard, name, inside) for name in COLUMNS}
        return self._ragged(rows, columns.__getitem__)

    def _mapped_column(self, name: str, rows: np.ndarray, file_of: np.ndarray) -> _Column:
        number = COLUMNS.index(name)
        size = item_dtype(name).itemsize
        inside = rows - self._first_row[file_of]
        base = self._map.starts[file_of]
        table = base + self._index.offsets[file_of, number]
        kind = self._index.kind
        if kind == "fixed" or (kind == "variable" and name == "next_sentence_labels"):
            width = {"input_ids": self._index.max_tokens, "segment_ids": self._index.max_tokens}.get(name)
            width = 1 if name == "next_sentence_labels" else width or self._index.max_masked
            counts = np.full(len(rows), width, np.int64)
            starts = table + inside * (width * size)
        else:
            references = self._references[table + inside * REFERENCE.itemsize]
            counts = references["length"].astype(np.int64)
            starts = base + references["address"].astype(np.int64) + HEADER_BYTES
            starts += 8 * self._index.places[rows, number].astype(np.int64)
            if (starts + counts * size > self._map.ends[file_of])[counts > 0].any():
                raise UserError(self.info.folder, "was changed while it was open", "Open it again")
        return gather_items(self._views[size], starts, counts), counts

    def _ragged(self, rows: np.ndarray, column: Callable[[str], _Column]) -> Ragged:
        """Check the columns of some rows and put them in our form."""
        row_counts = self._row_counts(rows)
        if self._packed:
            shift = self._first_sequence[rows] - offsets_of(row_counts)[:-1]
            sequences = np.repeat(shift, row_counts) + np.arange(row_counts.sum())
        else:
            sequences = rows
        block = _Block(self._index.lengths[sequences].astype(np.int64), row_counts, self._index.kind == "fixed")
        try:
            return block.ragged({name: column(name) for name in COLUMNS}, self.info.max_predictions)
        except _BadRow as error:
            raise self._error(int(rows[error.row]), error.reason) from None


def _reorder(parts: Sequence[Ragged], row_of: np.ndarray, row_counts: np.ndarray) -> Ragged:
    """Sequences of rows that were taken in the order ``row_of``, put into the order of the rows."""
    starts_of_parts = offsets_of(row_counts[row_of])[:-1]
    back = np.argsort(row_of)
    first = np.repeat(starts_of_parts[back] - (np.cumsum(row_counts) - row_counts), row_counts)
    return Ragged.concatenate(parts).take(first + np.arange(row_counts.sum()))


class _BadRow(Exception):
    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row, self.reason = row, reason


@dataclass(frozen=True)
class _Block:
    """Some rows on their way to a `Ragged`.

    Attributes:
        lengths: int64 [S], tokens of each sequence.
        row_counts: int64 [R], sequences of each row.
        padded: whether columns come with their padding.
    """

    lengths: np.ndarray
    row_counts: np.ndarray
    padded: bool

    def ragged(self, columns: dict[str, _Column], max_predictions: int) -> Ragged:
        """Raises `_BadRow` for the first row of the first rule that is broken."""
        row_of = np.repeat(np.arange(len(self.row_counts)), self.row_counts)
        offsets = offsets_of(self.lengths)
        row_starts = offsets[offsets_of(self.row_counts)]
        row_lengths = np.diff(row_starts)
        tokens = self._trimmed(columns["input_ids"], row_lengths, "input_ids")
        segments = self._trimmed(columns["segment_ids"], row_lengths, "segment_ids")
        token_row = np.repeat(np.arange(len(row_lengths)), row_lengths)
        _refuse(token_row, tokens < 0, "has a negative token id")
        second = np.diff(np.concatenate([[0], np.cumsum(segments, dtype=np.int64)])[offsets])
        first_lengths = self.lengths - second
        expected = np.arange(len(tokens)) >= np.repeat(offsets[:-1] + first_lengths, self.lengths)
        _refuse(token_row, segments != expected, "has segment_ids that are not zeros and then ones")
        _refuse(row_of, first_lengths < 1, "has segment_ids without a zero")
        labels, next_counts = columns["next_sentence_labels"]
        _refuse(np.arange(len(next_counts)), next_counts != self.row_counts, "has too many or few next_sentence_labels")
        _refuse(row_of, (labels != 0) & (labels != 1), "has a next_sentence_label other than 0 or 1")
        positions, masked_counts = self._masked(columns["masked_lm_positions"])
        ids = self._trimmed(columns["masked_lm_ids"], masked_counts, "masked_lm_ids")
        masked_row = np.repeat(np.arange(len(masked_counts)), masked_counts)
        outside = (positions < 0) | (positions >= row_lengths[masked_row])
        _refuse(masked_row, outside, "has a masked position outside the row")
        _refuse(masked_row, ids < 0, "has a negative id in masked_lm_ids")
        place = positions.astype(np.int64) + row_starts[masked_row]
        falling = np.diff(place, prepend=-1) <= 0
        _refuse(masked_row, falling, "has masked positions that do not ascend")
        sequence = np.searchsorted(offsets, place, side="right") - 1
        per_sequence = np.bincount(sequence, minlength=len(self.lengths))
        _refuse(
            row_of, per_sequence > max_predictions, f"has a sequence with more than {max_predictions} masked tokens"
        )
        return Ragged(
            tokens=tokens.view(np.uint16),
            offsets=offsets,
            masked_positions=(place - offsets[sequence]).astype(np.uint16),
            masked_labels=ids.view(np.uint16),
            masked_offsets=offsets_of(per_sequence),
            first_lengths=first_lengths.astype(np.uint16),
            next_sentence=labels.view(np.uint8),
        )

    def _trimmed(self, column: _Column, wanted: np.ndarray, name: str) -> np.ndarray:
        """The first ``wanted`` items of every row."""
        flat, counts = column
        if not self.padded:
            _refuse(
                np.arange(len(counts)), counts != wanted, f"has {name} of another length than the columns beside it"
            )
            return flat
        width = len(flat) // max(1, len(counts))
        return flat.reshape(len(counts), width)[np.arange(width) < wanted[:, None]]

    def _masked(self, column: _Column) -> _Column:
        """Masked positions without the zeros that pad them, and how many of each row."""
        flat, counts = column
        if not self.padded:
            return flat, counts
        table = flat.reshape(len(counts), -1) if len(counts) else flat.reshape(0, 0)
        used = table != 0
        real = used.sum(axis=1)
        gaps = (used != (np.arange(table.shape[1]) < real[:, None])).any(axis=1)
        _refuse(np.arange(len(counts)), gaps, "has a masked position after the padding")
        return table[used], real


def _refuse(row_of: np.ndarray, wrong: np.ndarray, reason: str) -> None:
    if wrong.any():
        raise _BadRow(int(row_of[int(np.argmax(wrong))]), reason)


def nvidia_md5(rows: Iterable[np.ndarray]) -> str:
    """The checksum that NVIDIA's ``hdf5_md5.py`` prints for a shard; lists of them are published (``*.chk``).

    It is the md5 of the text of a Python list that holds, for each row, the md5 of the text of the row's token ids as
    a Python list. Text means what `str` gives, in UTF-8: "[101, 2023, 102]" for a row, numbers in decimal and a comma
    and a space between them; "['0cc1...', '92eb...']" for the outer list, 32 lower-case hexadecimal digits in single
    quotes. The published lists are of the variable-length shards, whose rows have no padding; the rows of a fixed
    shard would count with it.

    Args:
        rows: ``input_ids`` of the shard's rows in order, any integer type.
    """
    sums = [hashlib.md5(str(np.asarray(row).tolist()).encode(), usedforsecurity=False).hexdigest() for row in rows]
    return hashlib.md5(str(sums).encode(), usedforsecurity=False).hexdigest()
