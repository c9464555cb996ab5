"""The index.json of an MDS set: which shards there are, with which columns and checksums.

Format: version 2 of MosaicML Streaming's MDS.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import AfterValidator, Field

from mlbert.data.formats.mds_columns import Column, column
from mlbert.host.errors import UserError
from mlbert.host.json_files import parse_object
from mlbert.host.schema import Count, Document, parse_model

INDEX = "index.json"
FORMAT, VERSION = "mds", 2
XXHASH = ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")
_RESTORE = "Restore the file, or write the set again"


class Hasher(Protocol):
    """As the objects of `hashlib`."""

    def update(self, data: Any) -> None: ...

    def hexdigest(self) -> str: ...


def new_hasher(algorithm: str) -> Hasher | None:
    """None where this algorithm is not to be had: xxHash needs the package xxhash.
    Raises ValueError: no checksum of a fixed size has this name."""
    if algorithm in XXHASH:
        try:
            import xxhash
        except ImportError:
            return None
        return getattr(xxhash, algorithm)()
    if algorithm not in hashlib.algorithms_guaranteed or algorithm.startswith("shake"):
        raise ValueError("should be a checksum of hashlib or xxHash")
    return hashlib.new(algorithm, usedforsecurity=False)


def _inside(basename: str) -> str:
    path = PurePosixPath(basename)
    if path.is_absolute() or ".." in path.parts or path.name in ("", INDEX):
        raise ValueError("should be the path of a file inside the folder")
    return str(path)


def _known(algorithm: str) -> str:
    new_hasher(algorithm)
    return algorithm


class FileInfo(Document):
    """A file as the index lists it."""

    name: Annotated[str, AfterValidator(_inside)] = Field(alias="basename")  # path from the folder of the set
    num_bytes: Count = Field(alias="bytes")
    hashes: dict[Annotated[str, AfterValidator(_known)], str]  # from algorithm to hexadecimal digits


class ShardInfo(Document):
    """A shard as the index lists it."""

    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]
    compression: Annotated[str, Field(pattern="^(zstd(:.*)?)?$")] | None
    num_samples: Annotated[int, Field(ge=1)] = Field(alias="samples")
    raw: FileInfo = Field(alias="raw_data")  # what is read
    zipped: FileInfo | None = Field(alias="zip_data")  # what is stored if the shard is compressed with Zstandard


class _ShardFormat(Document):
    format: str
    version: int


class _Formats(Document):
    shards: list[_ShardFormat]


class _Shards(Document):
    shards: list[ShardInfo]


class MdsIndex(NamedTuple):
    """What index.json says."""

    columns: dict[str, str]  # from name to encoding, as they follow each other in a sample
    shards: list[ShardInfo]


def parse_index(path: Path | str, raw: bytes) -> MdsIndex:
    """Read an index; ``path`` is for messages. Raises UserError: it is no index of an MDS set of version 2, contradicts
    itself, or has a column that cannot be read."""
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
    return MdsIndex(_columns(path, *layouts[0]), shards)


def _columns(path: Path | str, names: list[str], encodings: list[str], sizes: list[int | None]) -> dict[str, str]:
    columns = dict(zip(names, encodings, strict=False))
    found = [kind.size for kind in decoders(path, columns).values()]
    if not names or not len(columns) == len(names) == len(encodings) or sizes != found:
        raise UserError("data.damaged", path, "has columns that do not fit each other", _RESTORE)
    return columns


def decoders(subject: Path | str, columns: Mapping[str, str]) -> dict[str, Column]:
    """The `Column` of each, from names to encodings. Raises UserError: one cannot be read; names ``subject``."""
    found = {}
    for name, encoding in columns.items():
        try:
            found[name] = column(encoding)
        except ValueError as error:
            reason = f"column {name!r} has encoding {encoding!r}, {error}"
            raise UserError("data.unsupported", subject, reason, "Write the set again with another encoding") from None
    return found
