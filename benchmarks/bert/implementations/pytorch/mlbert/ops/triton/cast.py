"""Casts to FP8 as Triton kernels: one pass reads a tensor, quantises it by rows and transposed, and finds its maximum.

FP8 products on Hopper read both operands along their inner dimension, so an activation is needed by rows (forward)
and transposed (weight gradient), and so is its gradient. The same pass can take the bias gradient (the sum over
tokens), apply bias and GELU to what it quantises, or multiply by GELU's derivative. Scales and maxima stay on the
device. Values beyond the type's range become its largest; NaN stays NaN. The transposed copy ends in zeros up to a
multiple of 16 tokens, which the product over tokens asks for: nothing has to be padded later.

Legend: T tokens, U tokens rounded up to a multiple of 16, F columns, P row blocks.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlbert.ops import registry
from mlbert.ops.fp8_scaling import Quantised, padded_tokens
from mlbert.ops.triton.device import ACTIVATION_TYPES
from mlbert.ops.triton.sums import sum_partials

FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
PLAIN, GELU, GELU_BACKWARD = 0, 1, 2
_GELU, _GELU_BACKWARD = tl.constexpr(GELU), tl.constexpr(GELU_BACKWARD)
BLOCK = 64  # tile side: rows of 64 bytes each way
# tanh(z) = 2 sigmoid(2 z) - 1, so the tanh form of GELU is y sigmoid(GELU_SLOPE (y + GELU_CUBE y^3)).
GELU_SLOPE = tl.constexpr(2 * (2 / torch.pi) ** 0.5)
GELU_CUBE = tl.constexpr(0.044715)
SQRT_HALF, INVERSE_SQRT_2_PI = tl.constexpr(0.5**0.5), tl.constexpr((2 * torch.pi) ** -0.5)


def quantised_buffers(x: Tensor, dtype: torch.dtype) -> Quantised:
    """Uninitialised FP8 copies of x [T, F]."""
    assert dtype in FP8_TYPES, f"{dtype} is no FP8 type"
    rows, columns = torch.empty_like(x, dtype=dtype), x.new_empty(x.shape[1], padded_tokens(x.shape[0]), dtype=dtype)
    return Quantised(rows, columns)


@registry.register("fp8_quantise", "triton")
def cast_transpose(x, scale, amax, dtype, out=None) -> Quantised:
    """See `mlbert.ops.fp8.quantise`; ``out``: where to write, None: new memory."""
    return _quantise(x, None, None, scale, amax, dtype, PLAIN, False, False, out)[0]


@registry.register("fp8_quantise_sum", "triton")
def cast_transpose_bias(x, scale, amax, dtype) -> tuple[Quantised, Tensor]:
    """`cast_transpose` and the sum of x over tokens, float32 [F]: the bias gradient where x is an output's gradient."""
    copies, total = _quantise(x, None, None, scale, amax, dtype, PLAIN, False, True)
    return copies, sum_partials(total)


@registry.register("fp8_gelu", "triton")
def gelu_cast_transpose(pre, bias, exact, scale, amax, dtype) -> Quantised:
    """gelu(pre + bias) * scale in FP8: `pre` [T, F], `bias` [F]; the tanh form unless `exact`; the rest as in
    `cast_transpose`."""
    return _quantise(pre, None, bias, scale, amax, dtype, GELU, exact, False)[0]


@registry.register("fp8_gelu_backward", "triton")
def gelu_backward_cast_transpose(d_out, pre, bias, exact, scale, amax, dtype) -> tuple[Quantised, Tensor]:
    """d_out * gelu'(pre + bias), scaled in FP8, and its sum over tokens, float32 [F]."""
    copies, total = _quantise(pre, d_out, bias, scale, amax, dtype, GELU_BACKWARD, exact, True)
    return copies, sum_partials(total)


def _quantise(x, d_out, bias, scale, amax, dtype, operation, exact, sums, out=None) -> tuple[Quantised, Tensor]:
    assert x.is_contiguous(), "contiguous activations expected"
    assert x.dtype in ACTIVATION_TYPES, f"expected one of {ACTIVATION_TYPES}, got {x.dtype}"
    assert d_out is None or (d_out.is_contiguous() and d_out.shape == x.shape), "a gradient like its output expected"
    assert bias is None or bias.shape == x.shape[1:], f"bias {tuple(bias.shape)} for {x.shape[1]} columns"
    assert scale.dtype == amax.dtype == torch.float32, "scale and amax are float32"
    copies = out or quantised_buffers(x, dtype)
    tokens, columns = x.shape
    assert copies.rows.shape == x.shape, f"room for {tuple(copies.rows.shape)}, not {tuple(x.shape)}"
    blocks = triton.cdiv(tokens, BLOCK)
    partial = torch.empty(blocks if sums else 0, columns, dtype=torch.float32, device=x.device)
    if x.numel():
        grid = (triton.cdiv(columns, BLOCK), blocks)
        cast_kernel[grid](
            *(x, d_out, bias, scale, amax, *copies, partial if sums else None),
            *(tokens, padded_tokens(tokens), columns, operation, exact, BLOCK),
        )
    return copies, partial


@triton.jit
def gelu_parts(y, EXACT: tl.constexpr):
    """GELU and its derivative at float32 y, the tanh form or the erf form."""
    if EXACT:
        below = 0.5 * (1.0 + tl.erf(y * SQRT_HALF))
        slope = below + y * INVERSE_SQRT_2_PI * tl.exp(-0.5 * y * y)
        return y * below, slope
    gate = tl.sigmoid(GELU_SLOPE * (y + GELU_CUBE * y * y * y))
    slope = gate + y * gate * (1.0 - gate) * GELU_SLOPE * (1.0 + 3.0 * GELU_CUBE * y * y)
    return y * gate, slope


@triton.jit
def store_quantised(value, row, column, tokens, padded, columns, out_rows, out_columns, scale, amax):
    """Writes a float32 tile, 0 where outside, as FP8 to out_rows [T, F] and out_columns [F, U]; raises amax."""
    inside = (row < tokens)[:, None] & (column < columns)[None, :]
    # A maximum does not depend on the order, so the atomic is deterministic.
    tl.atomic_max(amax, tl.max(tl.max(tl.abs(value), 1), 0), sem="relaxed")
    largest = 448.0 if out_rows.dtype.element_ty == tl.float8e4nv else 57344.0
    scaled = value * scale
    # Comparisons are false for NaN, which passes.
    scaled = tl.where(scaled > largest, largest, tl.where(scaled < -largest, -largest, scaled))
    small = scaled.to(out_rows.dtype.element_ty)
    wide_row, wide_column = row.to(tl.int64), column.to(tl.int64)
    tl.store(out_rows + wide_row[:, None] * columns + column[None, :], small, mask=inside)
    # Columns up to U are written as well: products read them, as zeros.
    transposed_inside = (column < columns)[:, None] & (row < padded)[None, :]
    tl.store(out_columns + wide_column[:, None] * padded + row[None, :], tl.trans(small), mask=transposed_inside)


# Scales of all layers lie in one tensor: their alignment is no reason to compile again.
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["scale", "amax"])
def cast_kernel(
    x, d_out, bias, scale, amax, out_rows, out_columns, partial, tokens, padded, columns, OPERATION: tl.constexpr,
    EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile: the operation, the two quantised copies, the tile's sum over tokens. Grid: F / BLOCK, P.

    x, d_out: [T, F]; bias: [F]; scale, amax: float32 scalars; out_rows [T, F], out_columns [F, U]: FP8;
    partial: float32 [P, F]. d_out, bias and partial are None where the operation has none.
    """
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < tokens)[:, None] & (column < columns)[None, :]
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if OPERATION == _GELU:
        value = gelu_parts(value, EXACT)[0]
    if OPERATION == _GELU_BACKWARD:
        value = gelu_parts(value, EXACT)[1] * tl.load(d_out + place, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        # gelu(0 + bias) is not 0: outside it would count in amax and in the sums.
        value = tl.where(inside, value, 0.0)
    store_quantised(value, row, column, tokens, padded, columns, out_rows, out_columns, tl.load(scale), amax)
    if partial is not None:
        total = tl.sum(value, 0)
        tl.store(partial + tl.program_id(1).to(tl.int64) * columns + column, total, mask=column < columns)
