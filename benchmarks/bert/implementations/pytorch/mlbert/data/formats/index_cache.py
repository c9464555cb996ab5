"""Arrays that are found by reading whole data files, kept in the user's cache folder, never beside the data.

They lie in ``$XDG_CACHE_HOME/mlbert`` (by default ``~/.cache/mlbert``), a folder for each set of files with one .npy
for each array, and count while every file has the same path, size and modification time. They are read as memory maps,
which the processes of a machine share.
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
