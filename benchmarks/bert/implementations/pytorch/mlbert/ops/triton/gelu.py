"""GELU and its derivative in Triton, on tiles and as ops without FP8.

The ops are for products without a GELU epilogue (`mlbert.ops.cublaslt`). Their fast exponential is
exact enough for 16-bit results; float32 runs plain.

Legend: T tokens, F columns, P row blocks, G groups of four rows of a tile, C columns of a tile.
"""

from __future__ import annotations

# mypy: disallow-untyped-defs=False
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlbert.ops import forms as registry
from mlbert.ops.triton.device import ACTIVATION_TYPES, sum_partials
from mlbert.ops.triton.fp8_copies import INTERPRETED

PLAIN = 0
GELU = 1
GELU_BACKWARD = 2
_GELU = tl.constexpr(GELU)
_GELU_BACKWARD = tl.constexpr(GELU_BACKWARD)
# Of a tile: 128 bytes of x and of a transposed row.
ROWS = 128
COLUMNS = 64
# tanh(z) = 2 sigmoid(2 z) - 1, so the tanh form of GELU is y sigmoid(GELU_SLOPE (y + GELU_CUBE
# y^3)).
GELU_SLOPE = tl.constexpr(2 * (2 / torch.pi) ** 0.5)
GELU_CUBE = tl.constexpr(0.044715)
SQRT_HALF = tl.constexpr(0.5**0.5)
INVERSE_SQRT_2_PI = tl.constexpr((2 * torch.pi) ** -0.5)
LOG2_E = tl.constexpr(math.log2(math.e))
SIGMOID = tl.constexpr(
    "{ ex2.approx.ftz.f32 $0, $1; add.f32 $0, $0, 0f3F800000; rcp.approx.ftz.f32 $0, $0; }"
)
GELU_WARPS = 8  # 32 numbers of a tile to a thread, so that three blocks share a multiprocessor


@triton.jit
def sigmoid(z):
    """Return 1 / (1 + exp(-z)) of float32.

    `tanh.approx` is one instruction, but has a relative error of 2^-11: 1 + tanh cancels for
    negative z, and the error of GELU's tail would exceed FP8 rounding. `ex2.approx` and
    `rcp.approx` have an error of 2^-22 (PTX ISA).
    """
    if INTERPRETED:
        return tl.sigmoid(z)
    return tl.inline_asm_elementwise(
        SIGMOID, "=&r,r", [z * -LOG2_E], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def gelu_parts(y, EXACT: tl.constexpr):
    """Return GELU and its derivative at float32 y, in the erf form if EXACT, else the tanh form."""
    if EXACT:
        below = 0.5 * (1.0 + tl.erf(y * SQRT_HALF))
        slope = below + y * INVERSE_SQRT_2_PI * tl.exp(-0.5 * y * y)
        return y * below, slope
    square = y * y
    gate = sigmoid(y * (GELU_SLOPE + GELU_SLOPE * GELU_CUBE * square))
    inner_slope = GELU_SLOPE + 3.0 * GELU_SLOPE * GELU_CUBE * square
    return y * gate, gate + y * inner_slope * (gate - gate * gate)


@triton.jit
def operation_on(
    x, d_out, shift, row, column, tokens, columns, OPERATION: tl.constexpr, EXACT: tl.constexpr
):
    """Return rows `row` [G] of the values to quantize, float32 [G, C], 0 outside;
    `shift`: bias float32 [C] or None.
    """
    inside = (row < tokens)[:, None] & (column < columns)[None, :]
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if shift is not None:
        value += shift[None, :]
    if OPERATION == _GELU:
        # gelu(0 + bias) is not 0 and would count in amax for rows outside.
        value = tl.where((row < tokens)[:, None], gelu_parts(value, EXACT)[0], 0.0)
    if OPERATION == _GELU_BACKWARD:
        value = gelu_parts(value, EXACT)[1] * tl.load(d_out + place, mask=inside, other=0.0).to(
            tl.float32
        )
    return value


@registry.register("gelu", "triton")
def gelu(pre, exact) -> Tensor:
    """See `mlbert.ops.linear.gelu`."""
    if pre.dtype == torch.float32:
        return registry.form("gelu", "plain")(pre, exact)
    return _gelu(pre, None, exact)[0]


@registry.register("gelu_backward", "triton")
def gelu_backward(d_out, pre, exact, buffer=None) -> tuple[Tensor, Tensor]:
    """See `mlbert.ops.linear.gelu_backward`."""
    if pre.dtype == torch.float32:
        return registry.form("gelu_backward", "plain")(d_out, pre, exact, buffer)
    assert d_out.is_contiguous(), "contiguous gradients expected"
    assert d_out.shape == pre.shape, f"gradient {tuple(d_out.shape)} of {tuple(pre.shape)}"
    d_pre, partial = _gelu(pre, d_out, exact)
    return d_pre, sum_partials(partial, buffer)


def _gelu(pre, d_out, exact) -> tuple[Tensor, Tensor]:
    """Return the activation, or the gradient if `d_out` is not None,
    and the gradient's sums over blocks of tokens.
    """
    assert pre.is_contiguous(), "contiguous activations expected"
    assert pre.dtype in ACTIVATION_TYPES, f"expected one of {ACTIVATION_TYPES}, got {pre.dtype}"
    tokens, columns = pre.shape
    blocks = triton.cdiv(tokens, ROWS)
    out = torch.empty_like(pre)
    partial = torch.empty(
        0 if d_out is None else blocks, columns, dtype=torch.float32, device=pre.device
    )
    if pre.numel():
        gelu_kernel[(triton.cdiv(columns, COLUMNS), blocks)](
            pre,
            d_out,
            out,
            None if d_out is None else partial,
            tokens,
            columns,
            GELU if d_out is None else GELU_BACKWARD,
            exact,
            ROWS,
            COLUMNS,
            num_warps=GELU_WARPS,
        )
    return out, partial


@triton.jit(do_not_specialize=["tokens"])
def gelu_kernel(
    pre, d_out, out, partial, tokens, columns, OPERATION: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of gelu(pre), or of d_out gelu'(pre) and its sum over tokens.

    Grid: F / COLUMNS, P.

    pre, d_out, out: [T, F]; partial: float32 [P, F];
    d_out and partial are None if the operation is GELU.
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    value = operation_on(pre, d_out, None, row, column, tokens, columns, OPERATION, EXACT)
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    inside = (row < tokens)[:, None] & (column < columns)[None, :]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
    if partial is not None:
        total = tl.sum(value, 0)
        tl.store(
            partial + tl.program_id(1).to(tl.int64) * columns + column, total, mask=column < columns
        )
