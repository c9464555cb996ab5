"""The index.json of an MDS set (shards, columns, checksums), and the encodings of values in samples.

Formats: documentation of MosaicML Streaming ("Dataset format", "Supported encodings"), version 2 of MDS. Numbers are
little-endian. Pickled values are rejected. Arrays without a fixed dtype or shape start with these:

=====================  ======================================================================
``ndarray:D:2,3``      the values
``ndarray:D``          uint8 (axes * 4 + log2 of the bytes of an extent), extents, values
``ndarray``            uint8 (dtype; see `_DTYPE_CODES`), then as ``ndarray:D``
=====================  ======================================================================
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
from pydantic import AfterValidator, Field

from mlbert.host.errors import UserError
from mlbert.host.json_files import parse_object
from mlbert.host.schema import Count, Document, parse_model

_DTYPE_CODES = {
    "uint8": 8,
    "int8": 9,
    "uint16": 16,
    "int16": 17,
    "float16": 18,
    "uint32": 32,
    "int32": 33,
    "float32": 34,
    "uint64": 64,
    "int64": 65,
    "float64": 66,
}
_DTYPES = {code: np.dtype(name).newbyteorder("<") for name, code in _DTYPE_CODES.items()}
_MOST_AXES = 63


@dataclass(frozen=True)
class Column:
    """An encoding. ``encode`` and ``decode`` raise ValueError, phrased to follow a column's name, or another of
    `CONVERSION_ERRORS`."""

    size: int | None  # bytes of every value; None if it varies
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


CONVERSION_ERRORS = (ValueError, TypeError, OverflowError, ArithmeticError, KeyError, IndexError, RecursionError)


def column(encoding: str) -> Column:
    """Return the column for an encoding. Raises ValueError, phrased to follow "has encoding ...", if it is not
    supported."""
    name, _, details = encoding.partition(":")
    if encoding in _PLAIN:
        return _PLAIN[encoding]
    if encoding in _DTYPE_CODES:
        return _scalar(np.dtype(encoding).newbyteorder("<"))
    if name == "ndarray":
        return _array_column(details)
    if encoding == "pkl":
        raise ValueError("which holds pickled objects; loading them could run any program")
    raise ValueError("which is not supported")


def _checked(kinds: type | tuple[type, ...], encode: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Wrap ``encode`` to accept only values of these types."""

    def of_kind(value: Any) -> bytes:
        if not isinstance(value, kinds):
            raise ValueError(f"cannot be made of {type(value).__name__}")
        return encode(value)

    return of_kind


def _to_int64(value: Any) -> bytes:
    return int(value).to_bytes(8, "little", signed=True)


def _from_int64(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _text(value: Any) -> bytes:
    return str(value).encode()


def _to_json(value: Any) -> bytes:
    return json.dumps(value.tolist() if isinstance(value, np.ndarray) else value).encode()


_PLAIN = {
    "bytes": Column(None, _checked(bytes, bytes), bytes),
    "str": Column(None, _checked(str, _text), lambda data: str(data, "utf-8")),
    "int": Column(8, _checked((int, np.integer), _to_int64), _from_int64),
    "str_int": Column(None, _checked((int, np.integer), lambda value: _text(int(value))), lambda data: int(data)),
    "str_float": Column(None, _checked((float, np.floating), lambda value: _text(float(value))), float),
    "str_decimal": Column(None, _checked(Decimal, _text), lambda data: Decimal(str(data, "utf-8"))),
    "json": Column(None, _to_json, json.loads),
}


def _scalar(dtype: np.dtype) -> Column:
    """Return the column for one number, decoded as a NumPy scalar."""

    whole = dtype.kind in "iu"

    def encode(value: Any) -> bytes:
        if whole and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
            raise ValueError(f"cannot hold {value}")
        return np.asarray(value).astype(dtype).tobytes()

    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    return Column(dtype.itemsize, _checked(kinds, encode), lambda data: np.frombuffer(data, dtype)[0])


def _array_column(details: str) -> Column:
    """Return the column for arrays; ``details`` follows ``ndarray:``. Decoded arrays are read-only."""
    name, _, extents = details.partition(":")
    if name and name not in _DTYPE_CODES:
        raise ValueError("which is not supported")
    fixed_dtype = np.dtype(name).newbyteorder("<") if name else None
    fixed_shape = None
    if extents:
        fixed_shape = tuple(int(extent) for extent in extents.split(",") if extent.isdecimal())
        if len(fixed_shape) != extents.count(",") + 1 or 0 in fixed_shape:
            raise ValueError("whose shape is not a list of positive numbers")

    def encode(array: np.ndarray) -> bytes:
        dtype, shape = array.dtype, array.shape
        if dtype.name not in _DTYPE_CODES or fixed_dtype not in (None, dtype.newbyteorder("<")):
            raise ValueError(f"cannot hold {dtype.name}")
        if not array.size or fixed_shape not in (None, shape):
            raise ValueError(f"cannot hold an array of shape {shape}")
        head = b"" if fixed_dtype else bytes([_DTYPE_CODES[dtype.name]])
        return head + (b"" if fixed_shape else _shape_bytes(shape)) + array.astype(dtype.newbyteorder("<")).tobytes()

    def decode(data: bytes) -> np.ndarray:
        dtype, start = fixed_dtype or _DTYPES[data[0]], 0 if fixed_dtype else 1
        shape, start = (fixed_shape, start) if fixed_shape else _read_shape(data, start)
        if len(data) - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"has {len(data) - start} bytes for an array of shape {shape} and type {dtype.name}")
        return np.frombuffer(data, dtype, offset=start).reshape(shape)

    size = fixed_dtype.itemsize * math.prod(fixed_shape) if fixed_dtype and fixed_shape else None
    return Column(size, _checked(np.ndarray, encode), decode)


def _shape_bytes(shape: tuple[int, ...]) -> bytes:
    if not 1 <= len(shape) <= _MOST_AXES:
        raise ValueError(f"cannot hold an array of {len(shape)} axes")
    width = next(width for width in range(4) if max(shape) < 1 << (8 << width))
    return bytes([len(shape) << 2 | width]) + np.array(shape, f"<u{1 << width}").tobytes()


def _read_shape(data: bytes, start: int) -> tuple[tuple[int, ...], int]:
    """Return the extents that begin at ``start``, and the start of the values."""
    axes, width = data[start] >> 2, 1 << (data[start] & 3)
    end = start + 1 + axes * width
    return tuple(np.frombuffer(data[start + 1 : end], f"<u{width}", axes).tolist()), end


INDEX = "index.json"
FORMAT, VERSION = "mds", 2
XXHASH = ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")
_RESTORE = "Restore the file, or write the set again"


class Hasher(Protocol):
    """The interface of `hashlib` objects."""

    def update(self, data: Any) -> None: ...

    def hexdigest(self) -> str: ...


def new_hasher(algorithm: str) -> Hasher | None:
    """Return a new hasher, or None if the algorithm needs the package xxhash and it is not installed. Raises ValueError
    if no checksum of a fixed size has this name."""
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
    """A file as listed in the index."""

    name: Annotated[str, AfterValidator(_inside)] = Field(alias="basename")  # path from the folder of the set
    num_bytes: Count = Field(alias="bytes")
    hashes: dict[Annotated[str, AfterValidator(_known)], str]  # algorithm -> hexadecimal digest


class ShardInfo(Document):
    """A shard as listed in the index."""

    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]
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


class MdsIndex(NamedTuple):
    """The contents of index.json."""

    columns: dict[str, str]  # name -> encoding, in the order in a sample
    shards: list[ShardInfo]


def parse_index(path: Path | str, raw: bytes) -> MdsIndex:
    """Parse an index; ``path`` is for messages. Raises UserError if it is inconsistent, not the index of an MDS set of
    version 2, or has an unsupported column."""
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
    """Return the `Column` of each encoding by name. Raises UserError naming ``subject`` if one is not supported."""
    found = {}
    for name, encoding in columns.items():
        try:
            found[name] = column(encoding)
        except ValueError as error:
            reason = f"column {name!r} has encoding {encoding!r}, {error}"
            raise UserError("data.unsupported", subject, reason, "Write the set again with another encoding") from None
    return found
