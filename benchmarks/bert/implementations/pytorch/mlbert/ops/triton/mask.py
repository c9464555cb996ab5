"""The dropout masks of `mlbert.ops.dropout` inside Triton kernels, bit for bit.

A mask's row hash is found once a row (`row_hash`) and an element's byte from it (`keep`). The word that four
columns share is mixed twice, not once: a thread of a matrix product holds two neighbouring columns, for which the
compiler mixes once, and passing words between threads would cost more than the second time.

Legend: R rows, C columns.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mlbert.ops import dropout

GOLDEN = tl.constexpr(dropout.GOLDEN)
MULTIPLIER_1 = tl.constexpr(dropout.MULTIPLIER_1)
MULTIPLIER_2 = tl.constexpr(dropout.MULTIPLIER_2)


def key_argument(key: int | Tensor) -> int | Tensor:
    """A 32-bit key as kernels take it: a signed number, so that every key compiles to the same kernel, or an int32
    tensor of one element, which a captured graph can change between its replays."""
    if isinstance(key, Tensor):
        return key
    return key - (1 << 32) if key >= 1 << 31 else key


@triton.jit
def load_key(key):
    """The uint32 key behind `key_argument`."""
    value = tl.load(key) if key.dtype.is_ptr() else key
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def mix32(x):
    """mix32 of `mlbert.ops.dropout` on uint32."""
    x = (x ^ (x >> 16)) * MULTIPLIER_1
    x = (x ^ (x >> 15)) * MULTIPLIER_2
    return x ^ (x >> 16)


@triton.jit
def head_key(key, head):
    """Key uint32 of attention head int32 `head`."""
    return mix32(key + (head + 1).to(tl.uint32) * GOLDEN)


@triton.jit
def row_hash(key, rows):
    """Hash uint32 [R] of mask rows int32 [R] under a uint32 key."""
    return mix32(mix32(rows.to(tl.uint32) + GOLDEN) ^ key)


@triton.jit
def keep(hashes, first, COLUMNS: tl.constexpr, THRESHOLD: tl.constexpr):
    """Which elements stay: bool [R, COLUMNS] for `row_hash` [R] and columns from int32 `first`, a multiple of 4."""
    column = tl.arange(0, COLUMNS)
    # The compiler finds that neighbours share a group only if nothing else uses the numbers it is made from.
    group = (first >> 2) + (tl.arange(COLUMNS, 2 * COLUMNS) >> 2) - COLUMNS // 4
    words = mix32(hashes[:, None] ^ (group.to(tl.uint32) * GOLDEN)[None, :])
    # The column's byte moves to the top; what lies below it does not change the comparison.
    return (words << (24 - 8 * (column & 3)).to(tl.uint32)[None, :]) >= (THRESHOLD << 24)
