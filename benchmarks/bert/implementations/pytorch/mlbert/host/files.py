"""Open files that a user names, write files atomically, and write tensors."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import socket
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from mlbert.host.errors import UserError

CHECKSUM = "sha256"  # header key of `tensors_sha256` in a safetensors file
Tensors = Sequence[tuple[str, str, tuple[int, ...], memoryview]]  # name, type as of torch or NumPy, shape, bytes
# Types in safetensors files, in the library's order: the widest ones last.
_DTYPES = {
    **{"bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3"},
    **{"int16": "I16", "uint16": "U16", "float16": "F16", "bfloat16": "BF16"},
    **{"int32": "I32", "uint32": "U32", "float32": "F32", "float64": "F64", "int64": "I64", "uint64": "U64"},
}
_MOST_BYTES = 1 << 28  # limit for reading a file into memory
_BLOCK = 1 << 20  # bytes
_STALE_SECONDS = 3600.0


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
    temporary = path.with_name(f"{path.name}.{os.getpid()}@{socket.gethostname()}.tmp")  # several machines may write it
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


def is_leftover(path: Path) -> bool:
    """Return whether the process that wrote a temporary file of `whole_file` is gone. Another machine's is taken for
    gone if the file has not changed for an hour."""
    if not path.name.endswith(".tmp"):
        return False
    found = re.search(r"\.(\d+)@([^@]+)\.tmp$", path.name)
    if not found:
        return True
    if found.group(2) == socket.gethostname():
        return not Path("/proc", found.group(1)).exists()
    try:
        return time.time() - path.stat().st_mtime > _STALE_SECONDS
    except FileNotFoundError:
        return False


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
    for name, _, shape, content in sorted(tensors, key=lambda tensor: tensor[0]):
        digest.update(f"{name} {list(shape)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def write_tensors(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> str:
    """Write a safetensors file, and return the SHA-256 of its bytes, computed on the way. Raises OSError.

    The file is what safetensors' ``save_file`` writes, but the library's order of metadata is random, it needs a second
    pass for the checksum, and its files are readable by their owner only.
    """
    types = {name: _DTYPES[dtype.removeprefix("torch.")] for name, dtype, *_ in tensors}
    widths = list(_DTYPES.values())
    ordered = sorted(tensors, key=lambda tensor: (-widths.index(types[tensor[0]]), tensor[0]))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name, _, shape, content in ordered:
        start, end = end, end + len(content)
        header[name] = {"dtype": types[name], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in (memoryview(len(text).to_bytes(8, "little") + text), *(content for *_, content in ordered)):
            for at in range(0, len(part), _BLOCK):
                digest.update(part[at : at + _BLOCK])
                file.write(part[at : at + _BLOCK])
    return digest.hexdigest()


def write_weights_file(path: Path, tensors: Tensors) -> None:
    """Write tensors with `write_tensors`, and record their `tensors_sha256` in the header. Raises OSError."""
    write_tensors(path, tensors, {"format": "pt", CHECKSUM: tensors_sha256(tensors)})
