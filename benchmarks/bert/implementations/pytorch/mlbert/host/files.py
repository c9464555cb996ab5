"""Open files that a user names, write files atomically, and write tensors."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from mlbert.host.errors import UserError

CHECKSUM = "sha256"  # header key of `tensors_sha256` in a safetensors file
Tensors = Iterable[tuple[str, tuple[int, ...], memoryview]]  # name, shape, bytes
_MOST_BYTES = 1 << 28  # limit for reading a file into memory


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file for reading bytes. Raises OSError, also for folders, pipes and devices: a pipe could block
    forever."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise OSError(errno.EINVAL, f"not a file name: {error}") from None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "a folder, pipe or device, not a plain file")
        return os.fdopen(handle, "rb")
    except OSError:
        os.close(handle)
        raise


def read_plain(path: Path, remedy: str = "Restore it") -> bytes:
    """Read a regular file of at most 256 MiB. Raises UserError if it is unreadable, too large or not a regular file."""
    try:
        with open_plain(path) as file:
            content = file.read(_MOST_BYTES + 1)  # read to measure: /proc reports wrong sizes
    except OSError as error:
        raise UserError("file.unreadable", path, f"cannot be read ({error.strerror or error})", remedy) from None
    if len(content) > _MOST_BYTES:
        raise UserError("file.too-large", path, f"cannot be read (larger than {_MOST_BYTES >> 20} MiB)", remedy)
    return content


@contextmanager
def reading(path: Path | str, remedy: str = "Check the path and its permissions") -> Iterator[None]:
    """Turn an OSError in the block into a UserError that says the file or folder cannot be read."""
    try:
        yield
    except OSError as error:
        raise UserError("file.unreadable", path, f"cannot be read ({error.strerror})", remedy) from None


@contextmanager
def writing(path: Path | str, remedy: str) -> Iterator[None]:
    """Turn an OSError in the block into a UserError that says the file or folder cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError("file.unwritable", path, f"cannot be written ({error.strerror})", remedy) from None


def plain_size(path: Path) -> int:
    """Return the size of a regular file in bytes. Raises UserError if it is unreadable or not a regular file (opening a
    pipe would block forever)."""
    with reading(path):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        what = "is a folder" if stat.S_ISDIR(status.st_mode) else "is not a plain file"
        raise UserError("file.wrong-kind", path, what, "Give a file")
    return status.st_size


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that is renamed to ``path`` once it is complete and on disk.

    If the block raises, nothing remains; a killed process leaves a file with another name ending in ``.tmp``. Raises
    UserError if the file cannot be written or the block raises OSError.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise UserError("file.unwritable", path, reason, "Free some space or choose another folder") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a small file atomically; see `whole_file`."""
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def fsync_path(path: Path) -> None:
    """Wait until a written file, or a folder's entries, are on disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def tensors_sha256(tensors: Tensors) -> str:
    """Return the SHA-256 of the tensors' names, shapes and bytes, in order of their names."""
    digest = hashlib.sha256()
    for name, shape, content in sorted(tensors, key=lambda tensor: tensor[0]):
        digest.update(f"{name} {list(shape)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def write_tensors(path: Path, save: Callable[[Path], object]) -> None:
    """Write a file with safetensors' ``save_file`` and a new file's usual permissions; the library makes it owner-only.

    Raises OSError, also in place of the library's error.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        save(path)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    path.chmod(mode)


def write_weights_file(path: Path, save: Callable[[Path, dict[str, str]], object], tensors: Tensors) -> None:
    """Write tensors with `write_tensors` and record their `tensors_sha256` in the header that ``save`` writes."""
    words = {"format": "pt", CHECKSUM: tensors_sha256(tensors)}
    write_tensors(path, lambda place: save(place, words))
    _sort_metadata(path)


def _sort_metadata(path: Path) -> None:
    """Sort the metadata of a safetensors header by name: the library's order is random, and equal tensors must give
    equal files."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        file.seek(8)
        file.write(text.ljust(size))
