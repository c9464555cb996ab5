"""Keep the local copies of sets below a limit: delete what was not used for longest.

Shards of a set elsewhere, decompressed shards and tokens are files in the set's cache folder
(`mlbert.data.formats.mds_files`, `token_shards`), whose modification time is that of their last
use. A file that a process of this machine has mapped is held by a run and stays. Only files with
the names that these modules give are deleted.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlbert.data.formats.mds_files import locked
from mlbert.host.errors import UserError
from mlbert.host.machine import read_text

TOKENS_SUFFIX = ".ids"
_LOCK = "cache"
_BLOCK_BYTES = 4096
_OPEN_SHARES = 4  # of the limit
# For which a file stays after its last use: another process may be about to map it.
_FRESH_SECONDS = 2.0
_PROCESSES = Path("/proc")


def disk_bytes(num_bytes: int) -> int:
    """Return the bytes that a file of this size takes on a disk."""
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


@dataclass(frozen=True)
class CachedFile:
    """A file of a cache.

    Attributes:
        num_bytes: its size on the disk.
        used: time of its last use, seconds.
    """

    path: Path
    num_bytes: int
    used: float


def touch(path: Path) -> None:
    """Record that a file of a cache is used now. Does nothing if it cannot be changed."""
    with contextlib.suppress(OSError):
        os.utime(path)


def files_below(folder: Path) -> Iterator[CachedFile]:
    """Yield all files below a folder; those that vanish meanwhile are left out."""
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            with contextlib.suppress(OSError):
                status = path.lstat()
                yield CachedFile(path, status.st_blocks * 512, status.st_mtime)


def held_files(folders: Sequence[Path]) -> set[str]:
    """Return the paths below these folders that processes of this machine have mapped, as far as
    this user may see them.
    """
    prefixes = tuple(f"{os.path.realpath(folder)}/" for folder in folders)
    held = set()
    for process in _PROCESSES.iterdir():
        if not process.name.isdecimal():
            continue
        for line in read_text(process / "maps").splitlines():
            path = line.split(maxsplit=5)[-1]
            if path.startswith(prefixes):
                held.add(path)
    return held


class CacheLimit:
    """The limit of the caches of a run's sets on one machine. Its processes share it: each calls
    `trim` after it has made a file.

    Args:
        most_bytes: of all files of these caches.
        caches: each folder, with a function that returns True for the name of one of its shards.
            These, and the files of their tokens, may be deleted.
        warn: called once, with one line, if the files in use are more than the limit.
    """

    def __init__(
        self,
        most_bytes: int,
        caches: Sequence[tuple[Path, Callable[[str], bool]]],
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.most_bytes = most_bytes
        # What each process keeps mapped of a set's shards, and of all tokens.
        self.open_bytes = most_bytes // _OPEN_SHARES
        self._is_shard = dict(caches)
        self._warn = warn
        self._has_warned = False

    def trim(self) -> None:
        """Delete files, those first that were not used for longest, until the rest is within the
        limit. One process does it at a time.
        """
        folders = list(self._is_shard)
        try:
            with locked(folders[0] / _LOCK):
                self._trim(folders)
        except UserError:  # the folder is not writable, so this run makes no files there
            return

    def _trim(self, folders: Sequence[Path]) -> None:
        found = [
            file
            for folder in folders
            for file in files_below(folder)
            if self._may_go(folder, file.path)
        ]
        excess = sum(file.num_bytes for file in found) - self.most_bytes
        if excess <= 0:
            return
        held = held_files(folders)
        newest = time.time() - _FRESH_SECONDS
        for file in sorted(found, key=lambda file: file.used):
            if excess <= 0:
                return
            if file.used < newest and os.path.realpath(file.path) not in held:
                with contextlib.suppress(OSError):
                    file.path.unlink()
                    excess -= file.num_bytes
        if excess > self.most_bytes // 2 and not self._has_warned:
            self._has_warned = True
            self._warn(
                f"warning: CACHE_LIMIT: the run keeps {excess / 1e9:.3g} GB more than this at "
                "once. Raise it, or lower CANONICAL_NODES for new runs."
            )

    def _may_go(self, folder: Path, path: Path) -> bool:
        name = path.relative_to(folder).as_posix()
        first, _, rest = name.partition("/")
        if first.startswith("tokens-") and rest.endswith(TOKENS_SUFFIX):
            name = rest.removesuffix(TOKENS_SUFFIX)
        return self._is_shard[folder](name)
