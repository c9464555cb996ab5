"""The dropout masks of `mlbert.ops.dropout` in Triton kernels, bit for bit.

The hash of a mask row is computed once per row (`row_hash`), and an element's byte from it (`keep`;
four columns share a word). In attention, a thread of a matrix product has only two adjacent
columns. So we permute the keys (`key_places`), mix each word once (`keep_signs`), and save the mask
as bits for the backward pass (`pack_masks`).

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
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # without inline assembly
# Bytes 1, 1, 0, 0 and 3, 3, 2, 2, each as eight copies of its top bit.
CHOSEN_BYTES = tl.constexpr((0x9988, 0xBBAA))


def key_argument(key: int | Tensor) -> int | Tensor:
    """Return a 32-bit key as a kernel argument: a signed number, so that all keys use the same
    kernel, or an int32 tensor of one element, which can change between replays of a captured graph.
    """
    if isinstance(key, Tensor):
        return key
    return key - (1 << 32) if key >= 1 << 31 else key


@triton.jit
def load_key(key):
    """Return the uint32 key of a `key_argument`."""
    value = tl.load(key) if key.dtype.is_ptr() else key
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def mix32(x):
    """Apply mix32 of `mlbert.ops.dropout` to uint32."""
    x = (x ^ (x >> 16)) * MULTIPLIER_1
    x = (x ^ (x >> 15)) * MULTIPLIER_2
    return x ^ (x >> 16)


@triton.jit
def head_key(key, head):
    """Return the uint32 key of attention head int32 `head`."""
    return mix32(key + (head + 1).to(tl.uint32) * GOLDEN)


@triton.jit
def row_hash(key, rows):
    """Return the hash uint32 [R] of mask rows int32 [R] with a uint32 key."""
    return mix32(mix32(rows.to(tl.uint32) + GOLDEN) ^ key)


@triton.jit
def keep(hashes, first, COLUMNS: tl.constexpr, THRESHOLD: tl.constexpr):
    """Return the kept elements, bool [R, COLUMNS]:
    `row_hash` [R], columns from int32 `first`, a multiple of 4.
    """
    column = tl.arange(0, COLUMNS)
    # The compiler only sees that adjacent columns share a group if nothing else uses this arange.
    group = (tl.arange(COLUMNS, 2 * COLUMNS) >> 2) + (first >> 2) - COLUMNS // 4
    words = mix32(hashes[:, None] ^ (group.to(tl.uint32) * GOLDEN)[None, :])
    # Shift the column's byte to the top; the bits below do not affect the comparison.
    return (words << (24 - 8 * (column & 3)).to(tl.uint32)[None, :]) >= (THRESHOLD << 24)


@triton.jit
def key_places(COLUMNS: tl.constexpr):
    """Return the order of the keys of a block in attention:
    int32 [COLUMNS], a permutation within each 16.

    Of a matrix product's 16 columns a thread has 2 l, 2 l + 1, 2 l + 8 and 2 l + 9. These are
    assigned the keys 4 l to 4 l + 3, so that four keys that share a word of the mask are in one
    thread.
    """
    return key_of(tl.arange(0, COLUMNS))


@triton.jit
def key_of(place):
    """Return the key of a place in the order of `key_places`."""
    return (place & -16) | ((place & 6) << 1) | ((place & 8) >> 2) | (place & 1)


@triton.jit
def keep_signs(hashes, first, COLUMNS: tl.constexpr, THRESHOLD: tl.constexpr):
    """Return which keys are kept: uint32 [R, COLUMNS / 4],
    for `row_hash` [R] and keys from `first`, a multiple of 4.

    Four keys share a word; the top bit of each key's byte is the result, and other bits are
    meaningless.
    """
    group = (first >> 2) + tl.arange(0, COLUMNS // 4)
    return signs_of(hashes[:, None], group[None, :], THRESHOLD)


@triton.jit
def signs_of(hashes, groups, THRESHOLD: tl.constexpr):
    """Return `keep_signs` of row hashes and groups of four keys that are broadcast together.

    A byte is at least the threshold if adding 256 - threshold to it carries. The carries out of the
    lower seven bits are computed for four bytes at once.
    """
    words = mix32(hashes ^ (groups.to(tl.uint32) * GOLDEN))
    carries = (words & 0x7F7F7F7F) + ((256 - THRESHOLD) & 0x7F) * 0x01010101
    return (words | carries) if THRESHOLD <= 128 else (words & carries)


@triton.jit
def keep_pairs(weights, signs, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return 16-bit weights [R, C] in the order of `key_places`, set to 0 unless kept by
    `keep_signs` [R, C/4]; and the masks, int32 [R, C], the same word for two adjacent columns, one
    half for each.
    """
    FOURS: tl.constexpr = [ROWS, COLUMNS // 16, 2, 4]
    chosen = tl.where(tl.arange(0, 2)[None, None, :, None] == 0, CHOSEN_BYTES[0], CHOSEN_BYTES[1])
    signs = tl.broadcast_to(tl.reshape(signs, [ROWS, COLUMNS // 16, 1, 4]), FOURS)
    masks = copied_signs(signs, tl.broadcast_to(chosen, FOURS))
    masks = tl.reshape(
        tl.broadcast_to(masks[:, :, :, :, None], [ROWS, COLUMNS // 16, 2, 4, 2]), [ROWS, COLUMNS]
    )
    if INTERPRETED or weights.dtype.primitive_bitwidth == 32:
        half = (tl.arange(0, COLUMNS) & 1) << 4
        return tl.where((masks >> half[None, :]) & 1 != 0, weights, 0.0), masks
    return select_pairs(weights, masks)


@triton.jit
def select_pairs(weights, masks):
    """Return 16-bit weights, set to 0 where their half of a mask is 0; and the masks.

    Two adjacent weights share a register. The masks are returned to have them in the weights'
    layout.
    """
    # "&": written before the last input is read.
    return tl.inline_asm_elementwise(
        "and.b32 $0, $3, $4; mov.b32 $1, $4; mov.b32 $2, $5;",
        "=&r,=&r,=r,r,r,r", [weights, masks], (weights.dtype, tl.int32), True, 2,
    )  # fmt: skip


@triton.jit
def copied_signs(words, chosen):
    """Return int32 with four bytes, each eight copies of the top bit of a byte of the uint32 words.

    The low three bits of a digit of `chosen` select the byte,
    as in PTX's prmt with the fourth bit of each digit set.
    """
    if INTERPRETED:
        masks = tl.zeros_like(words)
        for byte in tl.static_range(4):
            top = (words >> (8 * (chosen >> (4 * byte) & 7) + 7).to(tl.uint32)) & 1
            masks |= top * (0xFF << (8 * byte))
        return masks.to(tl.int32, bitcast=True)
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [words, chosen], tl.int32, True, 1
    )


@triton.jit
def pack_masks(masks, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Pack masks of `keep_pairs` [R, C] into bits, int32 [R/2, C/16]:
    32 bits of one thread of a matrix product each.

    Bit 16 h + 8 b + 2 j + a of number [8 i + g, 4 m + l] is row 16 i + 8 h + g
    and key 64 m + 16 j + 4 l + 2 a + b.
    """
    masks = tl.reshape(masks, [ROWS // 16, 2, 8, COLUMNS // 64, 8, 4, 2])
    place = tl.arange(0, 8)
    b = tl.arange(0, 2)
    # Adjacent columns have the same mask word: use the first. Sums of disjoint bits are "or".
    selected = tl.where(b[None, :] == 0, 0x00010001 << place[:, None], 0)
    bits = tl.sum(tl.sum(masks & selected[None, None, None, None, :, None, :], 6), 4)
    bits = half_of_bits(bits, tl.arange(0, 2)[None, :, None, None, None])
    return tl.reshape(tl.sum(bits, 1), [ROWS // 2, COLUMNS // 16])


@triton.jit
def half_of_bits(bits, half):
    """Return the bits of rows of `half` 0 or 1 of 16 where `pack_masks` has them, from bits 0 to 7
    and 16 to 23.
    """
    return ((bits | (bits >> 8)) & 0xFFFF) << (16 * half)


@triton.jit
def kept_bits(bits, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return which keys from `first` on are kept, from `pack_masks` [R/2, C/16]:
    bool [R, C], ordered by `key_places`.

    For 32 keys, pass the numbers of the block of 64 that contains them.
    """
    SIXTY_FOURS: tl.constexpr = max(1, COLUMNS // 64)
    PLACES: tl.constexpr = COLUMNS // SIXTY_FOURS // 8
    ALL: tl.constexpr = [ROWS // 16, 2, 8, SIXTY_FOURS, PLACES, 4, 2]
    if COLUMNS < 64:
        bits = bits >> ((first & 32) >> 3)
    bits = tl.broadcast_to(tl.reshape(bits, [ROWS // 16, 1, 8, SIXTY_FOURS, 1, 4, 1]), ALL)
    h = tl.arange(0, 2)[:, None, None]
    place = tl.arange(0, PLACES)[None, :, None]
    b = tl.arange(0, 2)[None, None, :]
    bit = tl.reshape(1 << (16 * h + place + 8 * b), [1, 2, 1, 1, PLACES, 1, 2])
    return tl.reshape((bits & tl.broadcast_to(bit, ALL)) != 0, [ROWS, COLUMNS])
