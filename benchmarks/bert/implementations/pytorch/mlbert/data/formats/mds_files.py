"""Files of an MDS set: the index, and shards verified against it, decompressed,
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
from typing import Annotated, Any, BinaryIO, NamedTuple
from urllib.parse import quote

import numpy as np
import xxhash
from pydantic import AfterValidator, Field

from mlbert.data.formats.file_map import FileMap
from mlbert.data.formats.manifest import make_folder
from mlbert.host.errors import UserError, import_package
from mlbert.host.files import local_path, read_address, read_plain, write_atomically
from mlbert.host.json_files import parse_object
from mlbert.host.native import cache_folder
from mlbert.host.schema import Count, Document, Sha256, parse_model

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
_MOST_INDEX_BYTES = 4 << 30  # of ten million shards; larger files are not indices


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


class _ShardFormat(Document):
    format: str
    version: int


class _Formats(Document):
    shards: list[_ShardFormat]


class _Index(Document):
    shards: list[ShardInfo]
    vocabulary_sha256: Sha256 | None = None


class Column(NamedTuple):
    """A column of every sample."""

    name: str
    encoding: str
    size: int | None  # bytes of every value; None if it varies


class MdsIndex(NamedTuple):
    """The contents of index.json."""

    columns: list[Column]  # in the order in a sample
    shards: list[ShardInfo]
    vocabulary_sha256: str | None  # of the vocabulary of a set of tokens, if the set records it


def read_index(path: Path) -> bytes:
    """Return the content of an index.json.

    Raises UserError if it cannot be read, or is larger than any index.
    """
    return read_plain(path, RESTORE, _MOST_INDEX_BYTES)


def parse_index(path: Path | str, raw: bytes) -> MdsIndex:
    """Parse an index; ``path`` is for messages.

    Raises UserError if it is inconsistent, not the index of an MDS set of version 2.
    """
    document = parse_object(path, raw, RESTORE)
    formats = {
        (shard.format, shard.version)
        for shard in parse_model(_Formats, document, path, RESTORE).shards
    }
    if not formats:
        raise UserError("data.empty", path, "lists no shard", RESTORE)
    if formats != {(FORMAT, VERSION)}:
        found = ", ".join(f"{name} version {version}" for name, version in sorted(formats))
        problem = f"has shards of {found}; {FORMAT} version {VERSION} is read"
        raise UserError("data.format", path, problem, "Write the set again")
    index = parse_model(_Index, document, path, RESTORE)
    shards = index.shards
    layouts = [(shard.column_names, shard.column_encodings, shard.column_sizes) for shard in shards]
    if any(layout != layouts[0] for layout in layouts):
        raise UserError(
            "data.mixed", path, "has shards with different columns", "Keep one set in a folder"
        )
    kinds = {shard.compression or "zstd" for shard in shards}
    if others := {kind for kind in kinds if kind.partition(":")[0] != "zstd"}:
        remedy = "Write the set again with zstd, or decompress it with MosaicML Streaming"
        raise UserError(
            "data.format", path, f"has shards compressed as {', '.join(sorted(others))}", remedy
        )
    names = [file.name for shard in shards for file in (shard.raw, shard.zipped) if file]
    if len(set(names)) != len(names):
        raise UserError("data.damaged", path, "lists a shard twice", RESTORE)
    if any(bool(shard.compression) != bool(shard.zipped) for shard in shards):
        raise UserError(
            "data.damaged",
            path,
            "has a compression without zip_data, or zip_data without it",
            RESTORE,
        )
    columns = layouts[0][0]
    if (
        not columns
        or len(set(columns)) != len(columns)
        or len({len(part) for part in layouts[0]}) != 1
    ):
        raise UserError("data.damaged", path, "has columns that do not fit each other", RESTORE)
    return MdsIndex(
        [Column(*column) for column in zip(*layouts[0], strict=True)],
        shards,
        index.vocabulary_sha256,
    )


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
        problem = f"has more than the {file.num_bytes:,} bytes of the index"
    elif len(content) < file.num_bytes:
        problem = f"has {len(content):,} of the {file.num_bytes:,} bytes of the index"
    elif wrong := [
        algorithm
        for algorithm, digest in file.hashes.items()
        if checksum(algorithm, content) != digest
    ]:
        problem = f"has another {wrong[0]} than the index says"
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


def fetch_index(remote: str, cache: Path) -> bytes:
    """Return index.json of a set and store it in the cache folder.

    Raises UserError if it cannot be fetched, or if the folder has another set or cannot be written.
    """
    raw = read_address(address(remote, INDEX))
    make_folder(cache)
    path = cache / INDEX
    if not path.exists():
        with locked(path):
            if not path.exists():  # another process may have written it in the meantime
                write_atomically(path, raw)
    if read_index(path) != raw:
        reason = f"holds a different data set, not that of {remote}"
        raise UserError("data.mixed", cache, reason, "Choose another cache folder")
    return raw


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
