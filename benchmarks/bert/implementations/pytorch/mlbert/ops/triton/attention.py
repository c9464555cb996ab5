"""Attention over packed sequences as Triton kernels: the scores never reach memory.

The algorithm is FlashAttention's (Dao et al., arXiv 2205.14135 and 2307.08691) with one program for each block of
queries or keys of one sequence and head::

    forward        walks the keys with a running maximum and sum; saves log2(sum(exp2)) of the scaled scores
    gradient of Q  walks the keys; also finds delta = sum(dO * O), which is the sum over keys of P * dP
    of K and V     walks the queries; P and its dropout are made again from what the forward pass saved
                   dS = P * (dP - delta), with dP = dO V^T where kept, times the dropout scale, else 0

Scores are in units of log2, so that the exponential is the hardware's. Q, K and V are read where the projection left
them in [T, 3, N, H], and their gradients are written to the same places. Sequences are handed out longest first
(`attention_order_kernel`), blocks behind a sequence's end leave at once, and tokens behind the last sequence belong to
one more, pretended sequence whose results are zero. Nothing waits for the host, and every run gives the same bits: no
result is the sum of two programs.

Legend: S sequences, T tokens, N heads, H head size, L tokens of one sequence, Q and K block sizes of queries and keys.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlbert.ops import reference, registry
from mlbert.ops.attention import TRITON_HEAD_SIZES
from mlbert.ops.dropout import dropout_threshold
from mlbert.ops.native_library import check_rows
from mlbert.ops.triton.device import capability
from mlbert.ops.triton.mask import head_key, keep, key_argument, load_key, row_hash

LOG2_E = tl.constexpr(math.log2(math.e))
ORDER_BLOCK = 64


@dataclass(frozen=True)
class Blocks:
    """How a kernel is cut up: queries and keys of a tile, and Triton's warps and pipeline stages."""

    BLOCK_Q: int
    BLOCK_K: int
    num_warps: int
    num_stages: int


# Head size -> forward, gradient of Q, gradient of K and V, for 16-bit types. Chosen by what the compiler reports
# (tools/compile_kernels.py: no spills, most warps on a multiprocessor), not by measurement.
_HOPPER = {
    32: (Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    64: (Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    128: (Blocks(128, 64, 8, 2), Blocks(64, 32, 8, 2), Blocks(32, 64, 8, 2)),
}
# One stage less keeps a key that lies on the device from spilling.
_BLACKWELL = {**_HOPPER, 64: (*_HOPPER[64][:2], Blocks(64, 64, 4, 1))}
_AMPERE = {
    32: (Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    64: (Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 32, 4, 2)),
    128: (Blocks(64, 64, 8, 2), Blocks(32, 64, 8, 2), Blocks(32, 64, 8, 2)),
}
# float32 products run without tensor cores and spill: this form is for comparisons.
_SINGLE = {size: (Blocks(rows, rows, 4, 1),) * 3 for size, rows in zip(TRITON_HEAD_SIZES, (32, 32, 16), strict=True)}
_COUNTS = ("key", "num_tokens", "num_sequences", "num_blocks")


@registry.register("attention", "triton")
def attention(qkv, cu_seqlens, max_seqlen, dropout_p, key, rows, alibi_slopes=None):
    """See `mlbert.ops.attention.attention`; other head sizes than 32, 64 and 128 run plain.

    ``max_seqlen`` may be more than the longest sequence, not less: blocks that find nothing to do cost little.
    """
    if qkv.dtype == torch.float64 or qkv.shape[3] not in _SINGLE:
        return reference.attention(qkv, cu_seqlens, max_seqlen, dropout_p, key, rows, alibi_slopes)
    threshold = dropout_threshold(dropout_p)
    return _Attention.apply(qkv.contiguous(), cu_seqlens, max_seqlen, threshold, key, rows, alibi_slopes)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cu_seqlens, max_seqlen, threshold, key, rows, slopes):
        num_tokens, three, num_heads, head_size = qkv.shape
        assert three == 3, f"qkv {tuple(qkv.shape)} is not [T, 3, N, H]"
        assert cu_seqlens.dtype == torch.int32, f"cu_seqlens is {cu_seqlens.dtype}"
        check_rows(rows, num_tokens, threshold)
        assert slopes is None or (slopes.dtype, slopes.shape) == (torch.float32, (num_heads,)), "slopes: float32 [N]"
        out = qkv.new_empty(num_tokens, num_heads, head_size)
        log_sums = torch.empty(num_heads, num_tokens, dtype=torch.float32, device=qkv.device)
        order = descending_order(cu_seqlens)
        inputs = (qkv, cu_seqlens, order, rows, slopes)
        ctx.save_for_backward(*inputs, out, log_sums)
        ctx.options = (max_seqlen, threshold, key_argument(key))
        if num_tokens:
            grid, arguments = _launch(0, *inputs, *ctx.options)
            attention_forward_kernel[grid](out=out, log_sums=log_sums, **arguments)
        return out

    @staticmethod
    def backward(ctx, d_out):
        *inputs, out, log_sums = ctx.saved_tensors
        qkv = inputs[0]
        d_qkv, delta = torch.empty_like(qkv), torch.empty_like(log_sums)
        if qkv.shape[0]:
            tensors = {"d_out": d_out.contiguous(), "log_sums": log_sums, "delta": delta, "d_qkv": d_qkv}
            grid, arguments = _launch(1, *inputs, *ctx.options)
            attention_query_gradient_kernel[grid](out=out, **tensors, **arguments)
            grid, arguments = _launch(2, *inputs, *ctx.options)
            attention_key_value_gradient_kernel[grid](**tensors, **arguments)
        return d_qkv, None, None, None, None, None, None


def _launch(kernel, qkv, cu_seqlens, order, rows, slopes, max_seqlen, threshold, key) -> tuple[tuple[int], dict]:
    """Grid and common arguments of kernel 0 (forward), 1 (gradient of Q) or 2 (of K and V)."""
    num_tokens, _, num_heads, head_size = qkv.shape
    blocks = _blocks(qkv)[kernel]
    num_blocks = max(1, triton.cdiv(max_seqlen, blocks.BLOCK_K if kernel == 2 else blocks.BLOCK_Q))
    arguments = {"qkv": qkv, "cu_seqlens": cu_seqlens, "order": order, "rows": rows, "slopes": slopes, "key": key}
    counts = {"num_tokens": num_tokens, "num_sequences": order.numel(), "num_blocks": num_blocks}
    sizes = {"NUM_HEADS": num_heads, "HEAD_SIZE": head_size, "SCALE": head_size**-0.5, "THRESHOLD": threshold}
    return ((order.numel() + 1) * num_heads * num_blocks,), {**arguments, **counts, **sizes, **asdict(blocks)}


def _blocks(qkv: Tensor) -> tuple[Blocks, ...]:
    architecture = capability(qkv.device)
    sixteen_bits = _BLACKWELL if architecture >= 100 else _HOPPER if architecture >= 90 else _AMPERE
    return (_SINGLE if qkv.dtype == torch.float32 else sixteen_bits)[qkv.shape[3]]


def descending_order(cu_seqlens: Tensor) -> Tensor:
    """Sequence numbers int32 [S], longest first, equal lengths in their order."""
    num_sequences = cu_seqlens.numel() - 1
    order = torch.empty(num_sequences, dtype=torch.int32, device=cu_seqlens.device)
    if num_sequences:
        attention_order_kernel[(triton.cdiv(num_sequences, ORDER_BLOCK),)](
            cu_seqlens, order, num_sequences, BLOCK=ORDER_BLOCK
        )
    return order


@triton.jit(do_not_specialize=["num_sequences"])
def attention_order_kernel(cu_seqlens, order, num_sequences, BLOCK: tl.constexpr):
    """A sequence's place is how many go before it. Grid: S / BLOCK. cu_seqlens, order: int32 [S+1], [S]."""
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = _lengths(cu_seqlens, mine, num_sequences)
    place = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_sequences, BLOCK):
        other = start + tl.arange(0, BLOCK)
        other_length = _lengths(cu_seqlens, other, num_sequences)
        longer = other_length[None, :] > length[:, None]
        earlier = (other_length[None, :] == length[:, None]) & (other[None, :] < mine[:, None])
        place += tl.sum((longer | earlier).to(tl.int32), 1)
    tl.store(order + place, mine, mask=mine < num_sequences)


@triton.jit
def _lengths(cu_seqlens, sequence, num_sequences):
    """Lengths int32; -1 behind the last sequence."""
    inside = sequence < num_sequences
    start = tl.load(cu_seqlens + sequence, mask=inside, other=1)
    return tl.load(cu_seqlens + sequence + 1, mask=inside, other=0) - start


@triton.jit
def _work(cu_seqlens, order, num_tokens, num_sequences, num_blocks, NUM_HEADS: tl.constexpr):
    """This program's block and head, first token int64 and length of its sequence, and whether that is the tail."""
    program = tl.program_id(0)
    rank = program // (num_blocks * NUM_HEADS)
    # One more than there are sequences: what lies behind the last one.
    is_tail = rank == num_sequences
    sequence = tl.load(order + rank, mask=rank < num_sequences, other=num_sequences)
    start = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + sequence + 1, mask=rank < num_sequences, other=num_tokens)
    return program % num_blocks, program // num_blocks % NUM_HEADS, start.to(tl.int64), end - start, is_tail


@triton.jit
def _tile(
    base, first, length, STRIDE: tl.constexpr, ROWS: tl.constexpr, HEAD_SIZE: tl.constexpr, PARTIAL: tl.constexpr
):
    """[ROWS, HEAD_SIZE] from row `first` at `base`; with PARTIAL, rows from `length` on are 0."""
    row = first + tl.arange(0, ROWS)
    place = base + row[:, None] * STRIDE + tl.arange(0, HEAD_SIZE)[None, :]
    return tl.load(place, mask=row[:, None] < length, other=0.0) if PARTIAL else tl.load(place)


@triton.jit
def _store(base, values, first, length, STRIDE: tl.constexpr, ROWS: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Rows from `first` to `length` of values [ROWS, HEAD_SIZE] in the type of `base`."""
    row = first + tl.arange(0, ROWS)
    place = base + row[:, None] * STRIDE + tl.arange(0, HEAD_SIZE)[None, :]
    tl.store(place, values.to(base.dtype.element_ty), mask=row[:, None] < length)


@triton.jit
def _zero(base, block, num_blocks, length, STRIDE: tl.constexpr, ROWS: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Zeroes every `num_blocks`-th block of rows, so that all blocks together zero `length` rows."""
    zeros = tl.zeros([ROWS, HEAD_SIZE], tl.float32)
    for first in range(block * ROWS, length, num_blocks * ROWS):
        _store(base, zeros, first, length, STRIDE, ROWS, HEAD_SIZE)


@triton.jit
def _dot(a, b):
    """a @ b in float32; float32 factors without rounding them to TF32."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _scores(q, k, first_q, first_k, slope, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, SCALE: tl.constexpr):
    """Scaled scores [Q, K] in units of log2, with the bias -slope * |query - key| unless that is None."""
    scores = _dot(q, tl.trans(k)) * (SCALE * LOG2_E)
    if slope is not None:
        # `slope` points to the head's: a function can't return None, so it can't be loaded for all blocks at once.
        distance = (first_q - first_k) + tl.arange(0, BLOCK_Q)[:, None] - tl.arange(0, BLOCK_K)[None, :]
        scores -= (tl.load(slope) * LOG2_E) * tl.abs(distance).to(tl.float32)
    return scores


@triton.jit
def _hashes(key, head, rows, start, row, length, THRESHOLD: tl.constexpr):
    """Row hashes of the queries `row` of the sequence at `start`; nothing of use without dropout."""
    hashes = row
    if THRESHOLD:
        mask_rows = tl.load(rows + start + row, mask=row < length, other=0)
        hashes = row_hash(head_key(load_key(key), head), mask_rows)
    return hashes


@triton.jit(do_not_specialize=_COUNTS)
def attention_forward_kernel(
    qkv, cu_seqlens, order, rows, slopes, key, out, log_sums, num_tokens, num_sequences, num_blocks,
    NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, SCALE: tl.constexpr, THRESHOLD: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Output of one block of queries. Grid: (S + 1) * N * L / Q.

    qkv: [T, 3, N, H]; out: [T, N, H]; log_sums: float32 [N, T]; rows: int32 [T] or None; slopes: float32 [N] or None.
    """
    block, head, start, length, is_tail = _work(cu_seqlens, order, num_tokens, num_sequences, num_blocks, NUM_HEADS)
    WIDTH: tl.constexpr = NUM_HEADS * HEAD_SIZE
    out += start * WIDTH + head * HEAD_SIZE
    if is_tail:
        _zero(out, block, num_blocks, length, WIDTH, BLOCK_Q, HEAD_SIZE)
        return
    first = block * BLOCK_Q
    if first >= length:
        return
    qkv += start * (3 * WIDTH) + head * HEAD_SIZE
    row = first + tl.arange(0, BLOCK_Q)
    hashes = _hashes(key, head, rows, start, row, length, THRESHOLD)
    if slopes is not None:
        slopes += head
    q = _tile(qkv, first, length, 3 * WIDTH, BLOCK_Q, HEAD_SIZE, True)
    highest = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    result = tl.zeros([BLOCK_Q, HEAD_SIZE], tl.float32)
    # Whole blocks need no masks; the last, partial one is compiled apart with them.
    full = length // BLOCK_K * BLOCK_K
    for first_k in range(0, full, BLOCK_K):
        result, highest, total = _forward_step(
            result, highest, total, q, qkv + WIDTH, first, first_k, length, hashes, slopes, WIDTH, HEAD_SIZE, SCALE,
            THRESHOLD, BLOCK_Q, BLOCK_K, False,
        )  # fmt: skip
    if full < length:
        result, highest, total = _forward_step(
            result, highest, total, q, qkv + WIDTH, first, full, length, hashes, slopes, WIDTH, HEAD_SIZE, SCALE,
            THRESHOLD, BLOCK_Q, BLOCK_K, True,
        )  # fmt: skip
    # int64: N T numbers may exceed 2^31.
    tl.store(log_sums + head.to(tl.int64) * num_tokens + start + row, highest + tl.log2(total), mask=row < length)
    result *= ((256.0 / (256 - THRESHOLD)) / total)[:, None]
    _store(out, result, first, length, WIDTH, BLOCK_Q, HEAD_SIZE)


@triton.jit
def _forward_step(
    result, highest, total, q, keys, first_q, first_k, length, hashes, slopes, WIDTH: tl.constexpr,
    HEAD_SIZE: tl.constexpr, SCALE: tl.constexpr, THRESHOLD: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """One block of keys: the sums over the keys so far [Q, H] and [Q], scaled by exp2(-highest)."""
    k = _tile(keys, first_k, length, 3 * WIDTH, BLOCK_K, HEAD_SIZE, PARTIAL)
    scores = _scores(q, k, first_q, first_k, slopes, BLOCK_Q, BLOCK_K, SCALE)
    if PARTIAL:
        scores = tl.where((first_k + tl.arange(0, BLOCK_K) < length)[None, :], scores, -float("inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - new_highest[:, None])
    # The first block finds highest = -inf: what is rescaled by exp2(-inf) = 0 is zero anyway.
    rescale = tl.exp2(highest - new_highest)
    total = total * rescale + tl.sum(weights, 1)
    if THRESHOLD:
        # Behind the sum: dropout acts on normalised weights, so the divisor is that of all of them.
        weights = tl.where(keep(hashes, first_k, BLOCK_K, THRESHOLD), weights, 0.0)
    v = _tile(keys + WIDTH, first_k, length, 3 * WIDTH, BLOCK_K, HEAD_SIZE, PARTIAL)
    result = result * rescale[:, None] + _dot(weights.to(v.dtype), v)
    return result, new_highest, total


@triton.jit
def _weights_and_gradient(
    q, k, v, d_out, log_sum, delta, first_q, first_k, hashes, slopes, SCALE: tl.constexpr, THRESHOLD: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Kept weights [Q, K], before the dropout scale, and the gradient of the scaled scores [Q, K]."""
    weights = tl.exp2(_scores(q, k, first_q, first_k, slopes, BLOCK_Q, BLOCK_K, SCALE) - log_sum[:, None])
    d_weights = _dot(d_out, tl.trans(v))
    kept = weights
    if THRESHOLD:
        stays = keep(hashes, first_k, BLOCK_K, THRESHOLD)
        kept = tl.where(stays, weights, 0.0)
        d_weights = tl.where(stays, d_weights * (256.0 / (256 - THRESHOLD)), 0.0)
    # softmax's derivative: delta = sum(dO O) is the sum over keys of P dP, dropout included.
    return kept, weights * (d_weights - delta[:, None])


@triton.jit(do_not_specialize=_COUNTS)
def attention_query_gradient_kernel(
    qkv, cu_seqlens, order, rows, slopes, key, out, d_out, log_sums, delta, d_qkv, num_tokens, num_sequences,
    num_blocks, NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, SCALE: tl.constexpr, THRESHOLD: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """d_qkv[:, 0] and delta of one block of queries. Grid: (S + 1) * N * L / Q.

    qkv, d_qkv: [T, 3, N, H]; out, d_out: [T, N, H]; log_sums, delta: float32 [N, T]; the rest as in
    `attention_forward_kernel`.
    """
    block, head, start, length, is_tail = _work(cu_seqlens, order, num_tokens, num_sequences, num_blocks, NUM_HEADS)
    WIDTH: tl.constexpr = NUM_HEADS * HEAD_SIZE
    d_qkv += start * (3 * WIDTH) + head * HEAD_SIZE
    if is_tail:
        _zero(d_qkv, block, num_blocks, length, 3 * WIDTH, BLOCK_Q, HEAD_SIZE)
        return
    first = block * BLOCK_Q
    if first >= length:
        return
    qkv += start * (3 * WIDTH) + head * HEAD_SIZE
    place = start * WIDTH + head * HEAD_SIZE
    row = first + tl.arange(0, BLOCK_Q)
    statistic = head.to(tl.int64) * num_tokens + start + row
    d_o = _tile(d_out + place, first, length, WIDTH, BLOCK_Q, HEAD_SIZE, True)
    o = _tile(out + place, first, length, WIDTH, BLOCK_Q, HEAD_SIZE, True)
    my_delta = tl.sum(d_o.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta + statistic, my_delta, mask=row < length)
    # exp2(score - inf) = 0: queries behind the end weigh nothing.
    log_sum = tl.load(log_sums + statistic, mask=row < length, other=float("inf"))
    hashes = _hashes(key, head, rows, start, row, length, THRESHOLD)
    if slopes is not None:
        slopes += head
    q = _tile(qkv, first, length, 3 * WIDTH, BLOCK_Q, HEAD_SIZE, True)
    d_q = tl.zeros([BLOCK_Q, HEAD_SIZE], tl.float32)
    full = length // BLOCK_K * BLOCK_K
    for first_k in range(0, full, BLOCK_K):
        d_q = _query_gradient_step(
            d_q, q, qkv + WIDTH, d_o, log_sum, my_delta, first, first_k, length, hashes, slopes, WIDTH, HEAD_SIZE,
            SCALE, THRESHOLD, BLOCK_Q, BLOCK_K, False,
        )  # fmt: skip
    if full < length:
        d_q = _query_gradient_step(
            d_q, q, qkv + WIDTH, d_o, log_sum, my_delta, first, full, length, hashes, slopes, WIDTH, HEAD_SIZE,
            SCALE, THRESHOLD, BLOCK_Q, BLOCK_K, True,
        )  # fmt: skip
    _store(d_qkv, d_q * SCALE, first, length, 3 * WIDTH, BLOCK_Q, HEAD_SIZE)


@triton.jit
def _query_gradient_step(
    d_q, q, keys, d_out, log_sum, delta, first_q, first_k, length, hashes, slopes, WIDTH: tl.constexpr,
    HEAD_SIZE: tl.constexpr, SCALE: tl.constexpr, THRESHOLD: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Adds one block of keys' part to d_q [Q, H]."""
    k = _tile(keys, first_k, length, 3 * WIDTH, BLOCK_K, HEAD_SIZE, PARTIAL)
    v = _tile(keys + WIDTH, first_k, length, 3 * WIDTH, BLOCK_K, HEAD_SIZE, PARTIAL)
    _, d_scores = _weights_and_gradient(
        q, k, v, d_out, log_sum, delta, first_q, first_k, hashes, slopes, SCALE, THRESHOLD, BLOCK_Q, BLOCK_K
    )
    if PARTIAL:
        # Keys behind the end have weights without bound; their zero rows alone would not make infinity vanish.
        d_scores = tl.where((first_k + tl.arange(0, BLOCK_K) < length)[None, :], d_scores, 0.0)
    return d_q + _dot(d_scores.to(k.dtype), k)


@triton.jit(do_not_specialize=_COUNTS)
def attention_key_value_gradient_kernel(
    qkv, cu_seqlens, order, rows, slopes, key, d_out, log_sums, delta, d_qkv, num_tokens, num_sequences, num_blocks,
    NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, SCALE: tl.constexpr, THRESHOLD: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """d_qkv[:, 1] and d_qkv[:, 2] of one block of keys. Grid: (S + 1) * N * L / K. Arguments as above."""
    block, head, start, length, is_tail = _work(cu_seqlens, order, num_tokens, num_sequences, num_blocks, NUM_HEADS)
    WIDTH: tl.constexpr = NUM_HEADS * HEAD_SIZE
    d_qkv += start * (3 * WIDTH) + head * HEAD_SIZE + WIDTH
    if is_tail:
        _zero(d_qkv, block, num_blocks, length, 3 * WIDTH, BLOCK_K, HEAD_SIZE)
        _zero(d_qkv + WIDTH, block, num_blocks, length, 3 * WIDTH, BLOCK_K, HEAD_SIZE)
        return
    first = block * BLOCK_K
    if first >= length:
        return
    qkv += start * (3 * WIDTH) + head * HEAD_SIZE
    d_out += start * WIDTH + head * HEAD_SIZE
    log_sums += head.to(tl.int64) * num_tokens + start
    delta += head.to(tl.int64) * num_tokens + start
    if slopes is not None:
        slopes += head
    # Keys behind the end get gradients of no meaning, which are not stored.
    k = _tile(qkv + WIDTH, first, length, 3 * WIDTH, BLOCK_K, HEAD_SIZE, True)
    v = _tile(qkv + 2 * WIDTH, first, length, 3 * WIDTH, BLOCK_K, HEAD_SIZE, True)
    d_k = tl.zeros([BLOCK_K, HEAD_SIZE], tl.float32)
    d_v = tl.zeros([BLOCK_K, HEAD_SIZE], tl.float32)
    full = length // BLOCK_Q * BLOCK_Q
    for first_q in range(0, full, BLOCK_Q):
        d_k, d_v = _key_value_gradient_step(
            d_k, d_v, k, v, qkv, d_out, log_sums, delta, first_q, first, length, key, head, rows, start, slopes, WIDTH,
            HEAD_SIZE, SCALE, THRESHOLD, BLOCK_Q, BLOCK_K, False,
        )  # fmt: skip
    if full < length:
        d_k, d_v = _key_value_gradient_step(
            d_k, d_v, k, v, qkv, d_out, log_sums, delta, full, first, length, key, head, rows, start, slopes, WIDTH,
            HEAD_SIZE, SCALE, THRESHOLD, BLOCK_Q, BLOCK_K, True,
        )  # fmt: skip
    _store(d_qkv, d_k * SCALE, first, length, 3 * WIDTH, BLOCK_K, HEAD_SIZE)
    _store(d_qkv + WIDTH, d_v * (256.0 / (256 - THRESHOLD)), first, length, 3 * WIDTH, BLOCK_K, HEAD_SIZE)


@triton.jit
def _key_value_gradient_step(
    d_k, d_v, k, v, queries, d_out, log_sums, delta, first_q, first_k, length, key, head, rows, start, slopes,
    WIDTH: tl.constexpr, HEAD_SIZE: tl.constexpr, SCALE: tl.constexpr, THRESHOLD: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Adds one block of queries' part to d_k and d_v [K, H]; queries behind the end have weight exp2(-inf) = 0."""
    row = first_q + tl.arange(0, BLOCK_Q)
    q = _tile(queries, first_q, length, 3 * WIDTH, BLOCK_Q, HEAD_SIZE, PARTIAL)
    d_o = _tile(d_out, first_q, length, WIDTH, BLOCK_Q, HEAD_SIZE, PARTIAL)
    if PARTIAL:
        log_sum = tl.load(log_sums + row, mask=row < length, other=float("inf"))
        my_delta = tl.load(delta + row, mask=row < length, other=0.0)
    else:
        log_sum = tl.load(log_sums + row)
        my_delta = tl.load(delta + row)
    hashes = _hashes(key, head, rows, start, row, length, THRESHOLD)
    kept, d_scores = _weights_and_gradient(
        q, k, v, d_o, log_sum, my_delta, first_q, first_k, hashes, slopes, SCALE, THRESHOLD, BLOCK_Q, BLOCK_K
    )
    d_v += _dot(tl.trans(kept.to(d_o.dtype)), d_o)
    d_k += _dot(tl.trans(d_scores.to(q.dtype)), q)
    return d_k, d_v
