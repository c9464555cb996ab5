"""The backward kernels of the Triton attention (`mlbert.ops.triton.attention`).

Legend: S sequences, T tokens, N heads, H head size, L tokens of one sequence,
Q and K block sizes of queries and keys.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from mlbert.ops.triton.attention_forward import (
    COUNTS,
    LOG2_E,
    bits_at,
    bits_start,
    dot,
    is_seen,
    key_tile,
    scores_of,
    seen_range,
    tile,
    work,
    zero,
)
from mlbert.ops.triton.fp8_copies import fp8_bytes, raise_amax
from mlbert.ops.triton.mask import kept_bits, key_places


@triton.jit
def _weights_and_gradient(
    q, k, v, d_out, log_sum, delta, first_q, first_k, length, slopes, bits, num_blocks,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return kept weights [Q, K], before the dropout scale,
    and the gradient of scaled scores [Q, K] over that scale.

    delta, sum(dO O) over the dropout scale, is the sum over keys of the kept P dP in softmax's
    derivative.
    """
    scores = scores_of(
        q, k, first_q, first_k + key_places(BLOCK_K), slopes, BLOCK_Q, SCALE * LOG2_E
    )
    weights = tl.exp2(scores * (SCALE * LOG2_E) - log_sum[:, None])
    if WINDOW is not None:
        row = first_q + tl.arange(0, BLOCK_Q)
        places = first_k + key_places(BLOCK_K)
        # Weights of hidden keys may be infinite before.
        weights = tl.where(is_seen(row, places, length, WINDOW), weights, 0.0)
    d_weights = dot(d_out, tl.trans(v))
    kept = weights
    if bits is None:
        d_scores = weights * (d_weights - delta[:, None])
    else:
        numbers = tl.load(*bits_at(bits, first_q, first_k, length, num_blocks, BLOCK_Q, BLOCK_K))
        is_kept = kept_bits(numbers, first_k, BLOCK_Q, BLOCK_K)
        kept = tl.where(is_kept, weights, 0.0)
        if q.dtype == tl.float32:
            d_scores = weights * (tl.where(is_kept, d_weights, 0.0) - delta[:, None])
        else:
            # Saves one selection. Both products are rounded before they may cancel,
            # which is negligible in 16 bits.
            d_scores = kept * d_weights - weights * delta[:, None]
    return kept, d_scores


@triton.jit(do_not_specialize=COUNTS)
def attention_query_gradient_kernel(
    qkv, cu_seqlens, order, slopes, bits, out, d_out, log_sums, delta, d_qkv, sums, scale, amax,
    num_tokens, num_sequences, num_blocks, bits_blocks, NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr, SCALE: tl.constexpr, THRESHOLD: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute d_qkv[:, 0] and delta of one block of queries. Grid: (S + 1) * N * L / Q.

    qkv, d_qkv: [T, 3, N, H]; out, d_out: [T, N, H]; log_sums, delta: float32 [N, T]; others as in
    `attention_forward_kernel`. sums float32 [S L / Q, 3, N, H], if not None, gets the sums over the
    tokens of each block. With scale and amax, float32 scalars, d_qkv is bytes of e5m2, times scale.
    """
    block, head, sequence, start, length, is_tail = work(
        cu_seqlens, order, num_tokens, num_sequences, num_blocks, NUM_HEADS
    )
    WIDTH: tl.constexpr = NUM_HEADS * HEAD_SIZE
    d_qkv += start * (3 * WIDTH) + head * HEAD_SIZE
    if is_tail:
        zero(d_qkv, block, num_blocks, length, 3 * WIDTH, BLOCK_Q, HEAD_SIZE)
        return
    if sums is not None:
        sums += (sequence.to(tl.int64) * num_blocks + block) * (3 * WIDTH) + head * HEAD_SIZE
    first = block * BLOCK_Q
    if first >= length:
        if sums is not None:
            tl.store(sums + tl.arange(0, HEAD_SIZE), tl.zeros([HEAD_SIZE], tl.float32))
        return
    qkv += start * (3 * WIDTH) + head * HEAD_SIZE
    place = start * WIDTH + head * HEAD_SIZE
    row = first + tl.arange(0, BLOCK_Q)
    statistic = head.to(tl.int64) * num_tokens + start + row
    d_o = tile(d_out + place, first, length, WIDTH, BLOCK_Q, HEAD_SIZE, True)
    o = tile(out + place, first, length, WIDTH, BLOCK_Q, HEAD_SIZE, True)
    my_delta = tl.sum(d_o.to(tl.float32) * o.to(tl.float32), 1) * ((256 - THRESHOLD) / 256.0)
    tl.store(delta + statistic, my_delta, mask=row < length)
    # exp2(score - inf) = 0: queries past the end have zero weight.
    log_sum = tl.load(log_sums + statistic, mask=row < length, other=float("inf"))
    if slopes is not None:
        slopes += head
    if bits is not None:
        bits += bits_start(head, start, sequence, num_tokens, num_sequences, bits_blocks)
    q = tile(qkv, first, length, 3 * WIDTH, BLOCK_Q, HEAD_SIZE, True)
    d_q = tl.zeros([BLOCK_Q, HEAD_SIZE], tl.float32)
    if WINDOW is None:
        full = length // BLOCK_K * BLOCK_K
        for first_k in range(0, full, BLOCK_K):
            d_q = _query_gradient_step(
                d_q, q, qkv + WIDTH, d_o, log_sum, my_delta, first, first_k, length, slopes, bits,
                bits_blocks, WIDTH, HEAD_SIZE, SCALE, WINDOW, BLOCK_Q, BLOCK_K, False,
            )  # fmt: skip
        if full < length:
            d_q = _query_gradient_step(
                d_q, q, qkv + WIDTH, d_o, log_sum, my_delta, first, full, length, slopes, bits,
                bits_blocks, WIDTH, HEAD_SIZE, SCALE, WINDOW, BLOCK_Q, BLOCK_K, True,
            )  # fmt: skip
    else:
        seen, end = seen_range(first, length, WINDOW, BLOCK_Q, BLOCK_K)
        for first_k in range(seen, end, BLOCK_K):
            d_q = _query_gradient_step(
                d_q, q, qkv + WIDTH, d_o, log_sum, my_delta, first, first_k, length, slopes, bits,
                bits_blocks, WIDTH, HEAD_SIZE, SCALE, WINDOW, BLOCK_Q, BLOCK_K, True,
            )  # fmt: skip
    d_q *= SCALE * 256.0 / (256 - THRESHOLD)
    _store_gradient(d_qkv, d_q, row, length, sums, scale, amax, 3 * WIDTH, HEAD_SIZE)


@triton.jit
def _store_gradient(
    base, value, row, length, sums, scale, amax, STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr
):
    """Store rows of a gradient, float32 [R, H], those past the end left out, and their sum.

    Arguments as in `attention_query_gradient_kernel`.
    """
    inside = row[:, None] < length
    if sums is not None:
        value = tl.where(inside, value, 0.0)
        tl.store(sums + tl.arange(0, HEAD_SIZE), tl.sum(value, 0))
    place = base + row[:, None] * STRIDE + tl.arange(0, HEAD_SIZE)[None, :]
    if scale is not None:
        raise_amax(amax, tl.abs(value))
        tl.store(place, fp8_bytes(value * tl.load(scale), True), mask=inside)
    else:
        tl.store(place, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _query_gradient_step(
    d_q, q, keys, d_out, log_sum, delta, first_q, first_k, length, slopes, bits, bits_blocks,
    WIDTH: tl.constexpr, HEAD_SIZE: tl.constexpr, SCALE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Add the contribution of one block of keys to d_q [Q, H]."""
    k = key_tile(keys, first_k, length, 3 * WIDTH, BLOCK_K, HEAD_SIZE, PARTIAL)
    v = key_tile(keys + WIDTH, first_k, length, 3 * WIDTH, BLOCK_K, HEAD_SIZE, PARTIAL)
    _, d_scores = _weights_and_gradient(
        q,
        k,
        v,
        d_out,
        log_sum,
        delta,
        first_q,
        first_k,
        length,
        slopes,
        bits,
        bits_blocks,
        SCALE,
        WINDOW,
        BLOCK_Q,
        BLOCK_K,
    )
    if PARTIAL:
        # Weights of keys past the end may be infinite,
        # and infinity times their zero rows would be NaN.
        d_scores = tl.where((first_k + key_places(BLOCK_K) < length)[None, :], d_scores, 0.0)
    return d_q + dot(d_scores.to(k.dtype), k)


@triton.jit(do_not_specialize=COUNTS)
def attention_key_value_gradient_kernel(
    qkv, cu_seqlens, order, slopes, bits, d_out, log_sums, delta, d_qkv, sums, scale, amax,
    num_tokens, num_sequences, num_blocks, bits_blocks, NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr, SCALE: tl.constexpr, THRESHOLD: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute d_qkv[:, 1] and d_qkv[:, 2] of one block of keys.

    Grid: (S + 1) * N * L / K. Arguments as above.
    """
    block, head, sequence, start, length, is_tail = work(
        cu_seqlens, order, num_tokens, num_sequences, num_blocks, NUM_HEADS
    )
    WIDTH: tl.constexpr = NUM_HEADS * HEAD_SIZE
    d_qkv += start * (3 * WIDTH) + head * HEAD_SIZE + WIDTH
    if is_tail:
        zero(d_qkv, block, num_blocks, length, 3 * WIDTH, BLOCK_K, HEAD_SIZE)
        zero(d_qkv + WIDTH, block, num_blocks, length, 3 * WIDTH, BLOCK_K, HEAD_SIZE)
        return
    if sums is not None:
        sums += (sequence.to(tl.int64) * num_blocks + block) * (3 * WIDTH) + head * HEAD_SIZE
        sums += WIDTH
    first = block * BLOCK_K
    if first >= length:
        if sums is not None:
            zeros = tl.zeros([HEAD_SIZE], tl.float32)
            tl.store(sums + tl.arange(0, HEAD_SIZE), zeros)
            tl.store(sums + WIDTH + tl.arange(0, HEAD_SIZE), zeros)
        return
    qkv += start * (3 * WIDTH) + head * HEAD_SIZE
    d_out += start * WIDTH + head * HEAD_SIZE
    log_sums += head.to(tl.int64) * num_tokens + start
    delta += head.to(tl.int64) * num_tokens + start
    if slopes is not None:
        slopes += head
    if bits is not None:
        bits += bits_start(head, start, sequence, num_tokens, num_sequences, bits_blocks)
    # Gradients of keys past the end are meaningless and not stored.
    k = key_tile(qkv + WIDTH, first, length, 3 * WIDTH, BLOCK_K, HEAD_SIZE, True)
    v = key_tile(qkv + 2 * WIDTH, first, length, 3 * WIDTH, BLOCK_K, HEAD_SIZE, True)
    d_k = tl.zeros([BLOCK_K, HEAD_SIZE], tl.float32)
    d_v = tl.zeros([BLOCK_K, HEAD_SIZE], tl.float32)
    if WINDOW is None:
        full = length // BLOCK_Q * BLOCK_Q
        for first_q in range(0, full, BLOCK_Q):
            d_k, d_v = _key_value_gradient_step(
                d_k, d_v, k, v, qkv, d_out, log_sums, delta, first_q, first, length, slopes, bits,
                bits_blocks, WIDTH, HEAD_SIZE, SCALE, WINDOW, BLOCK_Q, BLOCK_K, False,
            )  # fmt: skip
        if full < length:
            d_k, d_v = _key_value_gradient_step(
                d_k, d_v, k, v, qkv, d_out, log_sums, delta, full, first, length, slopes, bits,
                bits_blocks, WIDTH, HEAD_SIZE, SCALE, WINDOW, BLOCK_Q, BLOCK_K, True,
            )  # fmt: skip
    else:
        seen, end = seen_range(first, length, WINDOW, BLOCK_K, BLOCK_Q)
        for first_q in range(seen, end, BLOCK_Q):
            d_k, d_v = _key_value_gradient_step(
                d_k, d_v, k, v, qkv, d_out, log_sums, delta, first_q, first, length, slopes, bits,
                bits_blocks, WIDTH, HEAD_SIZE, SCALE, WINDOW, BLOCK_Q, BLOCK_K, True,
            )  # fmt: skip
    kept: tl.constexpr = 256.0 / (256 - THRESHOLD)
    row = first + key_places(BLOCK_K)
    d_k *= SCALE * kept
    _store_gradient(d_qkv, d_k, row, length, sums, scale, amax, 3 * WIDTH, HEAD_SIZE)
    if sums is not None:
        sums += WIDTH
    d_v *= kept
    _store_gradient(d_qkv + WIDTH, d_v, row, length, sums, scale, amax, 3 * WIDTH, HEAD_SIZE)


@triton.jit
def _key_value_gradient_step(
    d_k, d_v, k, v, queries, d_out, log_sums, delta, first_q, first_k, length, slopes, bits,
    bits_blocks, WIDTH: tl.constexpr, HEAD_SIZE: tl.constexpr, SCALE: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Add the contribution of one block of queries to d_k and d_v [K, H];
    past the end, weights are exp2(-inf) = 0.
    """
    row = first_q + tl.arange(0, BLOCK_Q)
    q = tile(queries, first_q, length, 3 * WIDTH, BLOCK_Q, HEAD_SIZE, PARTIAL)
    d_o = tile(d_out, first_q, length, WIDTH, BLOCK_Q, HEAD_SIZE, PARTIAL)
    if PARTIAL:
        log_sum = tl.load(log_sums + row, mask=row < length, other=float("inf"))
        my_delta = tl.load(delta + row, mask=row < length, other=0.0)
    else:
        log_sum = tl.load(log_sums + row)
        my_delta = tl.load(delta + row)
    kept, d_scores = _weights_and_gradient(
        q,
        k,
        v,
        d_o,
        log_sum,
        my_delta,
        first_q,
        first_k,
        length,
        slopes,
        bits,
        bits_blocks,
        SCALE,
        WINDOW,
        BLOCK_Q,
        BLOCK_K,
    )
    d_v += dot(tl.trans(kept.to(d_o.dtype)), d_o)
    d_k += dot(tl.trans(d_scores.to(q.dtype)), q)
    return d_k, d_v
