"""The user's cache: what is in it, and deleting what no run holds.

An entry is a file of the cache folder, or a folder two levels deep, such as ``mds/<index>``: what
is made and read together. Names that no part of mlbert writes are not entries.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlbert.data.formats.cache_limit import files_below, held_files
from mlbert.host.files import writing

_DAY = 86_400.0
_MEANINGS = {
    "mds": "shards, tokens and orders of MDS sets",
    "packs": "packs of unpacked sets",
    "tfrecord": "places of records",
    "nvidia": "places of records",
    "content": "digests of sets",
    "weights": "fetched weights",
}
_FILE = re.compile(r"([a-z_]+)-[0-9a-f]{32}\.(so|json)")
_FILE_MEANINGS = {"so": "compiled kernels", "json": "measured speeds and proofs of kernels"}


@dataclass(frozen=True)
class Entry:
    """An entry of the cache.

    Attributes:
        path: of the file or folder.
        meaning: what it is.
        num_bytes: on the disk.
        used: time of the last use of any of its files, seconds; at most a day too early, because
            Linux notes reads that rarely.
        is_held: a process of this machine has mapped a file of it.
    """

    path: Path
    meaning: str
    num_bytes: int
    used: float
    is_held: bool


def read_entries(folder: Path) -> list[Entry]:
    """Return the entries of a cache folder, the last used ones first."""
    held = held_files([folder])
    entries = [
        _entry(path, meaning, held) for path in _children(folder) for path, meaning in _parts(path)
    ]
    return sorted(entries, key=lambda entry: entry.used, reverse=True)


def _children(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _parts(path: Path) -> list[tuple[Path, str]]:
    """Return the entries below a child of the cache folder, each with its meaning."""
    if path.is_symlink():
        return []
    if path.is_dir():
        meaning = _MEANINGS.get(path.name)
        parts = [part for part in _children(path) if not part.name.startswith(".")]
        return [(part, meaning) for part in parts] if meaning else []
    found = _FILE.fullmatch(path.name)
    return [(path, _FILE_MEANINGS[found[2]])] if found else []


def _entry(path: Path, meaning: str, held: set[str]) -> Entry:
    real = os.path.realpath(path)
    is_held = any(one == real or one.startswith(f"{real}/") for one in held)
    if path.is_dir() and not path.is_symlink():
        files = [(file.num_bytes, file.used, file.path) for file in files_below(path)]
    else:
        status = path.lstat()
        files = [(status.st_blocks * 512, status.st_mtime, path)]
    size = sum(num_bytes for num_bytes, _, _ in files)
    used = max((max(time_, one.lstat().st_atime) for _, time_, one in files), default=0.0)
    return Entry(path, meaning, size, used, is_held)


def clear(entries: Sequence[Entry], days: float, most_bytes: int) -> tuple[list[Entry], int]:
    """Delete entries that no process holds, those first that were not used for longest.

    Args:
        entries: of `read_entries`.
        days: keep what was used in so many days.
        most_bytes: stop once all entries together are within this limit.

    Returns:
        The deleted entries, and the bytes that remain.

    Raises:
        UserError: one cannot be deleted.
    """
    left = sum(entry.num_bytes for entry in entries)
    newest = time.time() - days * _DAY
    deleted = []
    for entry in sorted(entries, key=lambda entry: entry.used):
        if left <= most_bytes or entry.used > newest:
            break
        if entry.is_held:
            continue
        with writing(entry.path, "Check its permissions"):
            if entry.path.is_dir() and not entry.path.is_symlink():
                shutil.rmtree(entry.path)
            else:
                entry.path.unlink()
        deleted.append(entry)
        left -= entry.num_bytes
    return deleted, left
