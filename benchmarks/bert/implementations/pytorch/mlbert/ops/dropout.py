"""Counter-based dropout masks: one definition that every implementation of every op draws from.

A mask is a pure function of a 32-bit key, a row number and a column number, so no generator state is kept, the
backward pass draws the same mask again, and a step's masks do not depend on how its tokens are spread over ranks,
accumulation steps or threads.

Definition (all arithmetic modulo 2**32)::

    mix32(x)            x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16
    row_hash(k, r)      mix32(mix32(r + 0x9E3779B9) ^ k)
    word(k, r, g)       mix32(row_hash(k, r) ^ (g * 0x9E3779B9))
    byte(k, r, c)       byte c % 4 (0 the least significant) of word(k, r, c // 4)
    dropped             byte(k, r, c) < threshold,  threshold = round(256 * p)
    kept values         are multiplied by 256 / (256 - threshold), so the mean is exact
    head_key(k, n)      mix32(k + (n + 1) * 0x9E3779B9): attention's key for head n; its rows are query tokens, its
                        columns key positions within the sequence

mix32 is a bijection with avalanche bias below 0.2 % a bit (constants found by C. Wellons' search, public domain).

Legend: R rows, N heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
MULTIPLIER_1 = 0x7FEB352D
MULTIPLIER_2 = 0x846CA68B
# The same multiplier as a signed number: a 32-bit word times it stays within int64.
_MULTIPLIER_2_SIGNED = MULTIPLIER_2 - (1 << 32)


def mix32(x: int) -> int:
    """The integer mix of the module docstring on one 32-bit word."""
    x &= MASK32
    x = ((x ^ (x >> 16)) * MULTIPLIER_1) & MASK32
    x = ((x ^ (x >> 15)) * MULTIPLIER_2) & MASK32
    return x ^ (x >> 16)


def _mix32_tensor(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * MULTIPLIER_1) & MASK32
    x = ((x ^ (x >> 15)) * _MULTIPLIER_2_SIGNED) & MASK32
    return x ^ (x >> 16)


def dropout_key(seed: int, step: int, layer: int, site: int) -> int:
    """The 32-bit key of one dropout site.

    Args:
        seed: the run's seed (64 bits count).
        step: optimizer step, the same for all accumulation steps of it.
        layer: layer number; any number not used by a layer for embeddings and heads.
        site: which dropout of the layer.
    """
    key = 0
    for word in (seed & MASK32, (seed >> 32) & MASK32, step, layer, site):
        key = mix32((key + GOLDEN) ^ (word & MASK32))
    return key


def head_key(key: int, head: int) -> int:
    """The key of attention head `head` (see the module docstring)."""
    return mix32(key + (head + 1) * GOLDEN)


def dropout_threshold(probability: float) -> int:
    """Bytes of 256 that drop an element: round(256 p), so 0.1 becomes 26/256 = 0.1016.

    Raises:
        ValueError: p is not in [0, 1).
    """
    threshold = int(256 * probability + 0.5) if probability >= 0 else -1
    if not 0 <= threshold < 256:
        raise ValueError(f"dropout probability {probability} is not in [0, 1)")
    return threshold


def dropout_scale(threshold: int) -> float:
    """What kept elements are multiplied by."""
    return 256.0 / (256 - threshold)


def keep_mask(key: int, rows: Tensor, columns: int, probability: float) -> Tensor:
    """Which elements stay: bool [R, columns] for rows int32 [R]."""
    return _keep_mask(torch.tensor([key], device=rows.device), rows, columns, probability)[0]


def attention_keep_mask(key: int, rows: Tensor, num_heads: int, columns: int, probability: float) -> Tensor:
    """Which attention probabilities stay: bool [N, R, columns] for query rows int32 [R]."""
    keys = torch.tensor([head_key(key, head) for head in range(num_heads)], device=rows.device)
    return _keep_mask(keys, rows, columns, probability)


def _keep_mask(keys: Tensor, rows: Tensor, columns: int, probability: float) -> Tensor:
    row_mix = _mix32_tensor((rows.to(torch.int64) + GOLDEN) & MASK32)
    row_hash = _mix32_tensor(row_mix[None, :] ^ keys[:, None])
    group = (torch.arange((columns + 3) // 4, device=rows.device) * GOLDEN) & MASK32
    word = _mix32_tensor(row_hash[:, :, None] ^ group)
    byte = (word[..., None] >> torch.tensor([0, 8, 16, 24], device=rows.device)) & 0xFF
    return byte.flatten(2)[:, :, :columns] >= dropout_threshold(probability)
