"""LayerNorm fused with dropout and residual sum in Triton, one pass over memory each way.

A program processes complete rows. Forward saves the sum, its mean and 1 / deviation. Backward
recomputes the mask, adds the gradients of the result's two readers in registers, and leaves partial
sums over tokens (gradients of the three vectors) to `device.sum_partials`.

Legend: T tokens, D hidden, P programs, R rows of a tile, C its columns.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlbert.ops import forms as registry
from mlbert.ops.dropout import dropout_threshold
from mlbert.ops.fp8_casts import NormGradients, NormSaved
from mlbert.ops.native_library import check_rows
from mlbert.ops.triton.cast import cast_transpose
from mlbert.ops.triton.device import ACTIVATION_TYPES, sum_partials, walking_programs
from mlbert.ops.triton.mask import keep, key_argument, load_key, row_hash
from mlbert.ops.weights import gradient_buffer, written

# elements per program of each of its tensors
FORWARD_TILE = 4096
BACKWARD_TILE = 2048


def dropout_add_layer_norm(*arguments):
    """See `mlbert.ops.norm.dropout_add_layer_norm`."""
    return dropout_add_layer_norm_twice(*arguments)[0]


@registry.register("dropout_add_layer_norm", "triton")
def dropout_add_layer_norm_twice(x, residual, weight, bias, eps, dropout_p, key, rows, x_bias=None):
    """See `mlbert.ops.norm.dropout_add_layer_norm_twice`;
    the backward kernel adds both gradients in registers.
    """
    threshold = dropout_threshold(dropout_p)
    return _TritonDropoutNorm.apply(
        x, residual, x_bias, weight, bias, eps, threshold, key, rows, False
    )


@registry.register("layer_norm_dropout", "triton")
def layer_norm_dropout(x, weight, bias, eps, dropout_p, key, rows):
    """See `mlbert.ops.norm.layer_norm_dropout`."""
    return _TritonDropoutNorm.apply(
        x, None, None, weight, bias, eps, dropout_threshold(dropout_p), key, rows, True
    )[0]


@registry.register("fp8_dropout_add_layer_norm_forward", "triton")
def quantized_norm(x, residual, weight, bias, eps, dropout_p, key, rows, x_bias, scale, amax):
    """See `mlbert.ops.fp8_casts`.

    A second kernel casts the result: one kernel that also transposed took longer on an H200 than
    both.
    """
    out, *saved = _forward(
        x, residual, x_bias, weight, bias, eps, dropout_threshold(dropout_p), key, rows, False
    )
    return out, cast_transpose(out, scale, amax, torch.float8_e4m3fn), NormSaved(*saved)


@registry.register("fp8_dropout_add_layer_norm_backward", "triton")
def quantized_norm_gradients(
    d_out, d_twin, saved, weight, dropout_p, key, rows, scale, amax, buffer=None
) -> NormGradients:
    """See `mlbert.ops.fp8_casts`."""
    d_x, d_total, sums = _gradients(
        d_out,
        d_twin,
        saved.total,
        saved.mean,
        saved.inverse,
        weight,
        dropout_threshold(dropout_p),
        key,
        rows,
        drop_output=False,
        sums=3,
        buffer=buffer,
    )
    small = cast_transpose(d_x, scale, amax, torch.float8_e5m2)
    return NormGradients(d_total, small, sums)


class _TritonDropoutNorm(torch.autograd.Function):
    """`drop_output` False: LayerNorm(residual + dropout(x + x_bias));
    True: dropout(LayerNorm(x)).
    """

    @staticmethod
    def forward(ctx, x, residual, x_bias, weight, bias, eps, threshold, key, rows, drop_output):
        ctx.set_materialize_grads(False)
        out, total, mean, inverse = _forward(
            x, residual, x_bias, weight, bias, eps, threshold, key, rows, drop_output
        )
        key_on_device = key if isinstance(key, Tensor) else None
        ctx.save_for_backward(total, mean, inverse, weight, rows, key_on_device)
        ctx.key = None if isinstance(key, Tensor) else key
        ctx.threshold = threshold
        ctx.drop_output = drop_output
        # In the order of their sums.
        ctx.vectors = (x_bias, weight, bias)
        return out, out.detach()

    @staticmethod
    def backward(ctx, d_out, d_twin):
        if d_out is None:
            d_out = d_twin
            d_twin = None
        if d_out is None:
            return (None,) * 10
        total, mean, inverse, weight, rows, key_on_device = ctx.saved_tensors
        # The kernel sums the gradient of a bias whether there is one or not.
        has_all = ctx.vectors[2] is not None
        vectors = [vector for vector in ctx.vectors if vector is not None]
        buffer = gradient_buffer(vectors) if has_all else None
        d_x, d_total, sums = _gradients(
            d_out,
            d_twin,
            total,
            mean,
            inverse,
            weight,
            ctx.threshold,
            ctx.key if key_on_device is None else key_on_device,
            rows,
            drop_output=ctx.drop_output,
            sums=2 if ctx.vectors[0] is None else 3,
            buffer=buffer,
        )
        d_residual = None if ctx.drop_output else d_total
        if buffer is None:
            gradients = iter(sums.view(-1, total.shape[1]))
            d_x_bias = None if ctx.vectors[0] is None else next(gradients).to(ctx.vectors[0].dtype)
            d_weight = next(gradients).to(weight.dtype)
            d_bias = next(gradients).to(ctx.vectors[2].dtype) if has_all else None
        else:
            written(vectors)
            d_x_bias = d_weight = d_bias = None
        return d_x, d_residual, d_x_bias, d_weight, d_bias, None, None, None, None, None


def _forward(
    x, residual, x_bias, weight, bias, eps, threshold, key, rows, drop_output
) -> tuple[Tensor, ...]:
    """Return the result, and the sum, mean and 1 / deviation of each row, which backward needs."""
    tokens, hidden = x.shape
    check_arguments(x, residual, (weight, bias, x_bias), rows, threshold)
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    total = x if drop_output else torch.empty_like(x)
    out = torch.empty_like(x)
    mean = torch.empty(tokens, dtype=torch.float32, device=x.device)
    inverse = torch.empty_like(mean)
    if tokens:
        block = max(4, triton.next_power_of_2(hidden))
        tile_rows = max(1, FORWARD_TILE // block)
        norm_forward_kernel[(triton.cdiv(tokens, tile_rows),)](
            x,
            residual,
            x_bias,
            weight,
            bias,
            rows,
            key_argument(key),
            None if drop_output else total,
            mean,
            inverse,
            out,
            tokens,
            hidden,
            eps,
            threshold,
            drop_output,
            tile_rows,
            block,
            num_warps=_warps(tile_rows * block),
        )
    return out, total, mean, inverse


def _gradients(
    d_out,
    d_twin,
    total,
    mean,
    inverse,
    weight,
    threshold,
    key,
    rows,
    drop_output,
    sums,
    buffer=None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the sum, and float32 [sums D] of x_bias if `sums` is 3, weight
    and bias, in the buffer if there is one; for d_out + d_twin (which may be None).
    """
    tokens, hidden = total.shape
    d_out = d_out.contiguous()
    d_total = torch.empty_like(total)
    d_twin = None if d_twin is None else d_twin.contiguous()
    # Without dropout, x and residual share one gradient tensor.
    d_x = torch.empty_like(total) if threshold and not drop_output else d_total
    block = max(4, triton.next_power_of_2(hidden))
    tile_rows = max(1, BACKWARD_TILE // block)
    programs = min(triton.cdiv(tokens, tile_rows), walking_programs(total.device))
    partial = torch.empty(programs, sums, hidden, dtype=torch.float32, device=total.device)
    if tokens:
        norm_backward_kernel[(programs,)](
            d_out,
            d_twin,
            total,
            mean,
            inverse,
            weight,
            rows,
            key_argument(key),
            d_total,
            None if d_x is d_total else d_x,
            partial,
            tokens,
            hidden,
            threshold,
            drop_output,
            sums,
            tile_rows,
            block,
            num_warps=_warps(2 * tile_rows * block),
        )
    return d_x, d_total, sum_partials(partial.flatten(1), buffer)


def check_arguments(x, residual, vectors, rows, threshold) -> None:
    """Check shapes and dtypes of a forward pass."""
    assert x.dtype in ACTIVATION_TYPES, f"expected one of {ACTIVATION_TYPES}, got {x.dtype}"
    check_rows(rows, x.shape[0], threshold)
    for vector in vectors:
        assert vector is None or vector.shape == x.shape[1:], (
            f"{tuple(vector.shape)} for {x.shape[1]} columns"
        )
        assert vector is None or vector.is_contiguous(), "contiguous vectors expected"
    if residual is not None:
        assert residual.shape == x.shape, f"{tuple(residual.shape)} is not {tuple(x.shape)}"
        assert residual.dtype == x.dtype, f"residual of {residual.dtype}, x of {x.dtype}"


def _warps(elements: int) -> int:
    return max(1, min(16, elements // 1024))


@triton.jit
def _statistics(value, is_column, hidden, eps):
    """Return mean, differences from it and 1 / deviation of the rows of a float32 tile."""
    mean = tl.sum(tl.where(is_column, value, 0.0), 1) / hidden
    centred = tl.where(is_column, value - mean[:, None], 0.0)
    return mean, centred, 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / hidden + eps)


@triton.jit
def load_vector(vector, column, hidden):
    """Load a vector [D] as float32 [1, C], 0 past D."""
    return tl.load(vector + column, mask=column < hidden, other=0.0).to(tl.float32)[None, :]


@triton.jit
def kept_elements(rows, key, token, tokens, threshold: tl.constexpr, BLOCK: tl.constexpr):
    """Return the dropout mask of tokens [R]: bool [R, BLOCK]."""
    row = tl.load(rows + token, mask=token < tokens, other=0)
    return keep(row_hash(load_key(key), row), 0, BLOCK, threshold)


@triton.jit
def residual_sum(
    x,
    residual,
    x_bias,
    rows,
    key,
    token,
    column,
    tokens,
    hidden,
    threshold: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return residual + dropout(x + x_bias) of tokens [R], float32 [R, BLOCK];
    outside, only the bias is added to 0.
    """
    inside = (token < tokens)[:, None] & (column < hidden)[None, :]
    place = token[:, None].to(tl.int64) * hidden + column[None, :]  # T D may exceed 2^31
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if x_bias is not None:
        value += load_vector(x_bias, column, hidden)
    if threshold > 0:
        kept = kept_elements(rows, key, token, tokens, threshold, BLOCK)
        value = tl.where(kept, value * (256.0 / (256 - threshold)), 0.0)
    return value + tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def normalized(value, weight, bias, total, means, inverses, token, column, tokens, hidden, eps):
    """Return LayerNorm of float32 rows [R, C].

    Store their statistics and, unless `total` is None, the rows.
    """
    is_column = (column < hidden)[None, :]
    mean, centred, inverse = _statistics(value, is_column, hidden, eps)
    kept_mean = mean
    kept_inverse = inverse
    if total is not None:
        kept_sum = value.to(total.dtype.element_ty)
        place = token[:, None].to(tl.int64) * hidden + column[None, :]
        tl.store(total + place, kept_sum, mask=(token < tokens)[:, None] & is_column)
        if total.dtype.element_ty != tl.float32:
            # Backward normalizes the stored, rounded sum, so it needs that sum's statistics.
            kept_mean, _, kept_inverse = _statistics(
                kept_sum.to(tl.float32), is_column, hidden, eps
            )
    tl.store(means + token, kept_mean, mask=token < tokens)
    tl.store(inverses + token, kept_inverse, mask=token < tokens)
    result = centred * inverse[:, None] * load_vector(weight, column, hidden)
    if bias is not None:
        result += load_vector(bias, column, hidden)
    return result


@triton.jit
def sum_gradient(d, gain, total, means, inverses, token, column, tokens, hidden):
    """Return the gradient of the sum and the normalized sum of tokens [R], float32 [R, C];
    d: the result's gradient.

    With h = (total - mean) / deviation and g = weight * d,
    these are (g - mean(g) - h mean(g h)) / deviation and h.
    """
    is_column = (column < hidden)[None, :]
    inside = (token < tokens)[:, None] & is_column
    place = token[:, None].to(tl.int64) * hidden + column[None, :]
    mean = tl.load(means + token, mask=token < tokens, other=0.0)[:, None]
    inverse = tl.load(inverses + token, mask=token < tokens, other=0.0)[:, None]
    normal = (tl.load(total + place, mask=inside, other=0.0).to(tl.float32) - mean) * inverse
    normal = tl.where(is_column, normal, 0.0)
    gradient = d * gain
    mean_gradient = tl.sum(gradient, 1)[:, None] / hidden
    mean_product = tl.sum(gradient * normal, 1)[:, None] / hidden
    return (gradient - mean_gradient - normal * mean_product) * inverse, normal


@triton.jit
def load_gradient(d_out, d_twin, token, column, tokens, hidden):
    """Return d_out + d_twin (which may be None) of tokens [R], float32 [R, C], 0 outside."""
    inside = (token < tokens)[:, None] & (column < hidden)[None, :]
    place = token[:, None].to(tl.int64) * hidden + column[None, :]
    d = tl.load(d_out + place, mask=inside, other=0.0).to(tl.float32)
    if d_twin is not None:
        d += tl.load(d_twin + place, mask=inside, other=0.0).to(tl.float32)
    return d


@triton.jit(do_not_specialize=["key", "tokens"])
def norm_forward_kernel(
    x, residual, x_bias, weight, bias, rows, key, total, means, inverses, out, tokens,
    hidden: tl.constexpr, eps, threshold: tl.constexpr, DROP_OUTPUT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ROWS rows of LayerNorm(residual + dropout(x + x_bias)), or dropout(LayerNorm(x)).

    Grid: T / ROWS.

    x, residual, total, out: [T, D]; x_bias, weight, bias: [D]; rows: int32 [T]; means, inverses:
    float32 [T]. x_bias and bias may be None; with DROP_OUTPUT, residual and total are
    None.
    """
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (column < hidden)[None, :]
    place = token[:, None].to(tl.int64) * hidden + column[None, :]
    if DROP_OUTPUT:
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    else:
        value = residual_sum(
            x, residual, x_bias, rows, key, token, column, tokens, hidden, threshold, BLOCK
        )
    result = normalized(
        value, weight, bias, total, means, inverses, token, column, tokens, hidden, eps
    )
    if threshold > 0 and DROP_OUTPUT:
        kept = kept_elements(rows, key, token, tokens, threshold, BLOCK)
        result = tl.where(kept, result * (256.0 / (256 - threshold)), 0.0)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["key", "tokens"])
def norm_backward_kernel(
    d_out, d_twin, total, means, inverses, weight, rows, key, d_total, d_x, partial, tokens,
    hidden: tl.constexpr, threshold: tl.constexpr, DROP_OUTPUT: tl.constexpr, SUMS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute gradients of every P-th tile of ROWS rows, and this program's sums over its tokens.

    Grid: P.

    d_out, d_twin, total, d_total, d_x: [T, D]. d_twin is added to d_out and may be None. d_x is
    None if it equals d_total. partial: float32 [P, SUMS, D], sums for x_bias if SUMS is 3, weight
    and bias.
    """
    column = tl.arange(0, BLOCK)
    is_column = column < hidden
    gain = load_vector(weight, column, hidden)
    sum_weight = tl.zeros([BLOCK], tl.float32)
    sum_bias = tl.zeros([BLOCK], tl.float32)
    sum_x_bias = tl.zeros([BLOCK], tl.float32)
    start = tl.program_id(0) * ROWS
    # Every program sums its tiles in order, so the results are the same in every run.
    while start < tokens:
        token = start + tl.arange(0, ROWS)
        inside = (token < tokens)[:, None] & is_column[None, :]
        place = token[:, None].to(tl.int64) * hidden + column[None, :]
        d = load_gradient(d_out, d_twin, token, column, tokens, hidden)
        if threshold > 0:
            # Recompute the mask: the forward pass did not store it.
            kept = kept_elements(rows, key, token, tokens, threshold, BLOCK)
            if DROP_OUTPUT:
                d = tl.where(kept, d * (256.0 / (256 - threshold)), 0.0)
        result, normal = sum_gradient(
            d, gain, total, means, inverses, token, column, tokens, hidden
        )
        tl.store(d_total + place, result.to(d_total.dtype.element_ty), mask=inside)
        sum_weight += tl.sum(d * normal, 0)
        sum_bias += tl.sum(d, 0)
        if d_x is not None:
            result = tl.where(kept, result * (256.0 / (256 - threshold)), 0.0)
            tl.store(d_x + place, result.to(d_x.dtype.element_ty), mask=inside)
        if SUMS == 3:
            sum_x_bias += tl.sum(tl.where(inside, result, 0.0), 0)
        start += tl.num_programs(0) * ROWS
    base = partial + tl.program_id(0) * SUMS * hidden + column
    if SUMS == 3:
        tl.store(base, sum_x_bias, mask=is_column)
        base += hidden
    tl.store(base, sum_weight, mask=is_column)
    tl.store(base + hidden, sum_bias, mask=is_column)
