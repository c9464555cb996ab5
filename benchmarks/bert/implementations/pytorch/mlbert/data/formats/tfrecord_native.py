"""Bindings of csrc/cpu/tfrecord_*.c: compiled versions of the functions of
`mlbert.data.formats.tfrecord_plain`.

Legend: R records, S sequences.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np

from mlbert.data.formats.padded import MAX_ID
from mlbert.data.formats.ragged import DTYPES, Ragged, sizes_of
from mlbert.data.formats.tfrecord_plain import Widths
from mlbert.host import native

SOURCES = ("tfrecord_frame.c", "tfrecord_read.c", "tfrecord_write.c")
_FUNCTIONS = {
    "tfrecord_crc32c": "pl:u",
    "tfrecord_crc32c_table": "pl:u",
    "tfrecord_scan": "pllp:l",
    "tfrecord_parse": "pppllllpp:l",
    "tfrecord_encode": "plllp:l",
}
_EXTRA_BYTES = 512  # of a record, excluding its lists' values: checksums, names, tags and lengths


class _Rows(ctypes.Structure):
    """`struct rows` of tfrecord.h, with pointers in the order of `DTYPES`."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in DTYPES)

    @classmethod
    def over(cls, arrays: dict[str, np.ndarray]) -> _Rows:
        return cls(**{name: array.ctypes.data for name, array in arrays.items()})


@functools.cache
def library() -> ctypes.CDLL:
    """Return the compiled functions.

    Raises mlbert.host.native.NativeUnavailable if they cannot be compiled or loaded.
    """
    return native.load("tfrecord", SOURCES, _FUNCTIONS, openmp=False)


def _address(array: np.ndarray, dtype: str) -> int:
    assert array.dtype == np.dtype(dtype), f"expected {dtype}, got {array.dtype}"
    assert array.flags.c_contiguous, "a contiguous array is needed"
    return array.ctypes.data


def scan(data: np.ndarray, most: int) -> np.ndarray:
    """See `mlbert.data.formats.tfrecord_plain.scan`."""
    starts = np.empty(most + 1, np.int64)
    count = library().tfrecord_scan(_address(data, "u1"), len(data), most, starts.ctypes.data)
    return starts[: count + 1]


def parse(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray, widths: Widths, vocab_size: int
) -> tuple[Ragged, np.ndarray]:
    """See `mlbert.data.formats.tfrecord_plain.parse`."""
    count = len(starts)
    assert len(ends) == count, "starts and ends must have the same length"
    assert vocab_size <= MAX_ID + 1, "ids have 16 bits"
    tokens = count * widths.max_seq_length
    masked = count * widths.max_predictions
    most = sizes_of(count, tokens, masked)
    arrays = {name: np.empty(most[name], dtype) for name, dtype in DTYPES.items()}
    good = np.empty(count, bool)
    num_rows = library().tfrecord_parse(
        _address(data, "u1"),
        _address(starts, "i8"),
        _address(ends, "i8"),
        count,
        *widths,
        vocab_size,
        ctypes.byref(_Rows.over(arrays)),
        good.ctypes.data,
    )
    if num_rows < 0:
        raise MemoryError("no memory for one example")
    used = sizes_of(
        num_rows, int(arrays["offsets"][num_rows]), int(arrays["masked_offsets"][num_rows])
    )
    # Copy only the used parts, because the arrays have the maximum size.
    return Ragged(**{name: array[: used[name]].copy() for name, array in arrays.items()}), good


def encode(rows: Ragged, widths: Widths) -> memoryview:
    """See `mlbert.data.formats.tfrecord_plain.encode`."""
    arrays = {
        name: np.ascontiguousarray(getattr(rows, name), dtype) for name, dtype in DTYPES.items()
    }
    most = _EXTRA_BYTES + 5 * widths.max_seq_length + 10 * widths.max_predictions
    out = np.empty(len(rows) * most, np.uint8)
    size = library().tfrecord_encode(
        ctypes.byref(_Rows.over(arrays)), len(rows), *widths, out.ctypes.data
    )
    return out[:size].data
