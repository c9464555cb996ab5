"""Launch configurations of the attention kernels, by device, dtype and head size."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from mlbert.ops.attention import TRITON_HEAD_SIZES
from mlbert.ops.triton.device import capability

HOPPER = 90  # compute capability times ten
# Kernels, as indices of the launch configurations.
FORWARD = 0
GRADIENT_OF_Q = 1
GRADIENT_OF_KV = 2


@dataclass(frozen=True)
class AttentionBlocks:
    """Launch configuration of a kernel: queries and keys per tile; Triton's warps, pipeline stages
    and, if it has one, limit of registers.
    """

    BLOCK_Q: int
    BLOCK_K: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None

    def options(self) -> dict[str, int]:
        """Return a launch's keyword arguments."""
        return {name: value for name, value in asdict(self).items() if value is not None}


# Head size -> forward, gradient of Q, gradient of K and V, for 16-bit dtypes. Head size 64 on
# Hopper is the fastest of some fifty that were measured on an H200
# (records/2026-11-26_gpu-check_h200). The others are chosen from the compiler's report
# (tools/compile_kernels.py: no spills, most warps per multiprocessor; with three stages, tiles are
# copied one iteration ahead, with two they are awaited as soon as they are requested). BLOCK_K must
# be a multiple of 64 in the forward pass, which writes 64 mask bits together, and of 32 in the
# others.
_HOPPER = {
    32: (
        AttentionBlocks(128, 64, 8, 3),
        AttentionBlocks(64, 64, 4, 2),
        AttentionBlocks(64, 64, 4, 2),
    ),
    # Three blocks of the last share a multiprocessor, though it spills 64 bytes:
    # backward took 8 % less.
    64: (
        AttentionBlocks(64, 64, 4, 3),
        AttentionBlocks(64, 64, 4, 3),
        AttentionBlocks(64, 64, 4, 3, 168),
    ),
    128: (
        AttentionBlocks(128, 64, 8, 2),
        AttentionBlocks(64, 64, 8, 2),
        AttentionBlocks(32, 64, 8, 2),
    ),
}
_AMPERE = {
    32: (
        AttentionBlocks(128, 64, 8, 3),
        AttentionBlocks(64, 64, 4, 2),
        AttentionBlocks(64, 64, 4, 2),
    ),
    64: (
        AttentionBlocks(128, 64, 8, 2),
        AttentionBlocks(64, 64, 4, 2),
        AttentionBlocks(64, 32, 4, 2),
    ),
    128: (
        AttentionBlocks(128, 64, 8, 2),
        AttentionBlocks(32, 64, 8, 2),
        AttentionBlocks(32, 64, 8, 2),
    ),
}
# Gradient of K and V with a window, in place of a configuration with a limit of registers. With 64
# keys, ptxas serializes the matrix products (C7515) or spills.
LOCAL_KEYS = AttentionBlocks(64, 32, 4, 3)
# float32 products run without tensor cores and spill registers; only for comparisons.
_SINGLE = {
    32: (AttentionBlocks(32, 64, 4, 1),) * 3,
    64: (AttentionBlocks(16, 64, 4, 1),) * 3,
    128: (AttentionBlocks(16, 64, 4, 1),) * 3,
}
assert tuple(_SINGLE) == TRITON_HEAD_SIZES


def blocks_of(qkv: Tensor) -> tuple[AttentionBlocks, ...]:
    """Return the launch configurations of the three kernels."""
    head_size = qkv.shape[3]
    if qkv.dtype == torch.float32:
        return _SINGLE[head_size]
    if capability(qkv.device) >= HOPPER:
        return _HOPPER[head_size]
    return _AMPERE[head_size]
