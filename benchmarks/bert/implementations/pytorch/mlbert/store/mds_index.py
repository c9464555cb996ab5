"""The index.json of an MDS set: which shards there are, with which columns and checksums.

Format: version 2 of MosaicML Streaming's MDS.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from mlbert.core.errors import UserError
from mlbert.store.mds_columns import Column, column

INDEX = "index.json"
FORMAT, VERSION = "mds", 2
XXHASH = ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")
_RESTORE = "Restore the file, or write the set again"


@dataclass(frozen=True)
class FileInfo:
    """A file as the index lists it."""

    name: str  # path from the folder of the set, with slashes
    num_bytes: int
    hashes: Mapping[str, str]  # from algorithm to hexadecimal digits


@dataclass(frozen=True)
class ShardInfo:
    """A shard as the index lists it."""

    num_samples: int
    raw: FileInfo  # what is read
    zipped: FileInfo | None  # what is stored, where the shard is compressed with Zstandard


@dataclass(frozen=True)
class MdsIndex:
    """What index.json says."""

    columns: dict[str, str]  # from name to encoding, as they follow each other in a sample
    shards: list[ShardInfo]


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
        raise ValueError(f"unknown checksum {algorithm!r}")
    return hashlib.new(algorithm, usedforsecurity=False)


def parse_index(path: Path | str, raw: bytes) -> MdsIndex:
    """Read an index; ``path`` is for messages. Raises UserError: it is no index of an MDS set of version 2, contradicts
    itself, or has a column that cannot be read."""
    try:
        entries = json.loads(raw)["shards"]
        if not entries:
            raise UserError(path, "lists no shard", _RESTORE)
        kinds = {(entry["format"], entry["version"]) for entry in entries}
        if kinds != {(FORMAT, VERSION)}:
            found = ", ".join(f"{name} version {version}" for name, version in sorted(kinds, key=str))
            raise UserError(path, f"has shards of {found}; {FORMAT} version {VERSION} is read", "Write the set again")
        layouts = {(*zip(e["column_names"], e["column_encodings"], e["column_sizes"], strict=True),) for e in entries}
        shards = [_shard(entry) for entry in entries]
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(path, f"is not the index of an MDS set ({error!r})", _RESTORE) from None
    if len(layouts) > 1:
        raise UserError(path, "has shards with different columns", "Keep one set in a folder")
    names = [file.name for shard in shards for file in (shard.raw, shard.zipped) if file]
    if len(set(names)) != len(names):
        raise UserError(path, "lists a shard twice", _RESTORE)
    return MdsIndex(_columns(path, layouts.pop()), shards)


def _columns(path: Path | str, layout: tuple[tuple[str, str, int | None], ...]) -> dict[str, str]:
    columns = {name: encoding for name, encoding, _ in layout}
    sizes = [kind.size for kind in decoders(path, columns).values()]
    if not layout or len(columns) != len(layout) or sizes != [size for *_, size in layout]:
        raise UserError(path, "has columns that do not fit each other", _RESTORE)
    return columns


def decoders(subject: Path | str, columns: Mapping[str, str]) -> dict[str, Column]:
    """The `Column` of each, from names to encodings. Raises UserError: one cannot be read; names ``subject``."""
    found = {}
    for name, encoding in columns.items():
        try:
            found[name] = column(encoding)
        except ValueError as error:
            reason = f"column {name!r} has encoding {encoding!r}, {error}"
            raise UserError(subject, reason, "Write the set again with another encoding") from None
    return found


def _shard(entry: Mapping[str, Any]) -> ShardInfo:
    """Raises ValueError, KeyError or TypeError."""
    algorithm = str(entry["compression"] or "").partition(":")[0]
    if algorithm not in ("", "zstd"):
        raise ValueError(f"compression {entry['compression']!r} is not read")
    if bool(algorithm) != bool(entry["zip_data"]):
        raise ValueError("compression and zip_data do not fit each other")
    samples = int(entry["samples"])
    if samples < 1:
        raise ValueError(f"a shard of {samples} samples")
    return ShardInfo(samples, _file(entry["raw_data"]), _file(entry["zip_data"]) if algorithm else None)


def _file(entry: Mapping[str, Any]) -> FileInfo:
    name = PurePosixPath(str(entry["basename"]))
    if name.is_absolute() or ".." in name.parts or not name.name or name.name == INDEX:
        raise ValueError(f"file name {str(name)!r}")
    hashes = {str(algorithm): str(digits) for algorithm, digits in entry["hashes"].items()}
    for algorithm in hashes:
        new_hasher(algorithm)
    return FileInfo(str(name), int(entry["bytes"]), hashes)


def index_entry(shard: ShardInfo, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the index says of a shard; ``settings`` as at the head of the shard's file."""
    files = {"raw_data": shard.raw, "zip_data": shard.zipped}
    listed = {
        key: file and {"basename": file.name, "bytes": file.num_bytes, "hashes": dict(file.hashes)}
        for key, file in files.items()
    }
    return {**settings, "samples": shard.num_samples, **listed}
