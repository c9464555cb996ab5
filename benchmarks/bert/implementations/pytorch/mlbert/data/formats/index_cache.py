"""Arrays that are found by reading whole data files, kept in the user's cache folder, never beside the data.

They lie in ``$XDG_CACHE_HOME/mlbert`` (by default ``~/.cache/mlbert``), a folder for each set of files with one .npy
for each array, and count while every file has the same path, size and modification time. They are read as memory maps,
which the processes of a machine share.

What names the data of folders that bring no manifest: names and sizes, or contents once somebody has hashed them.

`mlbert prepare verify` hashes every file and keeps the digests in ``.mlbert-content.json`` beside them, or where the
folder cannot be written in the user's cache folder. They count while each file has the size and the modification time
that it had then, wherever the folder lies; looking opens no data file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlbert.data.formats.manifest import make_folder, write_json
from mlbert.host.errors import UserError
from mlbert.host.files import read_plain
from mlbert.host.json_files import parse_json
from mlbert.host.native import cache_folder


class IndexCache:
    """What is kept of one set of files of a kind, whose ``folder`` holds all that is kept of this kind. ``options`` are
    what the arrays depend on besides the files, JSON-able: their own version, limits."""

    def __init__(self, kind: str, paths: Sequence[Path], options: Sequence[object]) -> None:
        files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        which, state = files[0][0], json.dumps([options, files])
        self._which, self._state = (hashlib.sha256(text.encode()).hexdigest()[:32] for text in (which, state))
        self.folder = cache_folder() / kind
        self._kept = self.folder / f"{self._which}-{self._state}"

    def read(self, names: Sequence[str]) -> dict[str, Any]:
        """The arrays that `write` kept. Raises OSError or ValueError where there are none, or damaged ones."""
        try:
            return {name: np.load(self._kept / f"{name}.npy", mmap_mode="r").view(np.ndarray) for name in names}
        except EOFError:  # an empty file
            raise ValueError("not an array") from None

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep arrays instead of older ones of the same files. A cache that cannot be written costs time at the next
        opening, nothing else."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=".index-", dir=self.folder))
            try:
                for name, array in arrays.items():
                    np.save(temporary / f"{name}.npy", array)
                for old in self.folder.glob(f"{self._which}-*"):
                    shutil.rmtree(old)  # also one of this name: it is damaged, or it would have been read
                os.rename(temporary, self._kept)  # the whole folder at once: of several processes one wins
            finally:
                shutil.rmtree(temporary, ignore_errors=True)


CONTENT = ".mlbert-content.json"
_VERSION = 1


def state_of(path: Path) -> list[int]:
    """Size and modification time, ns, of a file. Raises OSError."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def content_of(folder: Path, paths: Sequence[Path]) -> str | None:
    """sha256 of what ``sha256sum`` prints for files of ``folder``, by name; None where they were not hashed, or one has
    changed since."""
    for place in _places(folder):
        try:
            document = parse_json(read_plain(place))
            kept = document["files"] if document["version"] == _VERSION else {}
            found = {name_of(folder, path): (kept[name_of(folder, path)], state_of(path)) for path in paths}
            if found and all(entry["state"] == state for entry, state in found.values()):
                lines = [f"{entry['sha256']}  {name}\n" for name, (entry, _) in sorted(found.items())]
                return hashlib.sha256("".join(lines).encode()).hexdigest()
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def keep_digests(folder: Path, digests: Mapping[Path, str], states: Mapping[Path, list[int]]) -> None:
    """Keep sha256 and state, as it was before it was read, of each file. Where neither place can be written, the files
    stay known by names and sizes."""
    entries = {name_of(folder, path): {"sha256": digests[path], "state": states[path]} for path in sorted(digests)}
    for place in _places(folder):
        try:
            if place.name != CONTENT:
                make_folder(place.parent)
            write_json(place, {"version": _VERSION, "files": entries})
        except UserError:
            continue
        return


def name_of(folder: Path, path: Path) -> str:
    """A file's name below its folder, or of its own where it is the whole set."""
    return path.name if path == folder else path.relative_to(folder).as_posix()


def _places(folder: Path) -> tuple[Path, Path]:
    folder = folder if folder.is_dir() else folder.parent
    which = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]
    return folder / CONTENT, cache_folder() / "content" / f"{which}.json"
