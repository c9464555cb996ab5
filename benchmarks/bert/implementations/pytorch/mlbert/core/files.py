"""Opening what a user names, and what every writer of files needs."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from mlbert.core.errors import UserError

_MOST_BYTES = 1 << 26  # of a file that is read as a whole


def open_plain(path: Path) -> BinaryIO:
    """Opens a plain file to read its bytes. Raises OSError; also for a folder, and for a pipe or device, which could
    keep a reader waiting for ever."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise OSError(errno.EINVAL, f"no name of a file: {error}") from None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "a folder, pipe or device, not a plain file")
        return os.fdopen(handle, "rb")
    except OSError:
        os.close(handle)
        raise


def read_plain(path: Path, remedy: str) -> bytes:
    """The content of a plain file of at most 64 MiB. Raises UserError: it cannot be read, or is something else."""
    try:
        with open_plain(path) as file:
            content = file.read(_MOST_BYTES + 1)  # by reading: of some files in /proc the size is told wrongly
    except OSError as error:
        raise UserError(path, f"cannot be read ({error.strerror or error})", remedy) from None
    if len(content) > _MOST_BYTES:
        raise UserError(path, f"cannot be read (larger than {_MOST_BYTES >> 20} MiB)", remedy)
    return content


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
