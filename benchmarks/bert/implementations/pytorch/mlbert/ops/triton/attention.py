"""Attention over packed sequences as Triton kernels: the scores never reach memory.

The algorithm is FlashAttention's (Dao et al., arXiv 2205.14135 and 2307.08691) with one program for each block of
queries or keys of one sequence and head::

    forward        walks the keys with a running maximum and sum; saves log2(sum(exp2)) of the scaled scores
    gradient of Q  walks the keys; also finds delta = sum(dO * O), which is the sum over keys of P * dP
    of K and V     walks the queries; P is made again from what the forward pass saved, and so are its dropout's bits
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

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlbert.ops import reference, registry
from mlbert.ops.attention import TRITON_HEAD_SIZES
from mlbert.ops.dropout import dropout_threshold
from mlbert.ops.native_library import check_rows
from mlbert.ops.triton.attention_backward import attention_key_value_gradient_kernel, attention_query_gradient_kernel
from mlbert.ops.triton.attention_forward import attention_forward_kernel
from mlbert.ops.triton.device import capability
from mlbert.ops.triton.mask import key_argument

ORDER_BLOCK = 64
KEYS_OF_BITS = 64


@dataclass(frozen=True)
class AttentionBlocks:
    """How a kernel is cut up: queries and keys of a tile, and Triton's warps and pipeline stages."""

    BLOCK_Q: int
    BLOCK_K: int
    num_warps: int
    num_stages: int


# Head size -> forward, gradient of Q, gradient of K and V, for 16-bit types. Chosen by what the compiler reports
# (tools/compile_kernels.py: no spills, most warps on a multiprocessor), not by measurement. The forward pass takes keys
# by multiples of 64, whose bits of the mask it writes together; the others by multiples of 32.
_HOPPER = {
    32: (AttentionBlocks(128, 64, 8, 3), AttentionBlocks(64, 64, 4, 2), AttentionBlocks(64, 64, 4, 2)),
    64: (AttentionBlocks(64, 64, 4, 2), AttentionBlocks(64, 64, 4, 2), AttentionBlocks(64, 64, 4, 2)),
    128: (AttentionBlocks(128, 64, 8, 2), AttentionBlocks(64, 64, 8, 2), AttentionBlocks(32, 64, 8, 2)),
}
_AMPERE = {
    32: (AttentionBlocks(128, 64, 8, 3), AttentionBlocks(64, 64, 4, 2), AttentionBlocks(64, 64, 4, 2)),
    64: (AttentionBlocks(128, 64, 8, 2), AttentionBlocks(64, 64, 4, 2), AttentionBlocks(64, 32, 4, 2)),
    128: (AttentionBlocks(128, 64, 8, 2), AttentionBlocks(32, 64, 8, 2), AttentionBlocks(32, 64, 8, 2)),
}
# float32 products run without tensor cores and spill: this form is for comparisons.
_SINGLE = {
    size: (AttentionBlocks(rows, 64, 4, 1),) * 3 for size, rows in zip(TRITON_HEAD_SIZES, (32, 16, 16), strict=True)
}


@registry.register("attention", "triton")
def attention(qkv, cu_seqlens, max_seqlen, dropout_p, key, rows, alibi_slopes=None):
    """See `mlbert.ops.attention.attention`; other head sizes than 32, 64 and 128 run plain.

    ``max_seqlen`` may be more than the longest sequence, not less: blocks that find nothing to do cost little.
    """
    if qkv.dtype == torch.float64 or qkv.shape[3] not in _SINGLE:
        return reference.attention(qkv, cu_seqlens, max_seqlen, dropout_p, key, rows, alibi_slopes)
    has_backward = torch.is_grad_enabled() and qkv.requires_grad
    settings = (dropout_threshold(dropout_p), key, rows, alibi_slopes, has_backward)
    return _TritonAttention.apply(qkv.contiguous(), cu_seqlens, max_seqlen, *settings)


def kept_bits_shape(num_tokens: int, num_sequences: int, num_heads: int, max_seqlen: int) -> tuple[int, int, int]:
    """Of int32 [N, T/2 + 8 S, 4 ceil(L / 64)]: what forward with dropout keeps of its mask for backward.

    8 bytes for each head, token and 64 keys of the longest sequence: 27 MB a layer for 16 heads and 96 sequences of
    24,576 tokens, 512 at most. The longest counts because no length is known on the host.
    """
    return num_heads, 8 * (num_tokens // 16 + num_sequences), 4 * triton.cdiv(max(1, max_seqlen), KEYS_OF_BITS)


class _TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cu_seqlens, max_seqlen, threshold, key, rows, slopes, has_backward):
        num_tokens, three, num_heads, head_size = qkv.shape
        assert three == 3, f"qkv {tuple(qkv.shape)} is not [T, 3, N, H]"
        assert cu_seqlens.dtype == torch.int32, f"cu_seqlens is {cu_seqlens.dtype}"
        check_rows(rows, num_tokens, threshold)
        assert slopes is None or (slopes.dtype, slopes.shape) == (torch.float32, (num_heads,)), "slopes: float32 [N]"
        out = qkv.new_empty(num_tokens, num_heads, head_size)
        log_sums = torch.empty(num_heads, num_tokens, dtype=torch.float32, device=qkv.device)
        shape = kept_bits_shape(num_tokens, cu_seqlens.numel() - 1, num_heads, max_seqlen)
        bits = torch.empty(shape, dtype=torch.int32, device=qkv.device) if threshold and has_backward else None
        inputs = (qkv, cu_seqlens, descending_order(cu_seqlens), slopes, bits)
        ctx.save_for_backward(*inputs, out, log_sums)
        ctx.options = (max_seqlen, threshold)
        if num_tokens:
            grid, arguments = _launch(0, *inputs, *ctx.options)
            arguments |= {"rows": rows, "key": key_argument(key), "out": out, "log_sums": log_sums}
            attention_forward_kernel[grid](**arguments)
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
        return d_qkv, *(None,) * 7


def _launch(kernel, qkv, cu_seqlens, order, slopes, bits, max_seqlen, threshold) -> tuple[tuple[int], dict]:
    """Grid and common arguments of kernel 0 (forward), 1 (gradient of Q) or 2 (of K and V)."""
    num_tokens, _, num_heads, head_size = qkv.shape
    blocks = _blocks(qkv)[kernel]
    num_blocks = max(1, triton.cdiv(max_seqlen, blocks.BLOCK_K if kernel == 2 else blocks.BLOCK_Q))
    arguments = {"qkv": qkv, "cu_seqlens": cu_seqlens, "order": order, "slopes": slopes, "bits": bits}
    counts = {"num_tokens": num_tokens, "num_sequences": order.numel(), "num_blocks": num_blocks}
    counts |= {"bits_blocks": triton.cdiv(max(1, max_seqlen), KEYS_OF_BITS)}
    sizes = {"NUM_HEADS": num_heads, "HEAD_SIZE": head_size, "SCALE": head_size**-0.5, "THRESHOLD": threshold}
    return ((order.numel() + 1) * num_heads * num_blocks,), {**arguments, **counts, **sizes, **asdict(blocks)}


def _blocks(qkv: Tensor) -> tuple[AttentionBlocks, ...]:
    architecture = capability(qkv.device)
    sixteen_bits = _HOPPER if architecture >= 90 else _AMPERE
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
