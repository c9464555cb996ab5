"""Caches of results that need reading whole data files: index arrays and content digests.

Arrays are in the user's cache folder, ``$XDG_CACHE_HOME/mlbert`` (by default ``~/.cache/mlbert``),
never with the data: one folder per set of files, one .npy per array, and the checksums of these
files. They are valid while every file has the same path, size and modification time. They are read
as memory maps, which the processes of a machine share.

Content digests identify data without a manifest. `mlbert prepare verify` hashes every file and
stores the digest of the set there too. It is valid while each file has the same name, size and
modification time, even if the folder moves. Reading it opens no data file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mlbert.data.formats.checksums import file_xxh3
from mlbert.data.formats.manifest import json_sha256, make_folder
from mlbert.data.formats.mds_files import locked
from mlbert.host.errors import UserError
from mlbert.host.files import read_plain, write_atomically
from mlbert.host.json_files import read_json
from mlbert.host.native import cache_folder

_T = TypeVar("_T")
_SHA256 = re.compile("[0-9a-f]{64}")
_DAMAGED = OSError, ValueError, EOFError  # ValueError: also UserError; EOFError: an empty file
_FORMAT = 2  # of the folder of a cache
_CHECKSUMS = "checksums.json"  # XXH3 of each other file of a cache, by name


class IndexCache:
    """The cached arrays of one set of files.

    ``folder`` holds all caches of this ``kind``. ``options`` are JSON-serializable values other
    than the files that the arrays depend on, such as a version or limits. Of the same files, the
    ``keep`` newest caches remain.
    """

    def __init__(
        self, kind: str, paths: Sequence[Path], options: Sequence[object], keep: int = 1
    ) -> None:
        files = [
            (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths
        ]
        which = files[0][0]
        state = json.dumps([_FORMAT, options, files])
        self._which, self._state = (
            hashlib.sha256(text.encode()).hexdigest()[:32] for text in (which, state)
        )
        self.folder = cache_folder() / kind
        self._keep = keep
        self._kept = self.folder / f"{self._which}-{self._state}"

    def once(
        self, kind: Callable[..., _T], names: Sequence[str], make: Callable[[], Mapping[str, Any]]
    ) -> _T:
        """Return ``kind`` of the stored arrays, or, if they are missing or it raises ValueError, of
        what ``make`` returns, which is stored if it has these ``names`` only. One process makes it
        while the others wait.
        """
        with contextlib.suppress(*_DAMAGED):
            return kind(**self._read(names))
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(UserError):  # without a lock, each makes it
                stack.enter_context(
                    locked(self.folder.with_name(f"{self.folder.name}-{self._which}"))
                )
            with contextlib.suppress(*_DAMAGED):
                return kind(**self._read(names))
            made = make()
            if made.keys() == set(names):
                self.write(made)
                with contextlib.suppress(*_DAMAGED):
                    return kind(**self._read(names))  # the map, which processes share
            return kind(**made)

    def _read(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the maps of the stored arrays.

        Raises an exception of `_DAMAGED` if they are missing or damaged.
        """
        checksums = read_json(self._kept / _CHECKSUMS, "Remove it")
        found = {}
        for name in names:
            path = self._kept / f"{name}.npy"
            if checksums.get(path.name) != file_xxh3(path):
                raise ValueError(f"{path} is damaged")
            found[name] = np.load(path, mmap_mode="r").view(np.ndarray)
        return found

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Store arrays, and delete older ones of the same files.

        Write errors are ignored: the only cost is time at the next opening.
        """
        with contextlib.suppress(OSError, UserError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=".index-", dir=self.folder))
            try:
                checksums = {}
                for name, array in arrays.items():
                    path = temporary / f"{name}.npy"
                    np.save(path, array)
                    checksums[path.name] = file_xxh3(path)
                (temporary / _CHECKSUMS).write_text(json.dumps(checksums), encoding="utf-8")
                newest = sorted(
                    self.folder.glob(f"{self._which}-*"), key=os.path.getmtime, reverse=True
                )
                # One of this name must be damaged, or it would have been read.
                for old in (self._kept, *newest[self._keep - 1 :]):
                    shutil.rmtree(old, ignore_errors=True)
                os.rename(temporary, self._kept)  # atomic, so that one of several processes wins
            finally:
                shutil.rmtree(temporary, ignore_errors=True)


def state_of(path: Path) -> list[int]:
    """Return size and modification time (ns) of a file. Raises OSError."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def content_of(folder: Path, paths: Sequence[Path]) -> str | None:
    """Return the sha256 of the output of ``sha256sum`` for files of ``folder``, sorted by name, or
    None if they were not hashed or have changed since.
    """
    with contextlib.suppress(OSError, UserError, ValueError):
        kept = read_plain(_place(folder, {path: state_of(path) for path in paths})).decode()
        return kept if _SHA256.fullmatch(kept) else None
    return None


def keep_digests(
    folder: Path, digests: Mapping[Path, str], states: Mapping[Path, list[int]]
) -> None:
    """Store what `content_of` returns from the sha256 of each file and its state before it was
    read. If the cache is not writable, the files remain identified by names and sizes.
    """
    named = sorted((name_of(folder, path), digest) for path, digest in digests.items())
    content = hashlib.sha256(
        "".join(f"{digest}  {name}\n" for name, digest in named).encode()
    ).hexdigest()
    with contextlib.suppress(UserError):
        place = _place(folder, {path: states[path] for path in digests})
        make_folder(place.parent)
        write_atomically(place, content)


def name_of(folder: Path, path: Path) -> str:
    """Return a file's path relative to its folder, or its name if the file is the whole set."""
    return path.name if path == folder else path.relative_to(folder).as_posix()


def _place(folder: Path, states: Mapping[Path, list[int]]) -> Path:
    """Return the file for the digest of some files in these states."""
    named = sorted([name_of(folder, path), *state] for path, state in states.items())
    return cache_folder() / "content" / json_sha256(named)
