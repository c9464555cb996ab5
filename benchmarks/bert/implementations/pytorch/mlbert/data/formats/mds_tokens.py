"""Token ids in a column of an MDS set, as the converters of several projects store them.

A value is one of these, little-endian:

* ``bytes``: 64-bit ids (MosaicBERT's converter). Other converters store 32 or 16 bits, which the
  index does not say, so that the values decide (`width_of`).
* ``ndarray``, ``ndarray:TYPE`` or ``ndarray:TYPE:SHAPE`` (LLM Foundry, ModernBERT): without TYPE in
  the encoding, a value starts with a byte for the type of the numbers; without SHAPE, a byte for
  the number of axes and the width of their lengths, and the lengths, come next. Then the numbers.

Format: the API reference of MosaicML Streaming's ``NDArray`` encoding, version 0.13.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from mlbert.data.formats.mds_files import BYTES

# bytes of a value -> its ids, int64 [T]; raises ValueError if the value is damaged
Decoder = Callable[[bytes], np.ndarray]

# The first byte of an array -> type.
_INTEGERS: dict[int, np.dtype] = {
    8: np.dtype("u1"),
    9: np.dtype("i1"),
    16: np.dtype("<u2"),
    17: np.dtype("<i2"),
    32: np.dtype("<u4"),
    33: np.dtype("<i4"),
    64: np.dtype("<u8"),
    65: np.dtype("<i8"),
}
_BY_NAME = {dtype.name: dtype for dtype in _INTEGERS.values()}
_ARRAY = re.compile(r"ndarray(?::(?P<type>\w+)(?::(?P<shape>\d+(?:,\d+)*))?)?")
# In an array's first byte: one axis. The remainder says how wide its length is: there are 4 widths.
AXIS = 4
_WIDTH_CODES = {1: 0, 2: 1, 4: 2, 8: 3}
_WIDTHS = (np.dtype("<i8"), np.dtype("<i4"), np.dtype("<u2"))  # of ids stored as bytes
_MOST_ID = 1 << 20  # larger numbers are no ids: several ids were read as one number


class ArrayForm(NamedTuple):
    """How the values of an array column are stored."""

    dtype: np.dtype | None  # None: the first byte of a value names its type
    has_shape: bool  # the encoding gives the shape; otherwise each value begins with it

    @staticmethod
    def dtype_of(code: int) -> np.dtype | None:
        """Return the integer type that the first byte of a value names, or None."""
        return _INTEGERS.get(code)


@cache  # called for each sample
def array_form(encoding: str | None) -> ArrayForm | None:
    """Return the form of an array column; None for other columns, and arrays of other numbers than
    integers.
    """
    match = _ARRAY.fullmatch(encoding or "")
    if match is None or (match["type"] is not None and match["type"] not in _BY_NAME):
        return None
    dtype = None if match["type"] is None else _BY_NAME[match["type"]]
    return ArrayForm(dtype, match["shape"] is not None)


def length_widths(lengths: np.ndarray) -> np.ndarray:
    """Return the bytes that each length (int, of any shape) takes in an array's shape, int64."""
    return np.select([lengths < 1 << 8, lengths < 1 << 16, lengths < 1 << 32], [1, 2, 4], 8)


def _length_width(length: int) -> int:
    """Return what `length_widths` does, without an array for one length."""
    return next((width for width in (1, 2, 4) if length < 1 << 8 * width), 8)


def array_header_bytes(lengths: np.ndarray) -> np.ndarray:
    """Return int64 [n], the bytes in front of the numbers in `encode_array`'s values for texts of
    these lengths (int [n]).
    """
    return 1 + length_widths(lengths)


def encode_array(ids: np.ndarray, encoding: str) -> bytes:
    """Return the value of a column of ``ndarray:TYPE`` for the ids of one text, int [T], T > 0.

    It is the number of axes and the width of a length, the length, and the ids.
    """
    form = array_form(encoding)
    assert form is not None, "an array column"
    assert form.dtype is not None, "the encoding names the type"
    assert not form.has_shape, "each value has its own length"
    width = _length_width(len(ids))
    header = bytes([AXIS + _WIDTH_CODES[width]])
    return (
        header + len(ids).to_bytes(width, "little") + ids.astype(form.dtype, copy=False).tobytes()
    )


def holds_tokens(encoding: str | None) -> bool:
    """Return True if a column of this encoding can hold token ids."""
    return encoding == BYTES or array_form(encoding) is not None


def decoder_of(encoding: str, first: Sequence[bytes]) -> Decoder:
    """Return what decodes the values of a column; ``first`` are the first ones of a shard."""
    if encoding == BYTES:
        dtype = width_of(first)
        return lambda value: _numbers(value, dtype)
    form = array_form(encoding)
    assert form is not None, "holds_tokens checks the encoding"
    return lambda value: _array(value, form.dtype, form.has_shape)


def width_of(values: Sequence[bytes]) -> np.dtype:
    """Return the type of ids stored as bytes: the widest one with which most numbers can be ids.

    Two small numbers that are read as one wide number are far above every vocabulary, unless the
    second one is 0, which is padding. Numbers that are 0 are therefore not counted.
    """
    for dtype in _WIDTHS:
        if any(len(value) % dtype.itemsize for value in values):
            continue
        numbers = np.frombuffer(b"".join(values), dtype)
        numbers = numbers[numbers != 0]
        is_id = (numbers > -_MOST_ID) & (numbers < _MOST_ID)
        if not len(numbers) or is_id.mean() > 0.5:
            return dtype
    return _WIDTHS[0]


def _array(value: bytes, dtype: np.dtype | None, has_shape: bool) -> np.ndarray:
    start = 0
    if dtype is None:
        dtype = _INTEGERS.get(value[0]) if value else None
        if dtype is None:
            raise ValueError("its numbers are not integers")
        start = 1
    if has_shape:
        return _numbers(value[start:], dtype)
    sizes, start = _shape(value, start)
    ids = _numbers(value[start:], dtype)
    if sum(size != 1 for size in sizes) > 1 or math.prod(sizes) != len(ids):
        raise ValueError(f"its shape is {sizes}, and it has {len(ids)} numbers")
    return ids


def _shape(value: bytes, start: int) -> tuple[list[int], int]:
    """Return the lengths of an array's axes, and where its numbers begin.

    Raises ValueError if they are missing.
    """
    if start >= len(value):
        raise ValueError("its shape is missing")
    axes, code = divmod(value[start], AXIS)
    width = 1 << code  # bytes of each axis' length
    end = start + 1 + axes * width
    lengths = value[start + 1 : end]
    sizes = [
        int.from_bytes(lengths[place : place + width], "little")
        for place in range(0, len(lengths), width)
    ]
    return sizes, end


def _numbers(value: bytes, dtype: np.dtype) -> np.ndarray:
    if not value or len(value) % dtype.itemsize:
        raise ValueError(f"it is empty or not made of {8 * dtype.itemsize}-bit numbers")
    return np.frombuffer(value, dtype).astype(np.int64)
