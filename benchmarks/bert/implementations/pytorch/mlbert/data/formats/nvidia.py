"""Folders of HDF5 shards from NVIDIA's data pipeline, read directly: fixed, variable and packed.

`mlbert.data.formats.nvidia_shard` describes the three kinds. All files are mapped into memory as
one range, so that sequences from many shards are gathered with a few array operations, by any
number of threads. Only shards in an unusual form (compressed, chunked) are read through the HDF5
library.

Token ids are stored as signed 16-bit numbers, which is enough for the benchmark's 30,522 entries;
negative ids are rejected. In fixed shards, masked positions are padded with zeros. Position 0 is
[CLS] and never masked, so the real positions are those above 0.

Legend: N sequences, S requested sequences, R rows (sequences, or packs in packed shards),
T tokens, M masked tokens.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mlbert.data.formats.base import BinInfo, IndexedStore, Store, StoreInfo, by_part
from mlbert.data.formats.bins import BinnedStore
from mlbert.data.formats.file_map import FileMap
from mlbert.data.formats.index_cache import content_of, name_of
from mlbert.data.formats.nvidia_index import (
    bin_name,
    bins_of,
    check_bins,
    item_starts,
    list_shards,
    load_index,
)
from mlbert.data.formats.nvidia_shard import (
    COLUMNS,
    REFERENCE,
    Items,
    NvidiaShard,
    RecordedLimits,
    inspect,
    item_dtype,
    open_shard,
    read_column,
)
from mlbert.data.formats.padded import Widths
from mlbert.data.formats.ragged import Ragged, offsets_of, span_members
from mlbert.host.errors import UserError

DEFAULT_LIMITS = Widths(max_seq_length=512, max_predictions=76)


def accepts(folder: Path) -> bool:
    """Return True if the folder or its sub-folders have HDF5 files."""
    return bool(list_shards(folder) or bins_of(folder))


def describe(folder: Path, limits: Widths = DEFAULT_LIMITS) -> StoreInfo:
    """Describe a folder from file names, sizes and the head of the first file (of each bin),
    without reading a sample. Raises UserError if shards are missing or duplicated, or the first is
    damaged.
    """
    groups = bins_of(folder)
    info = _describe(folder, groups or [list_shards(folder)], limits)
    return replace(info, bins=tuple(BinInfo(bin_name(group[0]), None) for group in groups))


def _describe(folder: Path, groups: Sequence[Sequence[Path]], limits: Widths) -> StoreInfo:
    paths = [path for group in groups for path in group]
    if not paths:
        raise UserError(
            "data.missing", folder, "contains no HDF5 file", "Give a folder of NVIDIA's HDF5 shards"
        )
    heads = [inspect(group[0]) for group in groups]
    of_heads = [_limits_of(head, limits) for head in heads]
    max_row_tokens = max(found.max_row_tokens for found in of_heads)
    named = [f"{name_of(folder, path)} {path.stat().st_size}" for path in paths]
    return StoreInfo(
        folder=folder,
        kind=f"nvidia-{heads[0].kind}",
        identity=hashlib.sha256("\n".join(sorted(named)).encode()).hexdigest(),
        max_seq_length=max(found.max_seq_length for found in of_heads),
        max_predictions=max(found.max_predictions for found in of_heads),
        is_listed=False,
        content=content_of(folder, paths),
        max_pack_tokens=max_row_tokens if heads[0].kind == "packed" else None,
    )


def _limits_of(head: NvidiaShard, limits: Widths) -> RecordedLimits:
    """Return the limits of a shard: its widths, those that it records, or else ``limits``."""
    if head.recorded is not None:
        return head.recorded
    max_seq_length = head.widths.max_seq_length or limits.max_seq_length
    max_predictions = head.widths.max_predictions or limits.max_predictions
    return RecordedLimits(max_seq_length, max_predictions, max_seq_length)


def open_folder(folder: Path, limits: Widths = DEFAULT_LIMITS) -> Store:
    """Open a folder of shards, or of length bins: sub-folders of shards, or files with
    ``bin<number>`` in their names. Raises UserError naming the first invalid file and row.
    """
    groups = bins_of(folder)
    if not groups:
        return NvidiaStore(folder, limits=limits)
    bins = [NvidiaStore(folder, group, limits=limits) for group in groups]
    bins.sort(key=lambda store: int(store.lengths.min(initial=np.iinfo(np.int32).max)))
    for store in bins:
        if store.num_packs:
            reason = "is a packed shard in a folder of bins"
            raise UserError("data.format", store.paths[0], reason, "Bins contain single sequences")
    filled = {bin_name(store.paths[0]): store.lengths for store in bins if len(store)}
    check_bins(
        folder, {name: (int(lengths.min()), int(lengths.max())) for name, lengths in filled.items()}
    )
    info = replace(
        describe(folder, limits),
        num_sequences=sum(len(store) for store in bins),
        bins=tuple(BinInfo(bin_name(store.paths[0]), len(store)) for store in bins),
    )
    return BinnedStore(info, bins)


class NvidiaStore(IndexedStore):
    """Shards of one folder as a `mlbert.data.formats.base.Store`.

    Args:
        folder: the shards' folder, or one file.
        paths: the shards; by default all in the folder.
        limits: maximum tokens of a row and masked tokens of a sequence,
            if the shards do not record them.
        strict: reject the set if a row is invalid; otherwise only reading that row is an error.
        cached: keep the index in the user's cache folder.

    Raises UserError naming the first invalid file and row.
    """

    def __init__(
        self,
        folder: Path | str,
        paths: Sequence[Path] | None = None,
        *,
        limits: Widths = DEFAULT_LIMITS,
        strict: bool = True,
        cached: bool = True,
    ) -> None:
        folder = Path(folder)
        self.paths = list(paths) if paths is not None else list_shards(folder)
        info = _describe(folder, [self.paths], limits)
        self._map = FileMap(self.paths)
        self._index = load_index(self.paths, self._map, limits, cached)
        self._first_row = offsets_of(self._index.rows)
        if strict and self._index.problems:
            row = min(self._index.problems)
            raise self._error(row, self._index.problems[row])
        self._packed = self._index.kind == "packed"
        if self._packed:
            self._first_sequence: np.ndarray = offsets_of(self._index.counts)
        self._lengths = self._index.lengths
        self.num_packs = len(self._index.counts)
        self.info = replace(info, num_sequences=len(self))
        self._bad_rows = np.asarray(sorted(self._index.problems), np.int64)
        self._views = {size: self._map.view(np.dtype(f"<i{size}")) for size in (1, 2)}
        self._references = self._map.view(REFERENCE)
        self._lock = threading.Lock()

    def gather(self, indices: np.ndarray) -> Ragged:
        """Return the sequences ``indices`` (int64 [S], into `lengths`), in that order."""
        indices = np.asarray(indices, np.int64)
        if not self._packed:
            return self._rows(indices)
        pack_of = np.searchsorted(self._first_sequence, indices, side="right") - 1
        packs, place = np.unique(pack_of, return_inverse=True)
        rows, counts = self.gather_packs(packs)
        return rows.take(offsets_of(counts)[:-1][place] + indices - self._first_sequence[pack_of])

    def pack_lengths(self, indices: np.ndarray) -> np.ndarray:
        """See `Store.pack_lengths`."""
        counts, lengths = self._sizes(np.asarray(indices, np.int64))
        return np.diff(offsets_of(lengths)[offsets_of(counts)])

    def gather_packs(self, indices: np.ndarray) -> tuple[Ragged, np.ndarray]:
        """Return the sequences of the packs ``indices`` (int64), pack by pack,
        and the number in each (int64 [packs]).
        """
        assert self._packed, "a set of single sequences"
        indices = np.asarray(indices, np.int64)
        return self._rows(indices), self._index.counts[indices].astype(np.int64)

    def _error(self, row: int, reason: str) -> UserError:
        number = int(np.searchsorted(self._first_row, row, side="right")) - 1
        reason = f"row {row - int(self._first_row[number])} {reason}"
        remedy = "Restore the file, or import the folder with --skip-bad"
        return UserError("data.damaged", self.paths[number], reason, remedy)

    def _rows(self, rows: np.ndarray) -> Ragged:
        """Return the sequences of the rows (int64 [R], over all files), in that order."""
        if len(bad := rows[np.isin(rows, self._bad_rows)]):
            raise self._error(int(bad[0]), self._index.problems[int(bad[0])])
        row_counts, lengths = self._sizes(rows)
        offsets = offsets_of(lengths)
        row_starts = offsets[offsets_of(row_counts)]  # first token of each row, and the end
        row_lengths = np.diff(row_starts)
        columns = self._columns(rows)
        each_row = np.arange(len(rows))

        def refuse(row_of: np.ndarray, wrong: np.ndarray, reason: str) -> None:
            if wrong.any():
                raise self._error(int(rows[row_of[np.argmax(wrong)]]), reason)

        def items(name: str, wanted: np.ndarray) -> np.ndarray:
            column = columns[name]
            if self._index.kind == "fixed":
                column = column._replace(counts=wanted)  # the rest is padding
            refuse(
                each_row,
                column.counts != wanted,
                f"has {name} of a different length than the other columns",
            )
            return column.gather()

        tokens = items("input_ids", row_lengths)
        segments = items("segment_ids", row_lengths)
        token_row = np.repeat(each_row, row_lengths)
        refuse(token_row, tokens < 0, "has a negative token id")
        first_lengths = lengths - np.diff(
            np.concatenate([[0], np.cumsum(segments, dtype=np.int64)])[offsets]
        )
        expected = np.arange(len(tokens)) >= np.repeat(offsets[:-1] + first_lengths, lengths)
        refuse(token_row, segments != expected, "has segment_ids that are not zeros and then ones")
        row_of = np.repeat(each_row, row_counts)  # of each sequence
        refuse(row_of, first_lengths < 1, "has segment_ids without a zero")
        wrong = columns["next_sentence_labels"].counts != row_counts
        refuse(each_row, wrong, "has too many or few next_sentence_labels")
        labels = items("next_sentence_labels", row_counts)
        refuse(row_of, (labels != 0) & (labels != 1), "has a next_sentence_label other than 0 or 1")
        masked_counts = columns["masked_lm_positions"].counts
        if self._index.kind == "fixed":
            used = (
                columns["masked_lm_positions"]
                .gather()
                .reshape(len(rows), self._index.widths.max_predictions)
                != 0
            )
            masked_counts = used.sum(axis=1)
            gaps = (used != (np.arange(used.shape[1]) < masked_counts[:, None])).any(axis=1)
            refuse(each_row, gaps, "has a masked position after the padding")
        # From the start of the row.
        positions = items("masked_lm_positions", masked_counts).astype(np.int64)
        ids = items("masked_lm_ids", masked_counts)
        masked_row = np.repeat(each_row, masked_counts)
        outside = (positions < 0) | (positions >= row_lengths[masked_row])
        refuse(masked_row, outside, "has a masked position outside the row")
        refuse(masked_row, ids < 0, "has a negative id in masked_lm_ids")
        place = positions + row_starts[masked_row]  # among all tokens
        refuse(
            masked_row, np.diff(place, prepend=-1) <= 0, "has masked positions that do not ascend"
        )
        sequence = np.searchsorted(offsets, place, side="right") - 1
        per_sequence = np.bincount(sequence, minlength=len(lengths))
        most = self.info.max_predictions
        refuse(row_of, per_sequence > most, f"has a sequence with more than {most} masked tokens")
        return Ragged(
            tokens=tokens.view(np.uint16),
            offsets=offsets,
            masked_positions=(place - offsets[sequence]).astype(np.uint16),
            masked_labels=ids.view(np.uint16),
            masked_offsets=offsets_of(per_sequence),
            first_lengths=first_lengths.astype(np.uint16),
            next_sentence=labels.view(np.uint8),
        )

    def _sizes(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return int64 [R], sequences of each row, and int64 [S], tokens of each sequence."""
        if not self._packed:
            return np.ones(len(rows), np.int64), self._index.lengths[rows].astype(np.int64)
        counts = self._index.counts[rows].astype(np.int64)
        return counts, self._index.lengths[span_members(self._first_sequence[rows], counts)].astype(
            np.int64
        )

    def _columns(self, rows: np.ndarray) -> dict[str, Items]:
        file_of = np.searchsorted(self._first_row, rows, side="right") - 1
        if (self._index.offsets[file_of, 0] >= 0).all():
            return {name: self._mapped_column(name, rows, file_of) for name in COLUMNS}
        # Through h5py, one file at a time, because threads share its handles.
        read: dict[str, dict[int, np.ndarray]] = {name: {} for name in COLUMNS}
        for number, places, inside in by_part(self._first_row, rows):
            with self._lock, open_shard(self.paths[number]) as file:
                for name in COLUMNS:
                    read[name] |= zip(places.tolist(), read_column(file, name, inside), strict=True)
        return {
            name: Items.of_rows([found[row] for row in range(len(rows))], name)
            for name, found in read.items()
        }

    def _mapped_column(self, name: str, rows: np.ndarray, file_of: np.ndarray) -> Items:
        index = self._index
        number = COLUMNS.index(name)
        size = item_dtype(name).itemsize
        inside = rows - self._first_row[file_of]
        base = self._map.starts[file_of]
        table = base + index.offsets[file_of, number]
        if index.kind == "fixed" or (index.kind == "variable" and name == "next_sentence_labels"):
            width = index.widths.of(name)
            return Items(
                self._views[size],
                table + inside * (width * size),
                np.full(len(rows), width, np.int64),
                size,
            )
        references = self._references[table + inside * REFERENCE.itemsize]
        counts = references["length"].astype(np.int64)
        starts = base + item_starts(references, index.places[rows, number])
        if (starts + counts * size > self._map.ends[file_of])[counts > 0].any():
            raise UserError(
                "data.changed", self.info.folder, "was changed while it was open", "Open it again"
            )
        return Items(self._views[size], starts, counts, size)
