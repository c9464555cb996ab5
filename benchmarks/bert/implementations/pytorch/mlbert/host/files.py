"""Open files that a user names, read addresses, write files atomically, and write tensors."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import random
import re
import socket
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlsplit

from mlbert.host.errors import UserError, install_words

CHECKSUM = "sha256"  # header key of `tensors_sha256` in a safetensors file
# name, type as of torch or NumPy, shape, bytes.
Tensors = Sequence[tuple[str, str, tuple[int, ...], memoryview]]
# Types in safetensors files, in the library's order: the widest ones last.
_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
_MOST_BYTES = 1 << 28  # limit for reading a file into memory
_BLOCK = 1 << 20  # bytes
_STALE_SECONDS = 3600.0
# Before each new attempt to read an address; half to one and a half times as long.
PAUSES_SECONDS = (0.5, 2.0, 8.0)
_SILENCE_SECONDS = 60.0  # that a server may be silent
_S3_OPTIONS = {"config_kwargs": {"retries": {"total_max_attempts": 1}}}


def open_plain(path: Path) -> BufferedReader:
    """Open a regular file for reading bytes.

    Raises OSError, also for folders, pipes and devices: a pipe could block forever.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:  # a zero byte
        raise OSError(errno.EINVAL, "not a file name", str(path)) from None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "a folder, pipe or device, not a plain file", str(path))
        return os.fdopen(handle, "rb")
    except OSError:
        os.close(handle)
        raise


def read_plain(path: Path, remedy: str = "Restore it", most: int = _MOST_BYTES) -> bytes:
    """Read a regular file of at most ``most`` bytes.

    Raises UserError if it is unreadable, too large or not a regular file.
    """
    with reading(path, remedy), open_plain(path) as file:
        content = file.read(most + 1)  # read to measure: /proc reports wrong sizes
    if len(content) > most:
        raise UserError(
            "file.too-large", path, f"cannot be read (larger than {most >> 20} MiB)", remedy
        )
    return content


@contextmanager
def reading(path: Path | str, remedy: str = "Check the path and its permissions") -> Iterator[None]:
    """Turn an OSError in the block into a UserError that says the file or folder cannot be read."""
    try:
        yield
    except OSError as error:
        raise UserError(
            "file.unreadable", path, f"cannot be read ({error.strerror or error})", remedy
        ) from None


@contextmanager
def writing(path: Path | str, remedy: str) -> Iterator[None]:
    """Turn an OSError in the block into a UserError that says the file
    or folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            "file.unwritable", path, f"cannot be written ({error.strerror})", remedy
        ) from None


def plain_size(path: Path, remedy: str = "Give a file") -> int:
    """Return the size of a regular file in bytes.

    Raises UserError if it is unreadable or not a regular file (opening a pipe would block forever).
    """
    with reading(path):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        what = "is a folder" if stat.S_ISDIR(status.st_mode) else "is not a plain file"
        raise UserError("file.wrong-kind", path, what, remedy)
    return status.st_size


class AddressError(UserError):
    """An address that cannot be read.

    ``reason`` says why, ``is_lasting`` whether another attempt would fail too.
    """

    def __init__(self, address: str, error: Exception) -> None:
        default = "no such file" if isinstance(error, FileNotFoundError) else error
        words = getattr(error, "strerror", None) or getattr(error, "reason", None) or default
        status = error.code if isinstance(error, urllib.error.HTTPError) else 0
        self.reason = f"HTTP {status}" if status else str(words) or type(error).__name__
        remedy = "Check the address, the network and the permissions"
        super().__init__(
            "network.unreachable", address, f"cannot be fetched ({self.reason})", remedy
        )
        lasting = (FileNotFoundError, PermissionError, IsADirectoryError, ValueError)
        is_refused = 400 <= status < 500 and status not in (408, 429)
        self.is_lasting = (
            is_refused or isinstance(error, lasting) or "Credential" in type(error).__name__
        )


class Piece(NamedTuple):
    """Bytes of a file at an address. The first piece of each attempt is empty."""

    offset: int
    content: bytes
    total: int | None  # bytes of the complete file, if known
    version: str  # another one for other content, or empty


def local_path(address: str) -> Path | None:
    """Return the path in a path or ``file://`` address, or None for other addresses."""
    if "://" not in address:
        return Path(address)
    return (
        Path(urllib.request.url2pathname(urlsplit(address).path))
        if address.startswith("file:")
        else None
    )


def read_pieces(
    address: str,
    offset: int = 0,
    *,
    attempts: int = 1 + len(PAUSES_SECONDS),
    seconds: float = _SILENCE_SECONDS,
    at_once: int | None = None,
) -> Iterator[Piece]:
    """Yield the pieces of a file from ``offset`` on.

    An interrupted transfer is continued after a pause. If the server cannot continue it, or the
    file changed, the pieces begin again at 0.

    Args:
        address: a path, or an address: ``file``, ``http``, ``https``,
            or a scheme of fsspec such as ``s3``.
        offset: bytes that are already there.
        attempts: how often to try without receiving more than before.
        seconds: how long a server may be silent.
        at_once: read so many bytes of an object in a store, or all if it has fewer, in one request.

    Raises:
        AddressError: the file cannot be read.
        UserError: a package for this scheme is not installed.
    """
    version = None
    failed = 0
    most = offset
    while True:
        try:
            with _open_address(address, offset, seconds, at_once) as (stream, first):
                if first.offset and version not in (None, first.version):
                    offset = 0
                    continue
                offset = first.offset
                version = first.version
                yield first
                while content := stream.read(_BLOCK):
                    yield first._replace(offset=offset, content=content)
                    offset += len(content)
                if first.total is None or offset >= first.total:
                    return
                raise ConnectionError(f"interrupted after {offset:,} of {first.total:,} bytes")
        except UserError:
            raise
        except Exception as error:  # each service has its own exception types
            found = AddressError(address, error)
            # Compared with the most so far: transfers that begin again
            # and end early would be repeated forever.
            failed, most = (1, offset) if offset > most else (failed + 1, most)
            if failed >= attempts or found.is_lasting or local_path(address) is not None:
                raise found from None
            pause = PAUSES_SECONDS[min(failed, len(PAUSES_SECONDS)) - 1]
            time.sleep(pause * random.uniform(0.5, 1.5))  # many ranks fail at once


def read_address(address: str, most: int | None = None) -> bytes:
    """Return the bytes of a file, or the first ``most`` and perhaps some more.

    With ``most``, an object of a store such as S3 takes one request. Without, it is read in parts
    and takes two more, because its size may be any.

    Raises as `read_pieces`.
    """
    content = bytearray()
    for piece in read_pieces(address, at_once=most):
        content[piece.offset :] = piece.content
        if most is not None and len(content) >= most:
            break
    return bytes(content)


def fetch_file(address: str, path: Path) -> None:
    """Write the file at an address to ``path`` as `whole_file` does.

    Raises as `read_pieces` and `whole_file`.
    """
    with whole_file(path) as file:
        for piece in read_pieces(address):
            file.seek(piece.offset)
            file.write(piece.content)
        file.truncate()


@contextmanager
def _open_address(
    address: str, offset: int, seconds: float, at_once: int | None
) -> Iterator[tuple[Any, Piece]]:
    """Yield a file from ``offset`` on, or from 0 if the server cannot do that."""
    scheme = urlsplit(address).scheme
    if (path := local_path(address)) is not None:
        with open_plain(path) as file:
            file.seek(offset)
            yield file, Piece(offset, b"", None, "")
    elif scheme in ("http", "https"):
        headers = {"User-Agent": "mlbert", **({"Range": f"bytes={offset}-"} if offset else {})}
        try:
            response = urllib.request.urlopen(
                urllib.request.Request(address, headers=headers), timeout=seconds
            )
        except urllib.error.HTTPError as error:
            error.close()  # it is the response too, with its connection
            if error.code != 416:  # the range begins after the end
                raise
            response = urllib.request.urlopen(address, timeout=seconds)
        with response:
            found = response.headers
            length = response.headers.get("Content-Length")
            version = found.get("ETag") or found.get("Last-Modified", "")
            ranged = response.status == 206 and re.match(
                r"bytes (\d+)-\d+/(\d+)", found.get("Content-Range", "")
            )
            start, total = (
                (int(ranged[1]), int(ranged[2])) if ranged else (0, int(length) if length else None)
            )
            yield response, Piece(start, b"", total, version)
    else:
        try:
            import fsspec

            system, place = fsspec.url_to_fs(address, **(_S3_OPTIONS if scheme == "s3" else {}))
        except ImportError as error:
            reason = f"needs a package that is not installed ({error})"
            remedy = install_words("s3") if scheme == "s3" else "Install it"
            raise UserError("package.missing", address, reason, remedy) from None
        system.retries = 1  # of s3fs and gcsfs: several levels that try again would multiply
        if at_once is not None:
            content = system.cat_file(place, start=0, end=at_once)
            yield io.BytesIO(content), Piece(0, b"", len(content), "")
            return
        with system.open(place, "rb", block_size=8 * _BLOCK) as file:
            file.seek(offset)
            yield file, Piece(offset, b"", file.size, system.ukey(place))


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that is renamed to ``path`` once it is complete and on disk.

    If the block raises, nothing remains; a killed process leaves a file with another name ending in
    ``.tmp``. Raises UserError if the file cannot be written or the block raises OSError.
    """
    # Several machines may write it.
    temporary = path.with_name(f"{path.name}.{os.getpid()}@{socket.gethostname()}.tmp")
    try:
        with writing(path, "Free some space or choose another folder"):
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def is_leftover(path: Path) -> bool:
    """Return whether the process that wrote a temporary file of `whole_file` is gone.

    Another machine's is taken for gone if the file has not changed for an hour.
    """
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


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files that killed processes left in a folder."""
    for path in folder.iterdir():
        if is_leftover(path):
            path.unlink(missing_ok=True)


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
    """Write a safetensors file, and return the SHA-256 of its bytes, computed on the way.

    Raises OSError.

    The file is what safetensors' ``save_file`` writes, but the library's order of metadata is
    random, it needs a second pass for the checksum, and its files are readable by their owner only.
    """
    types = {name: _DTYPES[dtype.removeprefix("torch.")] for name, dtype, *_ in tensors}
    widths = list(_DTYPES.values())
    ordered = sorted(tensors, key=lambda tensor: (-widths.index(types[tensor[0]]), tensor[0]))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name, _, shape, content in ordered:
        start = end
        end = end + len(content)
        header[name] = {"dtype": types[name], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in (
            memoryview(len(text).to_bytes(8, "little") + text),
            *(content for *_, content in ordered),
        ):
            for at in range(0, len(part), _BLOCK):
                digest.update(part[at : at + _BLOCK])
                file.write(part[at : at + _BLOCK])
    return digest.hexdigest()


def write_weights_file(path: Path, tensors: Tensors) -> None:
    """Write tensors with `write_tensors`, and record their `tensors_sha256` in the header.

    Raises OSError.
    """
    write_tensors(path, tensors, {"format": "pt", CHECKSUM: tensors_sha256(tensors)})
