"""The forward kernel of the Triton attention (`mlbert.ops.triton.attention`),
and functions shared with backward.

Legend: S sequences, T tokens, N heads, H head size, L tokens of one sequence,
Q and K block sizes of queries and keys.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math

import triton
import triton.language as tl

from mlbert.ops.triton.mask import (
    head_key,
    keep_pairs,
    keep_signs,
    key_places,
    load_key,
    pack_masks,
    row_hash,
)

LOG2_E = tl.constexpr(math.log2(math.e))
HIDDEN = tl.constexpr(-1e30)  # score of a key that a query does not see
COUNTS = ("key", "num_tokens", "num_sequences", "num_blocks", "bits_blocks")


@triton.jit
def work(cu_seqlens, order, num_tokens, num_sequences, num_blocks, NUM_HEADS: tl.constexpr):
    """Return this program's block, head, sequence, its first token (int64) and length,
    and whether it is the tail.
    """
    program = tl.program_id(0)
    rank = program // (num_blocks * NUM_HEADS)
    # One extra sequence: the tokens after the last one.
    is_tail = rank == num_sequences
    sequence = tl.load(order + rank, mask=rank < num_sequences, other=num_sequences)
    start = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + sequence + 1, mask=rank < num_sequences, other=num_tokens)
    block = program % num_blocks
    head = program // num_blocks % NUM_HEADS
    return block, head, sequence, start.to(tl.int64), end - start, is_tail


@triton.jit
def tile(
    base,
    first,
    length,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Load [ROWS, HEAD_SIZE] from row `first` at `base`;
    with PARTIAL, rows from `length` on are 0.
    """
    return _load(base, first + tl.arange(0, ROWS), length, STRIDE, HEAD_SIZE, PARTIAL)


@triton.jit
def key_tile(
    base,
    first,
    length,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Load a `tile` with rows in the order of `key_places`."""
    return _load(base, first + key_places(ROWS), length, STRIDE, HEAD_SIZE, PARTIAL)


@triton.jit
def _load(base, row, length, STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr, PARTIAL: tl.constexpr):
    place = base + row[:, None] * STRIDE + tl.arange(0, HEAD_SIZE)[None, :]
    return tl.load(place, mask=row[:, None] < length, other=0.0) if PARTIAL else tl.load(place)


@triton.jit
def store(
    base, values, first, length, STRIDE: tl.constexpr, ROWS: tl.constexpr, HEAD_SIZE: tl.constexpr
):
    """Store rows from `first` to `length` of values [ROWS, HEAD_SIZE] in the dtype of `base`."""
    _store(base, values, first + tl.arange(0, ROWS), length, STRIDE, HEAD_SIZE)


@triton.jit
def _store(base, values, row, length, STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr):
    place = base + row[:, None] * STRIDE + tl.arange(0, HEAD_SIZE)[None, :]
    tl.store(place, values.to(base.dtype.element_ty), mask=row[:, None] < length)


@triton.jit
def zero(
    base,
    block,
    num_blocks,
    length,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
):
    """Zero every `num_blocks`-th block of rows, so that all blocks together zero `length` rows."""
    zeros = tl.zeros([ROWS, HEAD_SIZE], tl.float32)
    for first in range(block * ROWS, length, num_blocks * ROWS):
        store(base, zeros, first, length, STRIDE, ROWS, HEAD_SIZE)


@triton.jit
def dot(a, b):
    """Return a @ b in float32, without rounding float32 factors to TF32."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def scores_of(q, k, first_q, places, slope, BLOCK_Q: tl.constexpr, SCALE: tl.constexpr):
    """Return scores [Q, K]; times SCALE they are in units of log2.

    Adds -slope * |query - key| unless slope is None.
    """
    scores = dot(q, tl.trans(k))
    if slope is not None:
        # `slope` is a pointer: a Triton function cannot return None,
        # so it cannot be loaded before the loop.
        distance = first_q + tl.arange(0, BLOCK_Q)[:, None] - places[None, :]
        scores -= (tl.load(slope) * (LOG2_E / SCALE)) * tl.abs(distance).to(tl.float32)
    return scores


@triton.jit
def seen_range(first, length, WINDOW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the range of tokens that see, and are seen by, ROWS tokens from `first` on.

    Its start is a multiple of COLUMNS.
    """
    start = tl.maximum(first - WINDOW, 0) // COLUMNS * COLUMNS
    return start, tl.minimum(first + ROWS + WINDOW, length)


@triton.jit
def is_seen(row, places, length, WINDOW: tl.constexpr):
    """Return which keys int32 [K] are inside of the window of queries int32 [Q], bool [Q, K]."""
    distance = row[:, None] - places[None, :]
    return (tl.abs(distance) <= WINDOW) & (places < length)[None, :]


@triton.jit
def bits_start(head, start, sequence, num_tokens, num_sequences, num_blocks):
    """Return the offset of the bits of a head and sequence.

    Every sequence is aligned to 16 rows.
    """
    sixteens = head.to(tl.int64) * (num_tokens // 16 + num_sequences) + start // 16 + sequence
    return sixteens * (32 * num_blocks)


@triton.jit
def bits_at(
    bits, first_q, first_k, length, num_blocks, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Return pointers to the numbers of `mask.pack_masks`, [Q/2, K/16] ([Q/2, 4] for 32 keys),
    and which exist.
    """
    row = first_q // 2 + tl.arange(0, BLOCK_Q // 2)
    column = first_k // 64 * 4 + tl.arange(0, max(4, BLOCK_K // 16))
    return number_at(bits, row, column, length, num_blocks)


@triton.jit
def number_at(bits, row, column, length, num_blocks):
    """Return `bits_at` of rows and columns of numbers."""
    exists = row // 8 * 16 < length
    return bits + row[:, None] * (4 * num_blocks) + column[None, :], exists[:, None]


@triton.jit
def hashes_of(key, head, rows, start, row, length, THRESHOLD: tl.constexpr):
    """Return row hashes of the queries `row` of the sequence at `start`; unused without dropout."""
    hashes = row
    if THRESHOLD:
        mask_rows = tl.load(rows + start + row, mask=row < length, other=0)
        hashes = row_hash(head_key(load_key(key), head), mask_rows)
    return hashes


@triton.jit(do_not_specialize=COUNTS)
def attention_forward_kernel(
    qkv, cu_seqlens, order, rows, slopes, key, out, log_sums, bits, num_tokens, num_sequences,
    num_blocks, bits_blocks, NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, SCALE: tl.constexpr,
    THRESHOLD: tl.constexpr, WINDOW: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the output of one block of queries. Grid: (S + 1) * N * L / Q.

    qkv: [T, 3, N, H]; out: [T, N, H]; log_sums: float32 [N, T]; rows: int32 [T] or None; slopes:
    float32 [N] or None. WINDOW: tokens that a query sees on each side, or None.
    """
    block, head, sequence, start, length, is_tail = work(
        cu_seqlens, order, num_tokens, num_sequences, num_blocks, NUM_HEADS
    )
    WIDTH: tl.constexpr = NUM_HEADS * HEAD_SIZE
    out += start * WIDTH + head * HEAD_SIZE
    if is_tail:
        zero(out, block, num_blocks, length, WIDTH, BLOCK_Q, HEAD_SIZE)
        return
    first = block * BLOCK_Q
    if first >= length:
        return
    qkv += start * (3 * WIDTH) + head * HEAD_SIZE
    row = first + tl.arange(0, BLOCK_Q)
    hashes = hashes_of(key, head, rows, start, row, length, THRESHOLD)
    if slopes is not None:
        slopes += head
    if bits is not None:
        bits += bits_start(head, start, sequence, num_tokens, num_sequences, bits_blocks)
    q = tile(qkv, first, length, 3 * WIDTH, BLOCK_Q, HEAD_SIZE, True)
    highest = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    result = tl.zeros([BLOCK_Q, HEAD_SIZE], tl.float32)
    if WINDOW is None:
        # Full blocks need no masks; the partial last block is compiled separately with them.
        full = length // BLOCK_K * BLOCK_K
        for first_k in range(0, full, BLOCK_K):
            result, highest, total = _forward_step(
                result, highest, total, q, qkv + WIDTH, first, first_k, length, hashes, slopes,
                bits, bits_blocks, WIDTH, HEAD_SIZE, SCALE, THRESHOLD, WINDOW, BLOCK_Q, BLOCK_K,
                False,
            )  # fmt: skip
        if full < length:
            result, highest, total = _forward_step(
                result, highest, total, q, qkv + WIDTH, first, full, length, hashes, slopes,
                bits, bits_blocks, WIDTH, HEAD_SIZE, SCALE, THRESHOLD, WINDOW, BLOCK_Q, BLOCK_K,
                True,
            )  # fmt: skip
    else:
        seen, end = seen_range(first, length, WINDOW, BLOCK_Q, BLOCK_K)
        for first_k in range(seen, end, BLOCK_K):
            result, highest, total = _forward_step(
                result, highest, total, q, qkv + WIDTH, first, first_k, length, hashes, slopes,
                bits, bits_blocks, WIDTH, HEAD_SIZE, SCALE, THRESHOLD, WINDOW, BLOCK_Q, BLOCK_K,
                True,
            )  # fmt: skip
    # int64: N T may exceed 2^31.
    tl.store(
        log_sums + head.to(tl.int64) * num_tokens + start + row,
        highest + tl.log2(total),
        mask=row < length,
    )
    result *= ((256.0 / (256 - THRESHOLD)) / total)[:, None]
    store(out, result, first, length, WIDTH, BLOCK_Q, HEAD_SIZE)


@triton.jit
def _forward_step(
    result, highest, total, q, keys, first_q, first_k, length, hashes, slopes, bits, bits_blocks,
    WIDTH: tl.constexpr, HEAD_SIZE: tl.constexpr, SCALE: tl.constexpr, THRESHOLD: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Add one block of keys to the sums so far, [Q, H] and [Q], scaled by exp2(-highest)."""
    k = key_tile(keys, first_k, length, 3 * WIDTH, BLOCK_K, HEAD_SIZE, PARTIAL)
    places = first_k + key_places(BLOCK_K)
    scores = scores_of(q, k, first_q, places, slopes, BLOCK_Q, SCALE * LOG2_E)
    if WINDOW is not None:
        # Finite: a query may see no key of the first block. Its sums so far are then meaningless,
        # and multiplied by 0 after the first block with a key that it sees.
        row = first_q + tl.arange(0, BLOCK_Q)
        scores = tl.where(is_seen(row, places, length, WINDOW), scores, HIDDEN)
    elif PARTIAL:
        scores = tl.where((places < length)[None, :], scores, -float("inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1) * (SCALE * LOG2_E))
    weights = tl.exp2(scores * (SCALE * LOG2_E) - new_highest[:, None])
    # In the first block highest = -inf, and exp2(-inf) = 0 rescales sums that are zero anyway.
    rescale = tl.exp2(highest - new_highest)
    total = total * rescale + tl.sum(weights, 1)
    v = key_tile(keys + WIDTH, first_k, length, 3 * WIDTH, BLOCK_K, HEAD_SIZE, PARTIAL)
    kept = weights.to(v.dtype)
    if THRESHOLD:
        # After the sum: dropout acts on normalized weights, so the divisor includes dropped ones.
        signs = keep_signs(hashes, first_k, BLOCK_K, THRESHOLD)
        kept, masks = keep_pairs(kept, signs, BLOCK_Q, BLOCK_K)
        if bits is not None:
            place, exists = bits_at(bits, first_q, first_k, length, bits_blocks, BLOCK_Q, BLOCK_K)
            tl.store(place, pack_masks(masks, BLOCK_Q, BLOCK_K), mask=exists)
    result = result * rescale[:, None] + dot(kept, v)
    return result, new_highest, total
