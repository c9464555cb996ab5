"""Attention over packed sequences in Triton, without storing the scores.

The algorithm is FlashAttention (Dao et al., arXiv 2205.14135 and 2307.08691), with one program for
each block of queries or keys of one sequence and head::

    forward        loops over keys with a running maximum and sum;
                   saves log2(sum(exp2)) of the scaled scores
    gradient of Q  loops over keys;
                   also computes delta = sum(dO * O), which is the sum over keys of P * dP
    of K and V     loops over queries;
                   recomputes P from the saved sums, and reads the saved dropout bits

    dS = P * (dP - delta), with dP = dO V^T times the dropout scale where kept, else 0

Scores are in units of log2, to use the hardware's exponential. Q, K and V are read directly from
[T, 3, N, H], and their gradients are written in the same layout. Longer sequences are scheduled
first (`attention_order_kernel`), blocks past a sequence's end return at once, and tokens after the
last sequence form a dummy sequence with zero results. There is no host synchronization, and results
are bitwise reproducible: no two programs add to the same result. A single backward kernel for all
three gradients took 1.5 times as long (records/2026-11-27_gpu-check_h200).

Legend: S sequences, T tokens, N heads, H head size, L tokens of one sequence,
Q and K block sizes of queries and keys.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlbert.ops import forms as registry
from mlbert.ops import reference
from mlbert.ops.attention import ORDER, TRITON_HEAD_SIZES, sequence_order
from mlbert.ops.dropout import dropout_threshold
from mlbert.ops.native_library import check_attention
from mlbert.ops.triton.attention_backward import (
    attention_key_value_gradient_kernel,
    attention_query_gradient_kernel,
)
from mlbert.ops.triton.attention_blocks import (
    FORWARD,
    GRADIENT_OF_KV,
    GRADIENT_OF_Q,
    LOCAL_KEYS,
    AttentionBlocks,
    blocks_of,
)
from mlbert.ops.triton.attention_forward import attention_forward_kernel
from mlbert.ops.triton.mask import key_argument
from mlbert.ops.triton.rotary import rotate_back, rotated

ORDER_BLOCK = 64
KEYS_OF_BITS = 64
GRADIENTS = (GRADIENT_OF_Q, GRADIENT_OF_KV)


@registry.register("attention", "triton")
def attention(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p,
    key,
    rows,
    alibi_slopes=None,
    window=None,
    rotations=None,
    order=None,
):
    """See `mlbert.ops.attention.attention`; head sizes other than 32, 64 and 128 run plain.

    ``max_seqlen`` may exceed the longest sequence: blocks without work cost little.
    """
    return attend(
        triton_kernels(),
        qkv,
        cu_seqlens,
        max_seqlen,
        dropout_p,
        key,
        rows,
        alibi_slopes,
        window,
        rotations,
        order,
    )


def attend(
    kernels,
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p,
    key,
    rows,
    alibi_slopes,
    window,
    rotations,
    order,
) -> Tensor:
    """Return `attention`, computed by some `Kernels`."""
    if qkv.dtype == torch.float64 or qkv.shape[3] not in TRITON_HEAD_SIZES:
        return reference.attention(
            qkv,
            cu_seqlens,
            max_seqlen,
            dropout_p,
            key,
            rows,
            alibi_slopes,
            window,
            rotations,
        )
    has_backward = torch.is_grad_enabled() and qkv.requires_grad
    if window is not None and window >= max_seqlen - 1:
        window = None
    return _TritonAttention.apply(
        kernels,
        qkv.contiguous(),
        cu_seqlens,
        max_seqlen,
        dropout_threshold(dropout_p),
        key,
        rows,
        alibi_slopes,
        window,
        None if rotations is None else rotations.contiguous(),
        sequence_order(cu_seqlens) if order is None else order,
        has_backward,
    )


def kept_bits_shape(
    num_tokens: int, num_sequences: int, num_heads: int, max_seqlen: int
) -> tuple[int, int, int]:
    """Return the shape of the saved dropout mask, int32 [N, T/2 + 8 S, 4 ceil(L / 64)].

    8 bytes for each head, token and 64 keys of the longest sequence: 27 MB per layer for 16 heads
    and 96 sequences with 24,576 tokens in total, at most 512 each. Uses the longest because lengths
    are not known on the host.
    """
    return (
        num_heads,
        8 * (num_tokens // 16 + num_sequences),
        4 * triton.cdiv(max(1, max_seqlen), KEYS_OF_BITS),
    )


class SavedAttention(NamedTuple):
    """What backward needs of forward, besides its result; see `attention_forward_kernel`."""

    qkv: Tensor
    cu_seqlens: Tensor
    order: Tensor
    slopes: Tensor | None
    bits: Tensor | None
    rotations: Tensor | None
    log_sums: Tensor
    pairs: Tensor | None


class AttentionSettings(NamedTuple):
    """Numbers that all kernels of an attention share."""

    max_seqlen: int
    threshold: int
    window: int | None


class Kernels(NamedTuple):
    """What launches the kernels of one form.

    Attributes:
        pairs: returns what the kernels need to know about cu_seqlens and the number of tokens, or
            None.
        forward: see `launch_forward`.
        query_gradient: see `launch_query_gradient`.
        key_value_gradient: see `launch_key_value_gradient`.
    """

    pairs: Callable[[Tensor, int], Tensor | None]
    forward: Callable[..., None]
    query_gradient: Callable[..., None]
    key_value_gradient: Callable[..., None]


class _TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        kernels,
        qkv,
        cu_seqlens,
        max_seqlen,
        threshold,
        key,
        rows,
        slopes,
        window,
        rotations,
        order,
        has_backward,
    ):
        ctx.settings = AttentionSettings(max_seqlen, threshold, window)
        ctx.kernels = kernels
        out, saved = attention_forward(
            qkv,
            cu_seqlens,
            ctx.settings,
            key,
            rows,
            slopes,
            rotations,
            order,
            has_backward,
            kernels,
        )
        ctx.save_for_backward(*saved, out)
        return out

    @staticmethod
    def backward(ctx, d_out):
        *saved, out = ctx.saved_tensors
        d_qkv = torch.empty_like(saved[0])
        attention_backward(SavedAttention(*saved), ctx.settings, ctx.kernels, out, d_out, d_qkv)
        return None, d_qkv, None, None, None, None, None, None, None, None, None, None


def launch_forward(settings, saved, rows, key, out, log_sums) -> None:
    """Write the result of attention and its sums, and the bits if there is memory for them.

    Args:
        settings, saved: of all kernels.
        rows, key: of the dropout mask, as in `mlbert.ops.attention`.
        out: [T, N, H] in the dtype of qkv.
        log_sums: float32 [N, T].
    """
    grid, arguments = _launch(FORWARD, settings, saved)
    attention_forward_kernel[grid](
        **arguments, rows=rows, key=key_argument(key), out=out, log_sums=log_sums
    )


def launch_query_gradient(settings, saved, out, gradients) -> None:
    """Write the gradient of queries, and delta.

    Args:
        settings, saved: of all kernels.
        out: of forward.
        gradients: arguments of `attention_query_gradient_kernel` for gradients.
    """
    grid, arguments = _launch(GRADIENT_OF_Q, settings, saved)
    attention_query_gradient_kernel[grid](out=out, **gradients, **arguments)


def launch_key_value_gradient(settings, saved, gradients) -> None:
    """Write the gradients of keys and values; see `launch_query_gradient`."""
    grid, arguments = _launch(GRADIENT_OF_KV, settings, saved)
    attention_key_value_gradient_kernel[grid](**gradients, **arguments)


def _no_pairs(cu_seqlens: Tensor, num_tokens: int) -> None:
    del cu_seqlens, num_tokens


def triton_kernels() -> Kernels:
    """Return Triton's."""
    return Kernels(_no_pairs, launch_forward, launch_query_gradient, launch_key_value_gradient)


def attention_forward(
    qkv,
    cu_seqlens,
    settings,
    key,
    rows,
    slopes,
    rotations,
    order,
    has_backward,
    kernels,
) -> tuple[Tensor, SavedAttention]:
    """Compute `attention` of a contiguous qkv, without autograd."""
    check_attention(qkv, rows, settings.threshold, slopes, rotations)
    assert cu_seqlens.dtype == torch.int32, f"cu_seqlens is {cu_seqlens.dtype}"
    num_tokens, _, num_heads, head_size = qkv.shape
    out = qkv.new_empty(num_tokens, num_heads, head_size)
    log_sums = torch.empty(num_heads, num_tokens, dtype=torch.float32, device=qkv.device)
    bits = None
    if settings.threshold and has_backward:
        shape = kept_bits_shape(num_tokens, order.numel(), num_heads, settings.max_seqlen)
        bits = torch.empty(shape, dtype=torch.int32, device=qkv.device)
    if rotations is not None:
        qkv = rotated(qkv, rotations)
    pairs = kernels.pairs(cu_seqlens, num_tokens)
    saved = SavedAttention(qkv, cu_seqlens, order, slopes, bits, rotations, log_sums, pairs)
    if num_tokens:
        kernels.forward(settings, saved, rows, key, out, log_sums)
    return out, saved


def attention_backward(
    saved, settings, kernels, out, d_out, d_qkv, sums=None, scale=None, amax=None
) -> None:
    """Write the gradient of qkv.

    Args:
        saved, settings, out: of forward.
        kernels: Triton's with `sums` or `scale`, which the others have not.
        d_out: gradient of the result.
        d_qkv: contiguous, of the shape of qkv: its dtype, or with `scale` uint8, for e5m2.
        sums: float32 [`sum_rows`, 3, N, H], if wanted: gets sums over tokens, which together are
            the sum over all.
        scale, amax: float32 scalars. e5m2 is the gradient times scale, and amax is raised to its
            largest magnitude.
    """
    if not saved.qkv.shape[0]:
        return
    gradients = {
        "d_out": d_out.contiguous(),
        "log_sums": saved.log_sums,
        "delta": torch.empty_like(saved.log_sums),
        "d_qkv": d_qkv,
        "sums": sums,
        "scale": scale,
        "amax": amax,
    }
    kernels.query_gradient(settings, saved, out, gradients)
    kernels.key_value_gradient(settings, saved, gradients)
    if saved.rotations is not None:
        rotate_back(d_qkv, saved.rotations)


def sum_rows(saved, settings) -> int:
    """Return the first dimension of ``sums`` of `attention_backward`, or 0 if its kernels have
    blocks of different sizes.
    """
    numbers = {_num_blocks(kernel, settings, saved.qkv) for kernel in GRADIENTS}
    return saved.order.numel() * numbers.pop() if len(numbers) == 1 else 0


def _blocks(kernel, settings, qkv) -> AttentionBlocks:
    blocks = blocks_of(qkv)[kernel]
    if not blocks.maxnreg:
        return blocks
    if settings.window is not None:
        return LOCAL_KEYS
    # Without dropout, ptxas serializes the matrix products within the limit (C7512).
    return blocks if settings.threshold else replace(blocks, maxnreg=None)


def _num_blocks(kernel, settings, qkv) -> int:
    blocks = _blocks(kernel, settings, qkv)
    block = blocks.BLOCK_K if kernel == GRADIENT_OF_KV else blocks.BLOCK_Q
    return max(1, triton.cdiv(settings.max_seqlen, block))


def blocks_of_bits(settings) -> int:
    """Return how many blocks of `KEYS_OF_BITS` keys the saved mask has."""
    return triton.cdiv(max(1, settings.max_seqlen), KEYS_OF_BITS)


def _launch(kernel, settings, saved) -> tuple[tuple[int], dict]:
    """Return grid and common arguments of a kernel.

    ``kernel``: `FORWARD`, `GRADIENT_OF_Q` or `GRADIENT_OF_KV`.
    """
    num_tokens, _, num_heads, head_size = saved.qkv.shape
    num_sequences = saved.order.numel()
    blocks = _blocks(kernel, settings, saved.qkv)
    num_blocks = _num_blocks(kernel, settings, saved.qkv)
    grid = ((num_sequences + 1) * num_heads * num_blocks,)
    arguments = {
        "qkv": saved.qkv,
        "cu_seqlens": saved.cu_seqlens,
        "order": saved.order,
        "slopes": saved.slopes,
        "bits": saved.bits,
        "num_tokens": num_tokens,
        "num_sequences": num_sequences,
        "num_blocks": num_blocks,
        "bits_blocks": blocks_of_bits(settings),
        "NUM_HEADS": num_heads,
        "HEAD_SIZE": head_size,
        "SCALE": head_size**-0.5,
        "THRESHOLD": settings.threshold,
        "WINDOW": settings.window,
        **blocks.options(),
    }
    return grid, arguments


@registry.register_exact(ORDER, "triton")
def descending_order(cu_seqlens: Tensor) -> Tensor:
    """See `mlbert.ops.attention.sequence_order`."""
    num_sequences = cu_seqlens.numel() - 1
    order = torch.empty(num_sequences, dtype=torch.int32, device=cu_seqlens.device)
    if num_sequences:
        attention_order_kernel[(triton.cdiv(num_sequences, ORDER_BLOCK),)](
            cu_seqlens, order, num_sequences, BLOCK=ORDER_BLOCK
        )
    return order


@triton.jit(do_not_specialize=["num_sequences"])
def attention_order_kernel(cu_seqlens, order, num_sequences, BLOCK: tl.constexpr):
    """Rank each sequence by counting those before it.

    Grid: S / BLOCK. cu_seqlens, order: int32 [S+1], [S].
    """
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = lengths_of(cu_seqlens, own, num_sequences)
    place = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_sequences, BLOCK):
        other = start + tl.arange(0, BLOCK)
        other_length = lengths_of(cu_seqlens, other, num_sequences)
        longer = other_length[None, :] > length[:, None]
        earlier = (other_length[None, :] == length[:, None]) & (other[None, :] < own[:, None])
        place += tl.sum((longer | earlier).to(tl.int32), 1)
    tl.store(order + place, own, mask=own < num_sequences)


@triton.jit
def lengths_of(cu_seqlens, sequence, num_sequences):
    """Return lengths int32; -1 past the last sequence."""
    inside = sequence < num_sequences
    start = tl.load(cu_seqlens + sequence, mask=inside, other=1)
    return tl.load(cu_seqlens + sequence + 1, mask=inside, other=0) - start
