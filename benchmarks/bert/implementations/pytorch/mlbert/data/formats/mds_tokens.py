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
_WIDTHS = (np.dtype("<i8"), np.dtype("<i4"), np.dtype("<u2"))  # of ids stored as bytes
_MOST_ID = 1 << 20  # larger numbers are no ids: several ids were read as one number


def holds_tokens(encoding: str | None) -> bool:
    """Return True if a column of this encoding can hold token ids."""
    if encoding == BYTES:
        return True
    match = _ARRAY.fullmatch(encoding or "")
    return match is not None and (match["type"] is None or match["type"] in _BY_NAME)


def decoder_of(encoding: str, first: Sequence[bytes]) -> Decoder:
    """Return what decodes the values of a column; ``first`` are the first ones of a shard."""
    if encoding == BYTES:
        dtype = width_of(first)
        return lambda value: _numbers(value, dtype)
    match = _ARRAY.fullmatch(encoding)
    assert match is not None, "holds_tokens checks the encoding"
    named = _BY_NAME.get(match["type"])
    has_shape = match["shape"] is not None
    return lambda value: _array(value, named, has_shape)


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
    axes, code = divmod(value[start], 4)
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
