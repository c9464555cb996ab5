"""Values of an MDS sample as bytes: one `Column` for each encoding. Pickled ones are refused.

Formats: documentation of MosaicML Streaming ("Dataset format", "Supported encodings"), version 2 of MDS. Numbers are
little-endian. Arrays that say their own dtype or shape begin with them:

=====================  ======================================================================
``ndarray:D:2,3``      the values
``ndarray:D``          uint8 (axes * 4 + log2 of the bytes of an extent), extents, values
``ndarray``            uint8 (dtype; see `_DTYPE_CODES`), then as ``ndarray:D``
=====================  ======================================================================
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

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
    """One encoding. ``encode`` and ``decode`` raise ValueError (in words that follow a column's name) or an error of
    Python's own conversions; see `CONVERSION_ERRORS`."""

    size: int | None  # bytes of every value; None where each has its own
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


CONVERSION_ERRORS = (ValueError, TypeError, OverflowError, ArithmeticError, KeyError, IndexError, RecursionError)


def column(encoding: str) -> Column:
    """The column of an encoding. Raises ValueError: there is none; the words follow "has encoding ..."."""
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
    """``encode`` of values of these kinds only."""

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
    """One number; decoded as NumPy's scalar."""

    whole = dtype.kind in "iu"

    def encode(value: Any) -> bytes:
        if whole and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
            raise ValueError(f"cannot hold {value}")
        return np.asarray(value).astype(dtype).tobytes()

    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    return Column(dtype.itemsize, _checked(kinds, encode), lambda data: np.frombuffer(data, dtype)[0])


def _array_column(details: str) -> Column:
    """``details`` is what follows ``ndarray:``. Arrays are decoded read-only."""
    name, _, extents = details.partition(":")
    if name and name not in _DTYPE_CODES:
        raise ValueError("which is not supported")
    fixed_dtype = np.dtype(name).newbyteorder("<") if name else None
    fixed_shape = None
    if extents:
        fixed_shape = tuple(int(extent) for extent in extents.split(",") if extent.isdecimal())
        if len(fixed_shape) != extents.count(",") + 1 or 0 in fixed_shape:
            raise ValueError("whose shape is not one of numbers above 0")

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
    """The extents that begin at ``start``, and where the values begin."""
    axes, width = data[start] >> 2, 1 << (data[start] & 3)
    end = start + 1 + axes * width
    return tuple(np.frombuffer(data[start + 1 : end], f"<u{width}", axes).tolist()), end
