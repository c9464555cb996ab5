"""Which files of a folder are NVIDIA's HDF5 shards, in which order, and which are bins by length: their names tell."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import h5py

from mlbert.data.formats.manifest import reading
from mlbert.host.errors import UserError

SUFFIXES = (".hdf5", ".hdf", ".h5", "")
_NUMBERED = re.compile(r"part[-_](\d+)(?:[-_]of[-_](\d+))?")
_BIN = re.compile(r"bin[-_]?\d+(?:[-_]\d+)?")


def list_shards(folder: Path) -> list[Path]:
    """The HDF5 files of a folder, by shard number and name; a file is a folder of one.

    Files count as shards when they end in .hdf5, .hdf or .h5, or have no ending and begin like HDF5; beside one of
    these also what is called ``part_<number>`` and does not begin so.

    Raises UserError: no folder; a shard of ``part_i_of_n`` is missing or there twice; shards of two numberings.
    """
    if folder.is_file():
        return [folder]
    with reading(folder, "Give a folder of HDF5 shards"):
        found = _shard_files(folder)
    for group in _groups(found).values():
        _check_numbers(folder, group)
    return sorted(found, key=lambda path: (_group_of(path), _number(path), path.name))


def bins_of(folder: Path) -> list[list[Path]]:
    """The length bins of a folder: its sub-folders that hold shards, or its files grouped by ``bin<number>`` in their
    names; in the order of the numbers in their names. Empty when the folder has no bins."""
    if not folder.is_dir():
        return []
    files = list_shards(folder)
    if not files:
        folders = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: _by_number(path.name))
        return [shards for path in folders if (shards := list_shards(path))]
    groups = _groups(files)
    return list(groups.values()) if len(groups) > 1 else []


def check_bins(folder: Path, lengths: Mapping[str, tuple[int, int]]) -> None:
    """Make sure that what looks like bins is cut by length: no two share one. A folder that holds, say, training and
    evaluation data side by side is no set. ``lengths`` has the tokens of each bin's shortest and longest sequence."""
    order = sorted(lengths.items(), key=lambda item: item[1])
    for (one, (first, last)), (other, (next_first, next_last)) in itertools.pairwise(order):
        if next_first <= last:
            reason = f"{one} (lengths {first} to {last}) and {other} ({next_first} to {next_last})"
            raise UserError("data.mixed", folder, f"{reason} are no length bins of one set", "Give one of the folders")


def bin_name(path: Path) -> str:
    """What names the bin of a shard: ``bin<number>`` in its name, or its folder."""
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
    """Sorts 64 before 128 and bin2 before bin10."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"(\d+)", name)]


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
    """Of ``part_i_of_n`` every i from 0 to n-1 must be there exactly once."""
    seen: dict[int, Path] = {}
    totals: dict[int, Path] = {}
    for path in paths:
        match = _NUMBERED.search(path.name)
        if match is None:
            continue
        number = int(match.group(1))
        if number in seen:
            raise UserError(
                "data.duplicate", path, f"has the same shard number as {seen[number].name}", "Remove one of them"
            )
        seen[number] = path
        if match.group(2):
            totals[int(match.group(2))] = path
    if len(totals) > 1:
        one, other = list(totals.values())[:2]
        raise UserError("data.mixed", other, f"is of another set than {one.name}", "Keep one set in a folder")
    for total in totals:
        missing = [number for number in range(total) if number not in seen]
        if missing:
            which = f"{len(missing)} of {total} shards are missing, the first is number {missing[0]}"
            raise UserError("data.incomplete", folder, which, "Restore the missing files")
        if len(seen) > total:
            raise UserError(
                "data.mixed", seen[max(seen)], f"its number is beyond the {total} shards of the set", "Remove it"
            )
