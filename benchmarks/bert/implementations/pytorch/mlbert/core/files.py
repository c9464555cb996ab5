"""What every writer of files needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError


def fsync_path(path: Path) -> None:
    """Waits until a file that is written, or the names in a folder, are on disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_tensors(path: Path, save: Callable[[Path], object]) -> None:
    """Has a ``save_file`` of safetensors write the path, with the permissions that any new file gets: the library's own
    are the owner's alone. Raises OSError, in place of the library's error too."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save(path)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    path.chmod(mode)
