"""Files of an MDS set: the index, and shards verified against its entries, decompressed,
and fetched to a cache folder.

The cache folder of a set elsewhere has index.json and the uncompressed shards under the names of
the set, so that it is itself a set. Processes may share it: a file is renamed to its final name
when it is complete and verified, and only one process at a time makes it.

Formats: documentation of MosaicML Streaming ("Dataset format", "Supported encodings"),
version 2 of MDS.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Annotated, Any, BinaryIO
from urllib.parse import quote

import numpy as np
import xxhash
from pydantic import AfterValidator, Field

from mlbert.data.formats.file_map import FileMap
from mlbert.data.formats.manifest import make_folder
from mlbert.host.errors import UserError, import_package
from mlbert.host.files import (
    fetch_file,
    local_path,
    open_plain,
    read_address,
    read_pieces,
    reading,
    write_atomically,
)
from mlbert.host.native import cache_folder
from mlbert.host.schema import Count, Document

INDEX = "index.json"
FORMAT = "mds"
VERSION = 2
# Encodings of columns; others are skipped when a set is read.
STR = "str"
BYTES = "bytes"
INT = "int"  # 64 bits
INT_BYTES = 8
XXHASH = ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")
RESTORE = "Restore the file, or write the set again"
_INDEX_AT_ONCE = 1 << 26  # bytes of an index that one request reads


def checksum(algorithm: str, content: Any) -> str:
    """Return a checksum in hexadecimal.

    Raises ValueError if no checksum of a fixed size has this name.
    """
    if algorithm in XXHASH:
        return getattr(xxhash, algorithm)(content).hexdigest()
    if algorithm not in hashlib.algorithms_guaranteed or algorithm.startswith("shake"):
        raise ValueError("should be a checksum of hashlib or xxHash")
    return hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()


def _inside(basename: str) -> str:
    path = PurePosixPath(basename)
    if path.is_absolute() or ".." in path.parts or path.name in ("", INDEX):
        raise ValueError("should be the path of a file inside the folder")
    return str(path)


def _known(algorithm: str) -> str:
    checksum(algorithm, b"")
    return algorithm


class FileInfo(Document):
    """A file as listed in the index."""

    # Path from the folder of the set.
    name: Annotated[str, AfterValidator(_inside)] = Field(alias="basename")
    num_bytes: Count = Field(alias="bytes")
    hashes: dict[Annotated[str, AfterValidator(_known)], str]  # algorithm -> hexadecimal digest


class ShardInfo(Document):
    """A shard as listed in the index."""

    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[Count | None]
    compression: str | None
    num_samples: Annotated[int, Field(ge=1)] = Field(alias="samples")
    raw: FileInfo = Field(alias="raw_data")  # the uncompressed file
    # The stored file if the shard is compressed with Zstandard.
    zipped: FileInfo | None = Field(alias="zip_data")

    def stored_in(self, folder: Path) -> FileInfo:
        """Return the file that a folder has: the compressed one only
        if the other does not exist.
        """
        return self.zipped if self.zipped and not (folder / self.raw.name).exists() else self.raw


def zstandard_module() -> ModuleType:
    """Return the module zstandard. Raises UserError if it is not installed."""
    return import_package("zstandard", "compression zstd", "streaming")


def check_file(path: Path, file: FileInfo) -> None:
    """Raise UserError if a file cannot be read or does not match its index entry."""
    files = FileMap([path])
    _check(files.bytes[: files.ends[0]], path, file)


def _check(content: bytes | np.ndarray, subject: Path | str, file: FileInfo) -> None:
    problem = None
    if len(content) > file.num_bytes:
        problem = f"has more bytes than the {file.num_bytes:,} in the index"
    elif len(content) < file.num_bytes:
        problem = f"has {len(content):,} bytes, but the index says {file.num_bytes:,}"
    elif wrong := [
        algorithm
        for algorithm, digest in file.hashes.items()
        if checksum(algorithm, content) != digest
    ]:
        problem = f"has a different {wrong[0]} from the one in the index"
    if problem:
        raise UserError("data.damaged", subject, problem, RESTORE)


def address(remote: str, name: str) -> str:
    """Return the path or URL of a file of a set."""
    if (folder := local_path(remote)) is not None:
        return str(folder / name)
    return f"{remote.rstrip('/')}/{quote(name) if remote.startswith('http') else name}"


def cache_of(identity: str) -> Path:
    """Return the folder in the user's cache for what is made from a set on this machine:
    decompressed shards, tokens. ``identity`` is the SHA-256 of its index, which covers the shards'
    checksums.
    """
    return cache_folder() / "mds" / identity[:32]


def other_disk(folder: Path) -> str:
    """Return the advice, phrased to follow "or", on how to move a cache in ``folder`` to another
    disk.
    """
    if cache_folder() in (folder, *folder.parents):
        return "set XDG_CACHE_HOME to a folder on another disk"
    return "keep the local copy of the data on another disk"


def fetch_index(remote: str, cache: Path) -> Path:
    """Return the path of a copy of a set's index.json in the cache folder.

    An object of a store takes one request if it is shorter than 64 MiB.

    Raises UserError if it cannot be fetched, or if the folder has another set or cannot be written.
    """
    url = address(remote, INDEX)
    head = read_address(url, _INDEX_AT_ONCE)
    is_all = len(head) < _INDEX_AT_ONCE
    make_folder(cache)
    path = cache / INDEX
    if not path.exists():
        with locked(path):
            if not path.exists():  # another process may have written it in the meantime
                if is_all:
                    write_atomically(path, head)
                else:
                    fetch_file(url, path)
                return path
    if not (_has_content(path, head) if is_all else _is_copy(path, url)):
        reason = f"contains a different data set, not that of {remote}"
        raise UserError("data.mixed", cache, reason, "Choose another cache folder")
    return path


def _has_content(path: Path, content: bytes) -> bool:
    """Return True if a file has exactly this content. Raises UserError if it cannot be read."""
    with reading(path, RESTORE), open_plain(path) as file:
        return file.read(len(content) + 1) == content


def _is_copy(path: Path, url: str) -> bool:
    """Return True if a file has exactly the content at an address, comparing it in pieces.

    Raises UserError if one of them cannot be read.
    """
    end = 0
    with reading(path, RESTORE), open_plain(path) as file:
        for piece in read_pieces(url):
            file.seek(piece.offset)
            if file.read(len(piece.content)) != piece.content:
                return False
            end = piece.offset + len(piece.content)
    return path.stat().st_size == end


def cached_shard(remote: str, cache: Path, shard: ShardInfo) -> Path:
    """Return the path of a shard in the cache folder,
    fetching and decompressing it if it is missing or damaged.

    A shard that arrives damaged is fetched once more.
    Raises UserError if it is damaged again, or cannot be fetched or written.
    """
    path = cache / shard.raw.name
    if _is_whole(path, shard.raw):
        return path
    url = address(remote, (shard.zipped or shard.raw).name)
    with locked(path):
        if not _is_whole(path, shard.raw):  # another process may have made it in the meantime
            try:
                content = _fetch_shard(url, shard)
            except UserError as error:
                if error.code != "data.damaged":
                    raise
                content = _fetch_shard(url, shard)
            write_atomically(path, content)
    return path


def _is_whole(path: Path, file: FileInfo) -> bool:
    with contextlib.suppress(UserError):
        check_file(path, file)
        return True
    return False


def _fetch_shard(url: str, shard: ShardInfo) -> bytes:
    """Return a shard's uncompressed form.

    Raises UserError if it cannot be fetched or is damaged.
    """
    stored = shard.zipped or shard.raw
    content = read_address(url, stored.num_bytes + 1)
    _check(content, url, stored)
    if shard.zipped:
        content = decompressed(content, url, shard.raw.num_bytes + 1)
        _check(content, url, shard.raw)
    return content


def decompressed(content: bytes | BinaryIO, subject: Path | str, size: int) -> bytes:
    """Return the first ``size`` bytes that Zstandard content decompresses to.

    Raises UserError if it is damaged.
    """
    zstandard = zstandard_module()
    try:
        return (
            zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True).read(size)
        )
    except zstandard.ZstdError as error:
        raise UserError(
            "data.damaged", subject, f"cannot be decompressed ({error})", RESTORE
        ) from None


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Lock out other threads and processes that make the same file.

    Yield False if ``wait`` is False and another has the lock. Raises UserError if the folder is not
    writable or does not support locks.
    """
    with contextlib.ExitStack() as stack:
        is_mine = True
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.with_name(f".{path.name}.lock").open("wb"))
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_mine = False
        except OSError as error:
            reason = f"cannot be locked ({error.strerror})"
            remedy = "Choose a cache folder that can be written, on a local disk"
            raise UserError("file.unwritable", path, reason, remedy) from None
        yield is_mine
