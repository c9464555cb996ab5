"""Opening what a user names; writing files as a whole or not at all; writing tensors."""

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

CHECKSUM = "sha256"  # the word in the header of a safetensors file for `tensors_sha256`
Tensors = Iterable[tuple[str, tuple[int, ...], memoryview]]  # name, shape, bytes
_MOST_BYTES = 1 << 28  # of a file that is read as a whole


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


def read_plain(path: Path, remedy: str = "Restore it") -> bytes:
    """The content of a plain file of at most 256 MiB. Raises UserError: it cannot be read, or is something else."""
    try:
        with open_plain(path) as file:
            content = file.read(_MOST_BYTES + 1)  # by reading: of some files in /proc the size is told wrongly
    except OSError as error:
        raise UserError("file.unreadable", path, f"cannot be read ({error.strerror or error})", remedy) from None
    if len(content) > _MOST_BYTES:
        raise UserError("file.too-large", path, f"cannot be read (larger than {_MOST_BYTES >> 20} MiB)", remedy)
    return content


@contextmanager
def reading(path: Path | str, remedy: str = "Check the path and its permissions") -> Iterator[None]:
    """Turn an OSError of the block into a UserError: the system does not let us read this file or folder."""
    try:
        yield
    except OSError as error:
        raise UserError("file.unreadable", path, f"cannot be read ({error.strerror})", remedy) from None


def plain_size(path: Path) -> int:
    """Return the bytes of a plain file. Raises UserError: it cannot be read, or is something else (opening a pipe would
    wait forever)."""
    with reading(path):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        what = "is a folder" if stat.S_ISDIR(status.st_mode) else "is not a plain file"
        raise UserError("file.wrong-kind", path, what, "Give a file")
    return status.st_size


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that gets its name when it is finished and on disk. When the block raises, nothing stays; a
    killed process leaves a file of another name, which ends in ``.tmp``. Raises UserError: it cannot be written; also
    for any OSError of the block."""
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
    """Writes a small file so that it is there as a whole or not at all; see `whole_file`."""
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def fsync_path(path: Path) -> None:
    """Waits until a file that is written, or the names in a folder, are on disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def tensors_sha256(tensors: Tensors) -> str:
    """SHA-256 of the tensors' names, shapes and bytes, in the order of names."""
    digest = hashlib.sha256()
    for name, shape, content in sorted(tensors, key=lambda tensor: tensor[0]):
        digest.update(f"{name} {list(shape)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


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


def write_weights_file(path: Path, save: Callable[[Path, dict[str, str]], object], tensors: Tensors) -> None:
    """`write_tensors` of these tensors, with their `tensors_sha256` among the words that ``save`` puts into the
    header."""
    words = {"format": "pt", CHECKSUM: tensors_sha256(tensors)}
    write_tensors(path, lambda place: save(place, words))
    _sort_words(path)


def _sort_words(path: Path) -> None:
    """Puts the words of a safetensors header into the order of their names: the library's own order is by chance, and
    equal tensors shall make equal files."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        file.seek(8)
        file.write(text.ljust(size))
