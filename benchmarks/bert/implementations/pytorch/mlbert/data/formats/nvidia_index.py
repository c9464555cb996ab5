"""Index of NVIDIA's HDF5 shards for random access,
and recognition of shards and length bins by file name.

Building the index reads every file's references and heap chains (or input masks), so it is cached
(`mlbert.data.formats.index_cache`).

Legend: F files, R rows of all files, N sequences, C variable-length columns of `COLUMNS`.
"""

from __future__ import annotations

import filecmp
import hashlib
import itertools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import h5py
import numpy as np

from mlbert.data.formats.file_map import FileMap, at_every_byte
from mlbert.data.formats.index_cache import IndexCache
from mlbert.data.formats.manifest import reading
from mlbert.data.formats.nvidia_shard import (
    COLUMNS,
    HEADER_BYTES,
    KINDS,
    Items,
    NvidiaShard,
    heap_places,
    inspect,
    item_dtype,
    open_shard,
    read_column,
)
from mlbert.data.formats.padded import Widths
from mlbert.data.formats.ragged import offsets_of
from mlbert.host.errors import UserError

_VERSION = 2
_THREADS = 4
_BLOCK_ROWS = 8192
_ARRAYS = ("head", "rows", "offsets", "lengths", "counts", "places")
SUFFIXES = (".hdf5", ".hdf", ".h5", "")  # of shards
_NUMBERED = re.compile(r"part[-_](\d+)(?:[-_]of[-_](\d+))?")  # number and count of a shard
_BIN = re.compile(r"bin[-_]?\d+(?:[-_]\d+)?")  # of lengths, in the name of a shard


@dataclass(frozen=True)
class NvidiaIndex:
    """Rows and lengths of a set of shards."""

    # int64 [3], index of the kind in `KINDS`, widths of tokens
    # and masked tokens of fixed shards (or 0).
    head: np.ndarray
    rows: np.ndarray  # int64 [F]
    # int64 [F, 5], byte offset of each of `COLUMNS` in its file;
    # -1 if the file is read through h5py.
    offsets: np.ndarray
    lengths: np.ndarray  # uint16 [N], tokens of each sequence
    counts: np.ndarray  # uint16 [R], sequences of each row; empty if each has one
    places: np.ndarray  # uint16 [R, C], see `heap_places`; empty for fixed shards
    # Row (over all files) -> its problem; the lengths of such a row are invalid.
    problems: dict[int, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """ "fixed", "variable" or "packed"."""
        return KINDS[self.head[0]]

    @property
    def widths(self) -> Widths:
        """Widths of ``input_ids`` and ``masked_lm_ids`` of fixed shards."""
        return Widths(*self.head[1:].tolist())


def load_index(
    paths: Sequence[Path], content: FileMap, limits: Widths, cached: bool = True
) -> NvidiaIndex:
    """Return the index of some shards from the cache or the files.

    Raises UserError if a file is damaged, of another kind than the first, or a copy of another.
    ``limits`` are the maximum tokens of a row, and masked tokens of a sequence.
    """
    if not cached:
        return build_index(paths, content, limits)
    cache = IndexCache("nvidia", paths, [_VERSION, limits.max_seq_length, limits.max_predictions])

    def make() -> dict[str, object]:
        made = vars(build_index(paths, content, limits))
        return made if made["problems"] else {name: made[name] for name in _ARRAYS}

    return cache.once(NvidiaIndex, _ARRAYS, make)


def build_index(paths: Sequence[Path], content: FileMap, limits: Widths) -> NvidiaIndex:
    """Build the index of `load_index` without the cache."""

    def one(number: int) -> NvidiaIndex:
        inside = content.bytes[content.starts[number] : content.ends[number]]
        return index_shard(inspect(paths[number]), inside, limits)

    with ThreadPoolExecutor(_THREADS) as pool:
        parts = list(pool.map(one, range(len(paths))))
    first = parts[0]
    for path, part in zip(paths, parts, strict=True):
        if part.kind != first.kind:
            reason = f"is a {part.kind} shard next to the {first.kind} shard {paths[0].name}"
            raise UserError("data.mixed", path, reason, "Keep one kind in a folder")
        if (part.head != first.head).any():
            tokens, masked = part.widths
            others = " and ".join(map(str, first.widths))
            reason = (
                f"its rows have {tokens} tokens and {masked} masked tokens, "
                f"but those of {paths[0].name} have {others}"
            )
            raise UserError("data.mixed", path, reason, "Keep one set in a folder")
    _refuse_copies(paths, parts)
    joined = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in _ARRAYS
        if name != "head"
    }
    starts = offsets_of(joined["rows"])[:-1].tolist()
    problems = {
        start + row: text
        for start, part in zip(starts, parts, strict=True)
        for row, text in part.problems.items()
    }
    return replace(first, **joined, problems=problems)


def _refuse_copies(paths: Sequence[Path], parts: Sequence[NvidiaIndex]) -> None:
    seen: dict[bytes, Path] = {}
    for path, part in zip(paths, parts, strict=True):
        if len(part.lengths):
            digest = hashlib.sha256(part.lengths.tobytes()).digest()
            other = seen.setdefault(digest, path)
            if other is not path and filecmp.cmp(path, other, shallow=False):
                raise UserError(
                    "data.duplicate", path, f"is a copy of {other.name}", "Remove one of them"
                )


def index_shard(shard: NvidiaShard, content: np.ndarray, limits: Widths) -> NvidiaIndex:
    """Find and check the lengths and places of one shard's rows; ``content`` is the file's bytes,
    uint8. ``limits`` are used if the shard does not record its own.
    """
    if shard.recorded is not None:
        limits = Widths(shard.recorded.max_row_tokens, shard.recorded.max_predictions)
    problems: dict[int, str] = {}
    columns: dict[str, Items] = {}
    places: dict[str, np.ndarray] = {}
    if shard.kind == "fixed":
        tokens = _mask_lengths(shard, content, problems)
        is_mapped = bool(shard.offsets)
    else:
        columns, places = _columns(shard, content)
        tokens = columns["input_ids"].counts
        is_mapped = bool(places)
        for name, places_of in places.items():
            _note(
                problems,
                (columns[name].counts > 0) & (places_of == 0),
                f"has {name} that are not in the file",
            )
    _note(problems, tokens < 1, "is empty")
    _note(problems, tokens > limits.max_seq_length, f"has more than {limits.max_seq_length} tokens")
    if columns:
        for name, other in (
            ("segment_ids", "input_ids"),
            ("masked_lm_positions", "masked_lm_ids"),
        ):
            different = columns[name].counts != columns[other].counts
            _note(problems, different, f"has {name} of a different length than {other}")
    if shard.kind == "packed":
        lengths, counts = _index_packs(shard, columns, limits, problems)
    else:
        if columns:
            too_many = columns["masked_lm_ids"].counts > limits.max_predictions
            _note(problems, too_many, f"has more than {limits.max_predictions} masked tokens")
        lengths = tokens.copy()
        counts = np.empty(0)
        lengths[list(problems)] = 1
    table = [places.get(name, np.zeros(shard.rows)) for name in COLUMNS if name in columns]
    return NvidiaIndex(
        head=np.array([KINDS.index(shard.kind), *shard.widths]),
        rows=np.array([shard.rows]),
        offsets=np.array([[shard.offsets[name] if is_mapped else -1 for name in COLUMNS]]),
        lengths=lengths.astype(np.uint16),
        counts=counts.astype(np.uint16),
        places=np.array(table, np.uint16).reshape(len(table), shard.rows).T.copy(),
        problems=problems,
    )


def _mask_lengths(shard: NvidiaShard, content: np.ndarray, problems: dict[int, str]) -> np.ndarray:
    """Return int64 [R], the tokens of the rows of a fixed shard; records bad input masks."""
    lengths = np.zeros(shard.rows, np.int64)
    width = shard.widths.max_seq_length
    with open_shard(shard.path) as file:
        for start in range(0, shard.rows, _BLOCK_ROWS):
            rows = np.arange(start, min(start + _BLOCK_ROWS, shard.rows))
            if shard.offsets:
                begin = shard.offsets["input_mask"] + start * width
                flat = content[begin : begin + len(rows) * width]
                mask = flat.view(np.int8).reshape(len(rows), width)
            else:
                mask = np.stack(read_column(file, "input_mask", rows))
            lengths[rows] = (mask == 1).sum(axis=1)
            odd = (mask != (np.arange(width) < lengths[rows, None])).any(axis=1)
            problems.update(
                dict.fromkeys(
                    rows[odd].tolist(), "has an input_mask that is not ones and then zeros"
                )
            )
    return lengths


def _columns(
    shard: NvidiaShard, content: np.ndarray
) -> tuple[dict[str, Items], dict[str, np.ndarray]]:
    """Return the variable-length columns of a shard and their `heap_places`,
    empty if it is read through h5py.
    """
    found = heap_places(content, shard) if shard.offsets else None
    if found is None:
        names = [name for name in shard.columns if shard.is_variable(name)]
        with open_shard(shard.path) as file:
            rows = {name: read_column(file, name, np.arange(shard.rows)) for name in names}
        return {name: Items.of_rows(rows[name], name) for name in names}, {}
    references, places = found
    columns = {}
    for name, table in references.items():
        dtype = item_dtype(name)
        starts = item_starts(table, places[name])
        counts = table["length"].astype(np.int64)
        columns[name] = Items(at_every_byte(content, dtype), starts, counts, dtype.itemsize)
    return columns, places


def item_starts(references: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return int64 [S], the byte offset of each row's items in the file,
    from `REFERENCE` [S] and its `heap_places`.
    """
    return references["address"].astype(np.int64) + 8 * places.astype(np.int64) + HEADER_BYTES


def _index_packs(
    shard: NvidiaShard, columns: dict[str, Items], limits: Widths, problems: dict[int, str]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths of the sequences (int64 [N])
    and the number in each pack (int64 [R]); records bad packs.
    """
    counts = columns["packed_input_len"].counts
    _note(problems, counts < 1, "has no packed_input_len")
    for name in ("packed_masked_lm_len", "next_sentence_labels"):
        _note(
            problems,
            columns[name].counts != counts,
            f"has {name} of a different length than packed_input_len",
        )
    good = np.ones(shard.rows, bool)
    good[list(problems)] = False
    chosen = np.flatnonzero(good)
    pack_of = np.repeat(chosen, counts[chosen])
    lengths = columns["packed_input_len"].of(chosen).gather().astype(np.int64)
    masked = columns["packed_masked_lm_len"].of(chosen).gather().astype(np.int64)

    def with_any(bad: np.ndarray) -> np.ndarray:
        return np.bincount(pack_of[bad], minlength=shard.rows) > 0

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(pack_of, values, minlength=shard.rows).astype(np.int64)

    _note(problems, with_any(lengths < 1), "has a sequence without tokens in packed_input_len")
    for name, values, column in (
        ("packed_input_len", lengths, "input_ids"),
        ("packed_masked_lm_len", masked, "masked_lm_ids"),
    ):
        _note(
            problems,
            good & (total(values) != columns[column].counts),
            f"has a {name} that does not add up",
        )
    too_many = (masked < 0) | (masked > limits.max_predictions)
    _note(
        problems,
        with_any(too_many),
        f"has a sequence with more than {limits.max_predictions} masked tokens",
    )
    bad = np.asarray(sorted(problems), np.int64)
    result = np.ones(shard.rows, np.int64)
    good[bad] = False
    result[good] = counts[good]
    flat = np.ones(int(result.sum()), np.int64)
    flat[np.repeat(good, result)] = lengths[good[pack_of]]
    return flat, result


def _note(problems: dict[int, str], where: np.ndarray, text: str) -> None:
    """Record the first problem of each row."""
    for row in np.flatnonzero(where).tolist():
        problems.setdefault(row, text)


def list_shards(folder: Path) -> list[Path]:
    """Return the HDF5 files of a folder, sorted by shard number and name;
    a path of a file returns that file.

    Files are shards if they end in .hdf5, .hdf or .h5, or have no suffix and start like HDF5. If
    there is one without a suffix, files named ``part_<number>`` count even if they do not start
    like HDF5.

    Raises UserError if there is no folder, a shard of ``part_i_of_n`` is missing or duplicated,
    or n differs.
    """
    if folder.is_file():
        return [folder]
    with reading(folder, "Give a folder of HDF5 shards"):
        found = _shard_files(folder)
    for group in _groups(found).values():
        _check_numbers(folder, group)
    return sorted(found, key=lambda path: (_group_of(path), _number(path), path.name))


def bins_of(folder: Path) -> list[list[Path]]:
    """Return the shards of each length bin of a folder, in the order of the numbers in their names:
    sub-folders with shards, or files grouped by ``bin<number>`` in their names. Empty if there are
    no bins.
    """
    if not folder.is_dir():
        return []
    files = list_shards(folder)
    if not files:
        folders = sorted(
            (path for path in folder.iterdir() if path.is_dir()),
            key=lambda path: _by_number(path.name),
        )
        return [shards for path in folders if (shards := list_shards(path))]
    groups = _groups(files)
    return list(groups.values()) if len(groups) > 1 else []


def check_bins(folder: Path, lengths: Mapping[str, tuple[int, int]]) -> None:
    """Check that bins do not overlap in length; otherwise the folder may hold, say,
    training and evaluation data.

    ``lengths`` has the tokens of each bin's shortest and longest sequence.
    Raises UserError if bins overlap.
    """
    order = sorted(lengths.items(), key=lambda item: item[1])
    for (one, (first, last)), (other, (next_first, next_last)) in itertools.pairwise(order):
        if next_first <= last:
            reason = f"{one} (lengths {first} to {last}) and {other} ({next_first} to {next_last})"
            raise UserError(
                "data.mixed",
                folder,
                f"{reason} are not length bins of the same set",
                "Give one of the folders",
            )


def bin_name(path: Path) -> str:
    """Return the name of a shard's bin: ``bin<number>`` in its name,
    otherwise its folder's name.
    """
    return _group_of(path) or path.parent.name


def _group_of(path: Path) -> str:
    match = _BIN.search(path.name)
    return match.group() if match else ""


def _groups(paths: Sequence[Path]) -> dict[str, list[Path]]:
    groups = defaultdict(list)
    for path in paths:
        groups[_group_of(path)].append(path)
    return dict(sorted(groups.items(), key=lambda item: _by_number(item[0])))


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts 64 before 128 and bin2 before bin10."""
    return [
        (int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"(\d+)", name)
    ]


def _number(path: Path) -> int:
    match = _NUMBERED.search(path.name)
    return int(match.group(1)) if match else -1


def _shard_files(folder: Path) -> list[Path]:
    files = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
    plain = [path for path in files if not path.suffix]
    found = [path for path in files if path.suffix and path.suffix in SUFFIXES]
    if any(h5py.is_hdf5(path) for path in plain):
        found += [path for path in plain if _NUMBERED.fullmatch(path.name) or h5py.is_hdf5(path)]
    return sorted(found)


def _check_numbers(folder: Path, paths: Sequence[Path]) -> None:
    """Raise UserError unless each i from 0 to n-1 of ``part_i_of_n`` exists exactly once."""
    seen: dict[int, Path] = {}
    totals: dict[int, Path] = {}
    for path in paths:
        if match := _NUMBERED.search(path.name):
            if (other := seen.setdefault(int(match[1]), path)) is not path:
                reason = f"has the same shard number as {other.name}"
                raise UserError("data.duplicate", path, reason, "Remove one of them")
            if match[2]:
                totals[int(match[2])] = path
    if len(totals) > 1:
        one, other = list(totals.values())[:2]
        raise UserError(
            "data.mixed",
            other,
            f"belongs to a different set than {one.name}",
            "Keep one set in a folder",
        )
    for total in totals:
        if missing := sorted(set(range(total)) - set(seen)):
            which = (
                f"{len(missing)} of {total} shards are missing, the first is number {missing[0]}"
            )
            raise UserError("data.incomplete", folder, which, "Restore the missing files")
        if len(seen) > total:
            reason = f"its number is beyond the {total} shards of the set"
            raise UserError("data.mixed", seen[max(seen)], reason, "Remove it")
