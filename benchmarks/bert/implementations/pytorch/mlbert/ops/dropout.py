"""Counter-based dropout masks, shared by all implementations of all ops.

A mask is a pure function of a 32-bit key, a row number and a column number. There is no generator
state, the backward pass recomputes the same mask, and a step's masks do not depend on how its
tokens are split over ranks, accumulation steps or threads.

Definition (all arithmetic modulo 2**32)::

    mix32(x)            x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;
                        x ^= x >> 16
    row_hash(k, r)      mix32(mix32(r + 0x9E3779B9) ^ k)
    word(k, r, g)       mix32(row_hash(k, r) ^ (g * 0x9E3779B9))
    byte(k, r, c)       byte c % 4 (0 the least significant) of word(k, r, c // 4)
    dropped             byte(k, r, c) < threshold,  threshold = round(256 * p)
    kept values         are multiplied by 256 / (256 - threshold), so the mean is exact
    head_key(k, n)      mix32(k + (n + 1) * 0x9E3779B9): attention's key for head n; its rows are
                        query tokens, its columns key positions within the sequence

mix32 is a bijection with an avalanche bias below 0.2 % per bit (constants from C. Wellons' search,
public domain).

Legend: R rows, N heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A number, or its bits as an int32 scalar tensor on the device, so that replays of a captured graph
# can use new masks. C kernels only accept numbers.
Key = int | Tensor

MASK32 = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
MULTIPLIER_1 = 0x7FEB352D
MULTIPLIER_2 = 0x846CA68B
# The same multiplier as a signed number: its product with a 32-bit word fits in int64.
_MULTIPLIER_2_SIGNED = MULTIPLIER_2 - (1 << 32)


def mix32(x: int) -> int:
    """Apply mix32 of the module docstring to one 32-bit word."""
    x &= MASK32
    x = ((x ^ (x >> 16)) * MULTIPLIER_1) & MASK32
    x = ((x ^ (x >> 15)) * MULTIPLIER_2) & MASK32
    return x ^ (x >> 16)


def _mix32_tensor(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * MULTIPLIER_1) & MASK32
    x = ((x ^ (x >> 15)) * _MULTIPLIER_2_SIGNED) & MASK32
    return x ^ (x >> 16)


def dropout_key(seed: int, step: int, layer: int, site: int) -> int:
    """Return the 32-bit key of one dropout site.

    Args:
        seed: the run's seed (64 bits are used).
        step: optimizer step, the same for all its accumulation steps.
        layer: layer number; for embeddings and heads, any number not used by a layer.
        site: number of the dropout within the layer.
    """
    key = _step_key(seed, step)
    for word in (layer, site):
        key = mix32((key + GOLDEN) ^ (word & MASK32))
    return key


def _step_key(seed: int, step: int) -> int:
    key = 0
    for word in (seed & MASK32, (seed >> 32) & MASK32, step):
        key = mix32((key + GOLDEN) ^ (word & MASK32))
    return key


def dropout_keys(seed: int, step: int, num_layers: int, num_sites: int) -> Tensor:
    """Return `dropout_key` of all layers and sites:
    bits as int32 [num_layers, num_sites] on the CPU.
    """
    of_step = _step_key(seed, step)
    # In Python: the operators of so few numbers would take ten times as long.
    of_layers = [mix32((of_step + GOLDEN) ^ layer) for layer in range(num_layers)]
    bits = [mix32((key + GOLDEN) ^ site) for key in of_layers for site in range(num_sites)]
    keys = torch.tensor([_signed(word) for word in bits], dtype=torch.int32)
    return keys.view(num_layers, num_sites)


def _signed(word: int) -> int:
    """Return the signed number with the bits of a 32-bit word."""
    return word - (1 << 32) if word > MASK32 >> 1 else word


def head_key(key: int, head: int) -> int:
    """Return the key of attention head `head` (see the module docstring)."""
    return mix32(key + (head + 1) * GOLDEN)


def dropout_threshold(probability: float) -> int:
    """Return how many of 256 byte values drop an element:
    round(256 p), so 0.1 becomes 26/256 = 0.1016.

    Raises:
        ValueError: p is negative or would drop every element.
    """
    if not 0 <= probability < 255.5 / 256:
        raise ValueError(f"dropout probability {probability} is not in [0, 0.998)")
    return int(256 * probability + 0.5)


def dropout_scale(threshold: int) -> float:
    """Return the factor of kept elements."""
    return 256.0 / (256 - threshold)


def keep_mask(key: Key, rows: Tensor, columns: int, probability: float) -> Tensor:
    """Return which elements are kept: bool [R, columns] for rows int32 [R]."""
    return _keep_mask(_key_tensor(key, rows), rows, columns, probability)[0]


def attention_keep_mask(
    key: Key, rows: Tensor, num_heads: int, columns: int, probability: float
) -> Tensor:
    """Return which attention probabilities are kept:
    bool [N, R, columns] for query rows int32 [R].
    """
    return _keep_mask(_head_keys(key, rows, num_heads), rows, columns, probability)


def attention_keep_mask_at(
    key: Key, rows: Tensor, num_heads: int, columns: Tensor, probability: float
) -> Tensor:
    """Return `attention_keep_mask` at some key positions of each query.

    bool [N, R, C] for columns int64 [R, C].
    """
    row_hash = _row_hash(_head_keys(key, rows, num_heads), rows)
    word = _mix32_tensor(row_hash[:, :, None] ^ (((columns >> 2) * GOLDEN) & MASK32))
    byte = (word >> (8 * (columns & 3))) & 0xFF
    return byte >= dropout_threshold(probability)


def _head_keys(key: Key, rows: Tensor, num_heads: int) -> Tensor:
    """Return `head_key` of all heads, int64 [N]."""
    heads = (torch.arange(1, num_heads + 1, device=rows.device) * GOLDEN) & MASK32
    return _mix32_tensor((_key_tensor(key, rows) + heads) & MASK32)


def _key_tensor(key: Key, rows: Tensor) -> Tensor:
    """Return the key as int64 [1] on the device of the rows."""
    if isinstance(key, Tensor):
        return key.reshape(1).to(torch.int64) & MASK32
    return torch.full((1,), key & MASK32, dtype=torch.int64, device=rows.device)


def _row_hash(keys: Tensor, rows: Tensor) -> Tensor:
    """Return row_hash of the module docstring, int64 [N, R], for keys [N] and rows [R]."""
    row_mix = _mix32_tensor((rows.to(torch.int64) + GOLDEN) & MASK32)
    return _mix32_tensor(row_mix[None, :] ^ keys[:, None])


def _keep_mask(keys: Tensor, rows: Tensor, columns: int, probability: float) -> Tensor:
    row_hash = _row_hash(keys, rows)
    group = (torch.arange((columns + 3) // 4, device=rows.device) * GOLDEN) & MASK32
    word = _mix32_tensor(row_hash[:, :, None] ^ group)
    byte = (word[..., None] >> (8 * torch.arange(4, device=rows.device))) & 0xFF
    return byte.flatten(2)[:, :, :columns] >= dropout_threshold(probability)
