"""LayerNorm fused with dropout, residual sum and quantisation, forward and backward.

Forward writes its result in bfloat16 for the residual sum and in e4m3 for the next linear layer. Backward writes the
residual's gradient in bfloat16 and that of x in e5m2 for the preceding linear layer. FP8 copies are written by rows and
transposed. A program processes the four rows of each group of a tile in turn and keeps their bytes to store them
transposed (`cast`). The arithmetic is that of `norm`.

Legend: T tokens, U tokens rounded up to a multiple of 16, D hidden, P programs, G groups of four rows of a tile.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlbert.ops import forms as registry
from mlbert.ops.dropout import dropout_threshold
from mlbert.ops.fp8_casts import NormGradients, NormSaved
from mlbert.ops.fp8_scaling import padded_tokens
from mlbert.ops.triton.cast import fp8_arguments, quantised_buffers, raise_amax, store_columns, store_rows
from mlbert.ops.triton.device import sum_partials, walking_programs
from mlbert.ops.triton.mask import key_argument
from mlbert.ops.triton.norm import (
    check_arguments,
    kept_elements,
    load_gradient,
    load_vector,
    normalised,
    residual_sum,
    sum_gradient,
)

# Elements in one row of each group: 16 and 8 per thread. The backward kernel's sums need the other registers.
FORWARD_PIECE, BACKWARD_PIECE = 8192, 4096
MAX_GROUPS, MAX_WARPS = 32, 16


@registry.register("fp8_dropout_add_layer_norm_forward", "triton")
def norm_forward(x, residual, weight, bias, eps, dropout_p, key, rows, x_bias, scale, amax):
    """See `mlbert.ops.fp8_casts`."""
    tokens, hidden = x.shape
    threshold = dropout_threshold(dropout_p)
    check_arguments(x, residual, (weight, bias, x_bias), rows, threshold)
    x, residual = x.contiguous(), residual.contiguous()
    total, out, copies = torch.empty_like(x), torch.empty_like(x), quantised_buffers(x, torch.float8_e4m3fn)
    mean, inverse = (torch.empty(tokens, dtype=torch.float32, device=x.device) for _ in range(2))
    if tokens:
        block, groups, warps = _tile(hidden, FORWARD_PIECE)
        fp8_norm_forward_kernel[(triton.cdiv(tokens, 4 * groups),)](
            *(x, residual, x_bias, weight, bias, rows, key_argument(key), total, mean, inverse, out),
            *(*fp8_arguments(copies), scale, amax, tokens, padded_tokens(tokens), hidden, eps, threshold),
            *(groups, block),
            num_warps=warps,
        )
    return out, copies, NormSaved(total, mean, inverse)


@registry.register("fp8_dropout_add_layer_norm_backward", "triton")
def norm_backward(d_out, d_twin, saved, weight, dropout_p, key, rows, scale, amax) -> NormGradients:
    """See `mlbert.ops.fp8_casts`."""
    tokens, hidden = saved.total.shape
    d_out, d_twin = d_out.contiguous(), None if d_twin is None else d_twin.contiguous()
    d_residual, copies = torch.empty_like(saved.total), quantised_buffers(saved.total, torch.float8_e5m2)
    block, groups, warps = _tile(hidden, BACKWARD_PIECE)
    programs = min(triton.cdiv(tokens, 4 * groups), walking_programs(d_out.device))
    partial = torch.empty(programs, 3, hidden, dtype=torch.float32, device=d_out.device)
    if tokens:
        fp8_norm_backward_kernel[(programs,)](
            *(d_out, d_twin, *saved, weight, rows, key_argument(key), d_residual, *fp8_arguments(copies)),
            *(scale, amax, partial, tokens, padded_tokens(tokens), hidden, dropout_threshold(dropout_p)),
            *(groups, block),
            num_warps=warps,
        )
    d_weight, d_bias, d_x_bias = sum_partials(partial).unbind(0)
    return NormGradients(d_residual, copies, d_x_bias, d_weight, d_bias)


def _tile(hidden: int, piece: int) -> tuple[int, int, int]:
    """Return (columns per tile, G, warps). 4 G is a multiple of 16, so that the last tile reaches U."""
    block = max(16, triton.next_power_of_2(hidden))
    groups = max(4, min(MAX_GROUPS, piece // block))
    return block, groups, max(1, min(MAX_WARPS, MAX_WARPS * groups * block // piece))


@triton.jit
def forward_rows(
    x, residual, x_bias, weight, bias, rows, key, total, means, inverses, out, out_rows, scale, token, column, tokens,
    hidden, eps, largest, threshold: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Process one row of each group and store all but the transposed copy. Return the bytes [G, BLOCK] and the updated
    largest magnitudes [G]."""
    value = residual_sum(x, residual, x_bias, rows, key, token, column, tokens, hidden, threshold, BLOCK)
    result = normalised(value, weight, bias, total, means, inverses, token, column, tokens, hidden, eps)
    result = result.to(out.dtype.element_ty)
    inside = (token < tokens)[:, None] & (column < hidden)[None, :]
    tl.store(out + token[:, None].to(tl.int64) * hidden + column[None, :], result, mask=inside)
    # Quantise the value rounded to the activations' dtype, to match the reference.
    value = tl.where(inside, result.to(tl.float32), 0.0)
    small = store_rows(value, scale, token, column, tokens, hidden, out_rows, False)
    return small, tl.maximum(largest, tl.max(tl.abs(value), 1))


@triton.jit(do_not_specialize=["key", "tokens"], do_not_specialize_on_alignment=["quantisation_scale", "amax"])
def fp8_norm_forward_kernel(
    x, residual, x_bias, weight, bias, rows, key, total, means, inverses, out, out_rows, out_columns,
    quantisation_scale, amax, tokens, padded, hidden: tl.constexpr, eps, threshold: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute 4 GROUPS rows of LayerNorm(residual + dropout(x + x_bias)). Grid: T / (4 GROUPS).

    x, residual, total, out: [T, D]; x_bias (may be None), weight, bias: [D]; rows: int32 [T]; means, inverses: float32
    [T]; out_rows uint8 [T, D], out_columns int32 [D, U / 4]; quantisation_scale, amax: float32 scalars.
    """
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    column = tl.arange(0, BLOCK)
    scale, largest = tl.load(quantisation_scale), tl.zeros([GROUPS], tl.float32)
    small = tl.tuple(())
    for number in tl.static_range(4):
        row, largest = forward_rows(
            x, residual, x_bias, weight, bias, rows, key, total, means, inverses, out, out_rows, scale,
            4 * group + number, column, tokens, hidden, eps, largest, threshold, BLOCK,
        )  # fmt: skip
        small += (row,)
    raise_amax(amax, largest[:, None])
    store_columns(small, group, column, padded, hidden, out_columns)


@triton.jit
def backward_rows(
    d_out, d_twin, total, means, inverses, gain, rows, key, d_residual, out_rows, scale, token, column, tokens, hidden,
    sum_weight, sum_bias, sum_x, largest, threshold: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Process one row of each group and store all but the transposed copy. Return its bytes and the updated sums, [G,
    BLOCK], and the updated largest magnitudes, only [G] to save registers."""
    d = load_gradient(d_out, d_twin, token, column, tokens, hidden)
    result, normal = sum_gradient(d, gain, total, means, inverses, token, column, tokens, hidden)
    sum_weight, sum_bias = sum_weight + d * normal, sum_bias + d
    inside = (token < tokens)[:, None] & (column < hidden)[None, :]
    place = token[:, None].to(tl.int64) * hidden + column[None, :]
    tl.store(d_residual + place, result.to(d_residual.dtype.element_ty), mask=inside)
    if threshold > 0:
        # Recompute the mask: the forward pass did not store it.
        kept = kept_elements(rows, key, token, tokens, threshold, BLOCK)
        result = tl.where(kept, result * (256.0 / (256 - threshold)), 0.0)
    # Padded columns are not 0 here: the row's means were subtracted.
    result = tl.where((column < hidden)[None, :], result, 0.0)
    small = store_rows(result, scale, token, column, tokens, hidden, out_rows, True)
    largest = tl.maximum(largest, tl.max(tl.abs(result), 1))
    return small, sum_weight, sum_bias, sum_x + result, largest


@triton.jit(do_not_specialize=["key", "tokens"], do_not_specialize_on_alignment=["quantisation_scale", "amax"])
def fp8_norm_backward_kernel(
    d_out, d_twin, total, means, inverses, weight, rows, key, d_residual, out_rows, out_columns, quantisation_scale,
    amax, partial, tokens, padded, hidden: tl.constexpr, threshold: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute gradients of every P-th tile of 4 GROUPS rows, and this program's sums over its tokens. Grid: P.

    d_out, d_twin (may be None), total, d_residual: [T, D]; out_rows uint8 [T, D] and out_columns int32 [D, U / 4]: the
    gradient of x; partial: float32 [P, 3, D], sums for weight, bias and x_bias; others as in the forward kernel.
    """
    column = tl.arange(0, BLOCK)
    gain, scale = load_vector(weight, column, hidden), tl.load(quantisation_scale)
    sum_weight = tl.zeros([GROUPS, BLOCK], tl.float32)
    sum_bias, sum_x, largest = sum_weight, sum_weight, tl.zeros([GROUPS], tl.float32)
    start = tl.program_id(0) * GROUPS
    # Every program sums its tiles in order, so the results are the same in every run.
    while start * 4 < tokens:
        group = start + tl.arange(0, GROUPS)
        small = tl.tuple(())
        for number in tl.static_range(4):
            row, sum_weight, sum_bias, sum_x, largest = backward_rows(
                d_out, d_twin, total, means, inverses, gain, rows, key, d_residual, out_rows, scale,
                4 * group + number, column, tokens, hidden, sum_weight, sum_bias, sum_x, largest, threshold, BLOCK,
            )  # fmt: skip
            small += (row,)
        store_columns(small, group, column, padded, hidden, out_columns)
        start += tl.num_programs(0) * GROUPS
    raise_amax(amax, largest[:, None])
    base, inside = partial + tl.program_id(0) * 3 * hidden + column, column < hidden
    tl.store(base, tl.sum(sum_weight, 0), mask=inside)
    tl.store(base + hidden, tl.sum(sum_bias, 0), mask=inside)
    tl.store(base + 2 * hidden, tl.sum(sum_x, 0), mask=inside)
