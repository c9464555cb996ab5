"""Python's side of csrc/cpu/optim.c: the library, its argument types and the table of blocks it walks over."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mlbert.core import native
from mlbert.optim.flat import Segment

# Sums are made a block at a time and the blocks' sums added in order, so results do not depend on the thread count.
BLOCK_ELEMENTS = 8192
# Segments are taken together until they hold this many elements: the second pass over a group finds weights and
# moments (12 bytes an element) still in the cache, and there is one wait of the threads a group.
GROUP_ELEMENTS = 1 << 20
# A thread with less than this (2 MiB a buffer) costs more to wake and to wait for than it saves.
MIN_ELEMENTS_PER_THREAD = 1 << 19


class Scalars(ctypes.Structure):
    """`struct scalars` of optim.c."""

    _fields_ = (
        ("beta_1", ctypes.c_double),
        ("beta_2", ctypes.c_double),
        ("lr", ctypes.c_float),
        ("grad_scale", ctypes.c_float),
        ("correction_1", ctypes.c_float),
        ("correction_2", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("weight_decay", ctypes.c_float),
    )


class Blocks(ctypes.Structure):
    """`struct blocks` of optim.c."""

    _fields_ = (
        ("offset", ctypes.c_void_p),
        ("length", ctypes.c_void_p),
        ("segment", ctypes.c_void_p),
        ("segment_first_block", ctypes.c_void_p),
        ("segment_decay", ctypes.c_void_p),
        ("group_first_block", ctypes.c_void_p),
        ("num_blocks", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
    )


def _group_starts(segments: Sequence[Segment], segment_first_block: np.ndarray) -> np.ndarray:
    starts = [0]
    elements = 0
    for index, segment in enumerate(segments):
        elements += segment.numel
        if elements >= GROUP_ELEMENTS or index == len(segments) - 1:
            starts.append(int(segment_first_block[index + 1]))
            elements = 0
    return np.array(starts, dtype=np.int64)


def _declare(library: ctypes.CDLL) -> None:
    pointer = ctypes.c_void_p
    library.optim_sum_squares.argtypes = (pointer, ctypes.c_int64, ctypes.c_int64, pointer, ctypes.c_int)
    library.optim_sum_squares.restype = ctypes.c_double
    common = (pointer, pointer, pointer, pointer, ctypes.POINTER(Blocks), ctypes.POINTER(Scalars))
    library.optim_lamb.argtypes = (*common, pointer, pointer, ctypes.c_int)
    library.optim_lamb.restype = None
    library.optim_adamw.argtypes = (*common, ctypes.c_int)
    library.optim_adamw.restype = None


class OptimizerKernels:
    """The compiled kernels, bound to one layout of segments.

    Args:
        segments: back to back, from offset 0.

    Raises:
        native.NativeUnavailable: there is no compiler, or the library cannot be built or loaded.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._library = native.load("optim", ["optim.c"])
        _declare(self._library)
        numels = np.array([segment.numel for segment in segments], dtype=np.int64)
        counts = -(-numels // BLOCK_ELEMENTS)
        first_block = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        owner = np.repeat(np.arange(len(segments), dtype=np.int64), counts)
        within = (np.arange(len(owner), dtype=np.int64) - first_block[owner]) * BLOCK_ELEMENTS
        starts = np.array([segment.offset for segment in segments], dtype=np.int64)
        self._arrays = {
            "offset": starts[owner] + within,
            "length": np.minimum(numels[owner] - within, BLOCK_ELEMENTS),
            "segment": owner,
            "segment_first_block": first_block,
            "segment_decay": np.array([segment.decay for segment in segments], dtype=np.int64),
            "group_first_block": _group_starts(segments, first_block),
        }
        addresses = {name: array.ctypes.data for name, array in self._arrays.items()}
        num_groups = len(self._arrays["group_first_block"]) - 1
        self._blocks = Blocks(**addresses, num_blocks=len(owner), num_groups=num_groups)
        self._numel = int(numels.sum())
        # Sums of squares of weights and updates, one a block. The norm's blocks ignore the segments: never more.
        self._sums = np.zeros((2, len(owner)), dtype=np.float64)

    def _addresses(self, buffers: Sequence[Tensor]) -> list[int]:
        for buffer in buffers:
            assert buffer.dtype == torch.float32, f"float32 expected, not {buffer.dtype}"
            assert buffer.is_contiguous(), "contiguous buffers expected"
            assert buffer.numel() == self._numel, f"{buffer.numel()} elements, the segments have {self._numel}"
            assert buffer.device.type == "cpu", f"CPU expected, not {buffer.device}"
        return [buffer.data_ptr() for buffer in buffers]

    def _threads(self) -> int:
        return max(1, min(torch.get_num_threads(), self._numel // MIN_ELEMENTS_PER_THREAD))

    def sum_squares(self, buffer: Tensor) -> float:
        """Sum of squares of a float32 buffer [numel], accumulated in float64."""
        (address,) = self._addresses([buffer])
        sums = self._sums.ctypes.data
        return float(self._library.optim_sum_squares(address, self._numel, BLOCK_ELEMENTS, sums, self._threads()))

    def lamb(self, buffers: Sequence[Tensor], scalars: Scalars) -> None:
        """One LAMB update in place of (weights, gradient, first moment, second moment), float32 [numel] each."""
        sums = [row.ctypes.data for row in self._sums]
        self._library.optim_lamb(
            *self._addresses(buffers),
            ctypes.byref(self._blocks),
            ctypes.byref(scalars),
            *sums,
            self._threads(),
        )

    def adamw(self, buffers: Sequence[Tensor], scalars: Scalars) -> None:
        """One AdamW update in place of (weights, gradient, first moment, second moment), float32 [numel] each."""
        self._library.optim_adamw(
            *self._addresses(buffers), ctypes.byref(self._blocks), ctypes.byref(scalars), self._threads()
        )
