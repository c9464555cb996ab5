"""The dropout masks of `mlbert.ops.dropout` inside Triton kernels, bit for bit.

A mask's row hash is found once a row (`row_hash`) and an element's byte from it (`keep`; four columns share a word). In
attention a thread of a matrix product holds only two neighbouring columns, so it takes the keys in another order
(`key_places`), mixes each word once (`keep_signs`), and leaves the mask as bits for the backward pass (`pack_masks`).

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
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # it knows no inline assembly
# Bytes 1, 1, 0, 0 and 3, 3, 2, 2, each as eight copies of its top bit.
CHOSEN_BYTES = tl.constexpr((0x9988, 0xBBAA))


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


@triton.jit
def key_places(COLUMNS: tl.constexpr):
    """In which order attention takes the keys of a block: int32 [COLUMNS], a permutation within each 16.

    Of a matrix product's 16 columns a thread holds 2 l, 2 l + 1, 2 l + 8 and 2 l + 9. These are given to the keys from
    4 l to 4 l + 3, so that the four which share a word of the mask share a thread.
    """
    place = tl.arange(0, COLUMNS)
    return (place & -16) | ((place & 6) << 1) | ((place & 8) >> 2) | (place & 1)


@triton.jit
def keep_signs(hashes, first, COLUMNS: tl.constexpr, THRESHOLD: tl.constexpr):
    """Which keys stay, for `row_hash` [R] and keys from int32 `first`, a multiple of 4: uint32 [R, COLUMNS / 4].

    Of the word that four keys share, the top bit of each key's byte tells; the other bits are of no use. A byte is at
    least the threshold where 256 - threshold added to it carries; the carry out of its lower seven bits is found for
    four bytes at once.
    """
    group = (first >> 2) + tl.arange(0, COLUMNS // 4)
    words = mix32(hashes[:, None] ^ (group.to(tl.uint32) * GOLDEN)[None, :])
    carries = (words & 0x7F7F7F7F) + ((256 - THRESHOLD) & 0x7F) * 0x01010101
    return (words | carries) if THRESHOLD <= 128 else (words & carries)


@triton.jit
def keep_pairs(weights, signs, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Weights of a 16-bit type [R, C] in the order of `key_places`, 0 where `keep_signs` [R, C/4] do not keep them; and
    the masks that did it, int32 [R, C], each of two neighbours with both halves."""
    FOURS: tl.constexpr = [ROWS, COLUMNS // 16, 2, 4]
    chosen = tl.where(tl.arange(0, 2)[None, None, :, None] == 0, CHOSEN_BYTES[0], CHOSEN_BYTES[1])
    signs = tl.broadcast_to(tl.reshape(signs, [ROWS, COLUMNS // 16, 1, 4]), FOURS)
    masks = _copied_signs(signs, tl.broadcast_to(chosen, FOURS))
    masks = tl.reshape(tl.broadcast_to(masks[:, :, :, :, None], [ROWS, COLUMNS // 16, 2, 4, 2]), [ROWS, COLUMNS])
    if INTERPRETED or weights.dtype.primitive_bitwidth == 32:
        half = (tl.arange(0, COLUMNS) & 1) << 4
        return tl.where((masks >> half[None, :]) & 1 != 0, weights, 0.0), masks
    # Two neighbours are one register. The masks come out again to lie in the threads that hold the weights.
    return tl.inline_asm_elementwise(
        "and.b32 $0, $3, $4; mov.b32 $1, $4; mov.b32 $2, $5;",
        "=r,=r,=r,r,r,r", [weights, masks], (weights.dtype, tl.int32), True, 2,
    )  # fmt: skip


@triton.jit
def _copied_signs(words, chosen):
    """int32 of four bytes, each eight times the top bit of a byte of the uint32 words; which one, the low three bits of
    a digit of `chosen` tell: the instruction prmt of PTX with the fourth bit of each digit set."""
    if INTERPRETED:
        masks = tl.zeros_like(words)
        for byte in tl.static_range(4):
            top = (words >> (8 * (chosen >> (4 * byte) & 7) + 7).to(tl.uint32)) & 1
            masks |= top * (0xFF << (8 * byte))
        return masks.to(tl.int32, bitcast=True)
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, 0, $2;", "=r,r,r", [words, chosen], tl.int32, True, 1)


@triton.jit
def pack_masks(masks, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Masks of `keep_pairs` [R, C] as bits: int32 [R/2, C/16], 32 of one thread of a matrix product in a number.

    Bit 16 h + 8 b + 2 j + a of number [8 i + g, 4 m + l] is of row 16 i + 8 h + g and key 64 m + 16 j + 4 l + 2 a + b.
    """
    masks = tl.reshape(masks, [ROWS // 16, 2, 8, COLUMNS // 64, 8, 4, 2])
    place, b = tl.arange(0, 8), tl.arange(0, 2)
    # Neighbours have the same mask: the first one's counts, for both. Sums of bits that never meet are "or".
    mine = tl.where(b[None, :] == 0, 0x00010001 << place[:, None], 0)
    bits = tl.sum(tl.sum(masks & mine[None, None, None, None, :, None, :], 6), 4)
    bits = ((bits | (bits >> 8)) & 0xFFFF) << (16 * tl.arange(0, 2))[None, :, None, None, None]
    return tl.reshape(tl.sum(bits, 1), [ROWS // 2, COLUMNS // 16])


@triton.jit
def kept_bits(bits, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Which keys from `first` on stay: bool [R, C] in the order of `key_places`, from `pack_masks` [R/2, C/16].

    For 32 keys the numbers are those of the 64 among which they are.
    """
    SIXTY_FOURS: tl.constexpr = max(1, COLUMNS // 64)
    PLACES: tl.constexpr = COLUMNS // SIXTY_FOURS // 8
    ALL: tl.constexpr = [ROWS // 16, 2, 8, SIXTY_FOURS, PLACES, 4, 2]
    if COLUMNS < 64:
        bits = bits >> ((first & 32) >> 3)
    bits = tl.broadcast_to(tl.reshape(bits, [ROWS // 16, 1, 8, SIXTY_FOURS, 1, 4, 1]), ALL)
    h, place, b = tl.arange(0, 2)[:, None, None], tl.arange(0, PLACES)[None, :, None], tl.arange(0, 2)[None, None, :]
    bit = tl.reshape(1 << (16 * h + place + 8 * b), [1, 2, 1, 1, PLACES, 1, 2])
    return tl.reshape((bits & tl.broadcast_to(bit, ALL)) != 0, [ROWS, COLUMNS])
