"""What a reader of NVIDIA's shards must know before it can take rows in any order, found once and kept.

Finding it reads every file's references and heap chains (or input masks), so the result is kept in the user's cache
folder (``$XDG_CACHE_HOME/mlbert``, by default ``~/.cache/mlbert``), never beside the data. It counts as fresh while
every file has the same name, size and modification time.

Legend: F files, R rows of all files, N sequences, C variable-length columns of `COLUMNS`.
"""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np

from mlbert.core.errors import UserError
from mlbert.core.native import cache_folder
from mlbert.store.file_map import FileMap
from mlbert.store.nvidia_files import (
    COLUMNS,
    HEADER_BYTES,
    Shard,
    heap_places,
    inspect,
    item_dtype,
    open_shard,
    read_column,
)
from mlbert.store.ragged import offsets_of

_VERSION = 1
_THREADS = 4
_BLOCK_ROWS = 8192


@dataclass(frozen=True)
class Index:
    """Rows and lengths of a set of shards.

    Attributes:
        kind: "fixed", "variable" or "packed".
        max_tokens, max_masked: widths of fixed shards, 0 otherwise.
        rows: int64 [F].
        offsets: int64 [F, 5], byte offset of each of `COLUMNS` in its file; -1 where the file is read through h5py.
        lengths: uint16 [N], tokens of each sequence.
        counts: uint16 [R], sequences of each row; empty when each has one.
        places: uint16 [R, C], see `heap_places`; empty for fixed shards.
        problems: row (of all files) -> what is wrong with it; its lengths are not to be trusted.
    """

    kind: str
    max_tokens: int
    max_masked: int
    rows: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray
    places: np.ndarray
    problems: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """Most tokens of a row, most masked tokens of a sequence."""

    max_seq_length: int = 512
    max_predictions: int = 76


def load_index(paths: Sequence[Path], content: FileMap, limits: Limits, cached: bool = True) -> Index:
    """The index of some shards, from the cache or from the files.

    Raises:
        UserError: a file is damaged, of another kind than the first, or a copy of another.
    """
    state = _state(paths, limits)
    name = hashlib.sha256(str(paths[0].resolve()).encode()).hexdigest()[:16]
    kept = cache_folder() / "nvidia" / f"{name}-{state[:32]}.h5"
    if cached:
        with contextlib.suppress(OSError, KeyError, ValueError, RuntimeError):
            return _read(kept, state)
    index = build_index(paths, content, limits)
    if cached and not index.problems:
        # A cache that cannot be written costs time at the next opening, nothing else.
        with contextlib.suppress(OSError):
            _write(kept, state, index)
    return index


def _state(paths: Sequence[Path], limits: Limits) -> str:
    files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    text = json.dumps([_VERSION, limits.max_seq_length, limits.max_predictions, files])
    return hashlib.sha256(text.encode()).hexdigest()


_ARRAYS = ("rows", "offsets", "lengths", "counts", "places")


def _write(path: Path, state: str, index: Index) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with h5py.File(temporary, "w") as file:
            for name in _ARRAYS:
                file.create_dataset(name, data=getattr(index, name))
            file.attrs.update({"kind": index.kind, "widths": [index.max_tokens, index.max_masked], "state": state})
        for old in path.parent.glob(f"{path.name.split('-')[0]}-*.h5"):
            old.unlink()
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path, state: str) -> Index:
    """``places`` stays a memory map, which the processes of a machine share."""
    with h5py.File(path, "r") as file:
        if file.attrs["state"] != state:
            raise ValueError("of other files")
        arrays = {name: file[name][:] for name in _ARRAYS if name != "places"}
        places = file["places"]
        if places.size:
            start = places.id.get_offset()
            arrays["places"] = np.memmap(path, np.uint16, "r", start, places.shape).view(np.ndarray)
        else:
            arrays["places"] = places[:]
        max_tokens, max_masked = (int(width) for width in file.attrs["widths"])
        return Index(str(file.attrs["kind"]), max_tokens, max_masked, **arrays)


def build_index(paths: Sequence[Path], content: FileMap, limits: Limits) -> Index:
    """`load_index` without the cache."""

    def one(number: int) -> tuple[Shard, ShardIndex]:
        shard = inspect(paths[number])
        inside = content.bytes[content.starts[number] : content.ends[number]]
        return shard, index_shard(shard, inside, limits)

    with ThreadPoolExecutor(_THREADS) as pool:
        results = list(pool.map(one, range(len(paths))))
    shards, parts = [shard for shard, _ in results], [part for _, part in results]
    first = shards[0]
    for shard in shards:
        if shard.kind != first.kind:
            reason = f"is a {shard.kind} shard beside the {first.kind} shard {first.path.name}"
            raise UserError(shard.path, reason, "Keep one kind in a folder")
        if (shard.max_tokens, shard.max_masked) != (first.max_tokens, first.max_masked):
            reason = f"its rows have {shard.max_tokens} tokens and {shard.max_masked} masked tokens"
            reason += f", those of {first.path.name} {first.max_tokens} and {first.max_masked}"
            raise UserError(shard.path, reason, "Keep one set in a folder")
    _refuse_copies(paths, parts)
    starts = offsets_of([shard.rows for shard in shards])
    mapped = [bool(shard.offsets) and part.mapped for shard, part in results]
    offsets = [
        [shard.offsets[name] if use else -1 for name in COLUMNS] for shard, use in zip(shards, mapped, strict=True)
    ]
    return Index(
        kind=first.kind,
        max_tokens=first.max_tokens,
        max_masked=first.max_masked,
        rows=np.asarray([shard.rows for shard in shards], np.int64),
        offsets=np.asarray(offsets, np.int64),
        lengths=np.concatenate([part.lengths for part in parts]),
        counts=np.concatenate([part.counts for part in parts]),
        places=np.concatenate([part.places for part in parts]),
        problems={
            int(start) + row: text
            for start, part in zip(starts, parts, strict=False)
            for row, text in part.problems.items()
        },
    )


def _refuse_copies(paths: Sequence[Path], parts: Sequence[ShardIndex]) -> None:
    seen: dict[bytes, Path] = {}
    for path, part in zip(paths, parts, strict=True):
        if len(part.lengths):
            digest = hashlib.sha256(part.lengths.tobytes()).digest()
            other = seen.setdefault(digest, path)
            if other is not path and filecmp.cmp(path, other, shallow=False):
                raise UserError(path, f"is a copy of {other.name}", "Remove one of them")


@dataclass(frozen=True)
class ShardIndex:
    """`Index` of one shard; ``mapped`` is False when it must be read through h5py."""

    lengths: np.ndarray
    counts: np.ndarray
    places: np.ndarray
    mapped: bool
    problems: dict[int, str]


def index_shard(shard: Shard, content: np.ndarray, limits: Limits) -> ShardIndex:
    """Find lengths and places of one shard's rows and check them.

    Args:
        content: uint8, the bytes of the file.
    """
    if shard.kind == "fixed":
        return _index_fixed(shard, content, limits)
    found = heap_places(content, shard) if shard.offsets else None
    if found is None:
        return _index_rows(shard, _PlainRows(shard), limits)
    return _index_rows(shard, _MappedRows(content, *found), limits)


def _index_fixed(shard: Shard, content: np.ndarray, limits: Limits) -> ShardIndex:
    lengths = np.zeros(shard.rows, np.int64)
    problems: dict[int, str] = {}
    with open_shard(shard.path) as file:
        for start in range(0, shard.rows, _BLOCK_ROWS):
            rows = np.arange(start, min(start + _BLOCK_ROWS, shard.rows))
            if shard.offsets:
                begin = shard.offsets["input_mask"] + start * shard.max_tokens
                flat = np.frombuffer(content, np.int8, len(rows) * shard.max_tokens, begin)
            else:
                flat, _ = read_column(file, shard, "input_mask", rows)
            mask = flat.reshape(len(rows), shard.max_tokens)
            lengths[rows] = (mask == 1).sum(axis=1)
            odd = (mask != (np.arange(shard.max_tokens) < lengths[rows, None])).any(axis=1)
            problems.update({int(row): "has an input_mask that is not ones and then zeros" for row in rows[odd]})
    _note(problems, lengths < 1, "is empty")
    _note(problems, lengths > limits.max_seq_length, f"has more than {limits.max_seq_length} tokens")
    lengths[list(problems)] = 1
    none = np.empty(0, np.uint16)
    return ShardIndex(
        lengths.astype(np.uint16), none, np.empty((shard.rows, 0), np.uint16), bool(shard.offsets), problems
    )


class _MappedRows:
    """Row lengths and items of a shard's variable-length columns out of its bytes."""

    def __init__(self, content: np.ndarray, references: dict[str, np.ndarray], places: dict[str, np.ndarray]) -> None:
        self._content, self._references = content, references
        self.places = places

    def counts(self, column: str) -> np.ndarray:
        return self._references[column]["length"].astype(np.int64)

    def missing(self, column: str) -> np.ndarray:
        return (self.counts(column) > 0) & (self.places[column] == 0)

    def items(self, column: str, rows: np.ndarray) -> np.ndarray:
        addresses = self._references[column]["address"][rows].astype(np.int64)
        starts = addresses + 8 * self.places[column][rows].astype(np.int64) + HEADER_BYTES
        dtype = item_dtype(column)
        view = np.ndarray((len(self._content) - dtype.itemsize + 1,), dtype, self._content.data, 0, (1,))
        return gather_items(view, starts, self.counts(column)[rows])


class _PlainRows:
    """The same through h5py."""

    places: dict[str, np.ndarray] | None = None

    def __init__(self, shard: Shard) -> None:
        self._columns: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        with open_shard(shard.path) as file:
            for name in shard.columns:
                if shard.is_variable(name):
                    self._columns[name] = read_column(file, shard, name, np.arange(shard.rows))

    def counts(self, column: str) -> np.ndarray:
        return self._columns[column][1]

    def missing(self, column: str) -> np.ndarray:
        return np.zeros(len(self.counts(column)), bool)

    def items(self, column: str, rows: np.ndarray) -> np.ndarray:
        flat, counts = self._columns[column]
        return gather_items(flat, offsets_of(counts)[:-1][rows], counts[rows], 1)


def gather_items(view: np.ndarray, starts: np.ndarray, counts: np.ndarray, step: int = 0) -> np.ndarray:
    """Items of ranges of an array.

    Args:
        view: [B], the items; when it has one at every byte, ``step`` is left at the item size.
        starts: int64 [S], index of each range's first item.
        counts: int64 [S], items of each range.
        step: distance between items of a range in ``view``.
    """
    step = step or view.dtype.itemsize
    ends = np.cumsum(counts)
    index = np.arange(int(ends[-1]) if len(ends) else 0) * step
    return view[index + np.repeat(starts - (ends - counts) * step, counts)]


def _index_rows(shard: Shard, rows: _MappedRows | _PlainRows, limits: Limits) -> ShardIndex:
    """Index of a shard with rows of their own length; every check that needs no token."""
    problems: dict[int, str] = {}
    packed = shard.kind == "packed"
    columns = [name for name in shard.columns if shard.is_variable(name)]
    for name in columns:
        _note(problems, rows.missing(name), f"has a {name} that is not in the file")
    tokens, masked = rows.counts("input_ids"), rows.counts("masked_lm_ids")
    _note(problems, tokens < 1, "is empty")
    _note(problems, tokens > limits.max_seq_length, f"has more than {limits.max_seq_length} tokens")
    _note(problems, rows.counts("segment_ids") != tokens, "has segment_ids of another length than input_ids")
    different = "has masked_lm_positions of another length than masked_lm_ids"
    _note(problems, rows.counts("masked_lm_positions") != masked, different)
    if packed:
        lengths, counts = _index_packs(shard, rows, limits, problems)
    else:
        _note(problems, masked > limits.max_predictions, f"has more than {limits.max_predictions} masked tokens")
        lengths, counts = tokens.copy(), np.empty(0, np.int64)
        lengths[list(problems)] = 1
    kept = [name for name in COLUMNS if name in columns]
    if rows.places is None:
        places = np.zeros((shard.rows, len(kept)), np.uint16)
    else:
        places = np.stack([rows.places[name] for name in kept], axis=1)
    return ShardIndex(lengths.astype(np.uint16), counts.astype(np.uint16), places, rows.places is not None, problems)


def _index_packs(
    shard: Shard, rows: _MappedRows | _PlainRows, limits: Limits, problems: dict[int, str]
) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of the sequences (int64 [N]) and how many each pack has (int64 [R]); notes bad packs."""
    counts = rows.counts("packed_input_len").copy()
    _note(problems, counts < 1, "has no packed_input_len")
    for name in ("packed_masked_lm_len", "next_sentence_labels"):
        _note(problems, rows.counts(name) != counts, f"has {name} of another length than packed_input_len")
    good = np.ones(shard.rows, bool)
    good[list(problems)] = False
    chosen = np.flatnonzero(good)
    pack_of = np.repeat(chosen, counts[chosen])
    lengths = rows.items("packed_input_len", chosen).astype(np.int64)
    masked = rows.items("packed_masked_lm_len", chosen).astype(np.int64)

    def with_any(bad: np.ndarray) -> np.ndarray:
        return np.bincount(pack_of[bad], minlength=shard.rows) > 0

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(pack_of, values, minlength=shard.rows).astype(np.int64)

    _note(problems, with_any(lengths < 1), "has a sequence without tokens in packed_input_len")
    _note(problems, good & (total(lengths) != rows.counts("input_ids")), "has a packed_input_len that does not add up")
    sums = total(masked) != rows.counts("masked_lm_ids")
    _note(problems, good & sums, "has a packed_masked_lm_len that does not add up")
    too_many = (masked < 0) | (masked > limits.max_predictions)
    _note(problems, with_any(too_many), f"has a sequence with more than {limits.max_predictions} masked tokens")
    bad = np.asarray(sorted(problems), np.int64)
    result = np.ones(shard.rows, np.int64)
    good[bad] = False
    result[good] = counts[good]
    flat = np.ones(int(result.sum()), np.int64)
    flat[np.repeat(good, result)] = lengths[good[pack_of]]
    return flat, result


def _note(problems: dict[int, str], where: np.ndarray, text: str) -> None:
    """Remember the first problem of each row."""
    for row in np.flatnonzero(where).tolist():
        problems.setdefault(row, text)
