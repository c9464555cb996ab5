"""The index.json of an MDS set: shards, columns, checksums.

Formats: documentation of MosaicML Streaming ("Dataset format", "Supported encodings"), version 2 of MDS.
"""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple

import xxhash
from pydantic import AfterValidator, Field

from mlbert.host.errors import UserError
from mlbert.host.json_files import parse_object
from mlbert.host.schema import Count, Document, parse_model

INDEX = "index.json"
FORMAT, VERSION = "mds", 2
STR, BYTES = "str", "bytes"  # encodings of columns; others are skipped when a set is read
XXHASH = ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")
_RESTORE = "Restore the file, or write the set again"


def checksum(algorithm: str, content: Any) -> str:
    """Return a checksum in hexadecimal. Raises ValueError if no checksum of a fixed size has this name."""
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

    name: Annotated[str, AfterValidator(_inside)] = Field(alias="basename")  # path from the folder of the set
    num_bytes: Count = Field(alias="bytes")
    hashes: dict[Annotated[str, AfterValidator(_known)], str]  # algorithm -> hexadecimal digest


class ShardInfo(Document):
    """A shard as listed in the index."""

    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[Count | None]
    compression: Annotated[str, Field(pattern="^(zstd(:.*)?)?$")] | None
    num_samples: Annotated[int, Field(ge=1)] = Field(alias="samples")
    raw: FileInfo = Field(alias="raw_data")  # the uncompressed file
    zipped: FileInfo | None = Field(alias="zip_data")  # the stored file if the shard is compressed with Zstandard


class _ShardFormat(Document):
    format: str
    version: int


class _Formats(Document):
    shards: list[_ShardFormat]


class _Shards(Document):
    shards: list[ShardInfo]


class Column(NamedTuple):
    """A column of every sample."""

    name: str
    encoding: str
    size: int | None  # bytes of every value; None if it varies


class MdsIndex(NamedTuple):
    """The contents of index.json."""

    columns: list[Column]  # in the order in a sample
    shards: list[ShardInfo]


def parse_index(path: Path | str, raw: bytes) -> MdsIndex:
    """Parse an index; ``path`` is for messages. Raises UserError if it is inconsistent, not the index of an MDS set of
    version 2."""
    document = parse_object(path, raw, _RESTORE)
    formats = {(shard.format, shard.version) for shard in parse_model(_Formats, document, path, _RESTORE).shards}
    if not formats:
        raise UserError("data.empty", path, "lists no shard", _RESTORE)
    if formats != {(FORMAT, VERSION)}:
        found = ", ".join(f"{name} version {version}" for name, version in sorted(formats))
        problem = f"has shards of {found}; {FORMAT} version {VERSION} is read"
        raise UserError("data.format", path, problem, "Write the set again")
    shards = parse_model(_Shards, document, path, _RESTORE).shards
    layouts = [(shard.column_names, shard.column_encodings, shard.column_sizes) for shard in shards]
    if any(layout != layouts[0] for layout in layouts):
        raise UserError("data.mixed", path, "has shards with different columns", "Keep one set in a folder")
    names = [file.name for shard in shards for file in (shard.raw, shard.zipped) if file]
    if len(set(names)) != len(names):
        raise UserError("data.damaged", path, "lists a shard twice", _RESTORE)
    if any(bool(shard.compression) != bool(shard.zipped) for shard in shards):
        raise UserError("data.damaged", path, "has a compression without zip_data, or zip_data without it", _RESTORE)
    columns = layouts[0][0]
    if not columns or len(set(columns)) != len(columns) or len({len(part) for part in layouts[0]}) != 1:
        raise UserError("data.damaged", path, "has columns that do not fit each other", _RESTORE)
    return MdsIndex([Column(*column) for column in zip(*layouts[0], strict=True)], shards)
