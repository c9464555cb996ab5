"""Cast to FP8 in Triton: one pass quantizes a tensor by rows and transposed, and finds its maximum.

FP8 products on Hopper read both operands along their inner dimension, so activations and their
gradients are needed by rows and transposed. The same pass can compute the bias gradient (the sum
over tokens), apply bias and GELU before quantising, or multiply by GELU's derivative. Scales and
maxima stay on the device. The transposed copy is zero-padded to a multiple of 16 tokens, as the
product over tokens requires. `mlbert.ops.triton.fp8_copies` rounds and stores.

Legend: T tokens, U tokens rounded up to a multiple of 16, F columns, P row blocks.
"""

from __future__ import annotations

# mypy: disallow-untyped-defs=False
import torch
import triton
import triton.language as tl
from torch import Tensor

from mlbert.ops import forms as registry
from mlbert.ops.fp8_scaling import Quantized, padded_tokens
from mlbert.ops.triton.device import ACTIVATION_TYPES, sum_partials
from mlbert.ops.triton.fp8_copies import (
    fp8_arguments,
    largest_magnitude,
    quantized_buffers,
    raise_amax,
    store_columns,
    store_rows,
)
from mlbert.ops.triton.gelu import COLUMNS, GELU, GELU_BACKWARD, PLAIN, ROWS, operation_on


@registry.register("fp8_quantize", "triton")
def cast_transpose(x, scale, amax, dtype, out=None) -> Quantized:
    """See `mlbert.ops.fp8.quantize`; ``out``: by default new memory."""
    return _quantize(x, None, None, scale, amax, dtype, PLAIN, False, False, out)[0]


@registry.register("fp8_quantize_sum", "triton")
def cast_transpose_bias(x, scale, amax, dtype, buffer=None) -> tuple[Quantized, Tensor]:
    """Return `cast_transpose` and the sum of x over tokens, float32 [F]: the bias gradient if x is
    a gradient, in the `mlbert.ops.weights.GradientBuffer` if there is one.
    """
    copies, total = _quantize(x, None, None, scale, amax, dtype, PLAIN, False, True)
    return copies, sum_partials(total, buffer)


@registry.register("fp8_gelu", "triton")
def gelu_cast_transpose(pre, bias, exact, scale, amax, dtype) -> Quantized:
    """Return gelu(pre + bias) * scale in FP8: `pre` [T, F], `bias` [F]; in the tanh form unless
    `exact`. Other arguments as in `cast_transpose`.
    """
    return _quantize(pre, None, bias, scale, amax, dtype, GELU, exact, False)[0]


@registry.register("fp8_gelu_backward", "triton")
def gelu_backward_cast_transpose(
    d_out, pre, bias, exact, scale, amax, dtype, buffer=None
) -> tuple[Quantized, Tensor]:
    """Return d_out * gelu'(pre + bias), scaled, in FP8, and its unscaled sum over tokens,
    float32 [F], in the buffer if there is one.
    """
    copies, total = _quantize(pre, d_out, bias, scale, amax, dtype, GELU_BACKWARD, exact, True)
    return copies, sum_partials(total, buffer)


def transposed_copy(rows: Tensor) -> Quantized:
    """Return FP8 rows [T, F] and their transposed copy."""
    assert rows.is_contiguous(), "contiguous rows expected"
    tokens, columns = rows.shape
    copies = Quantized(rows, rows.new_empty(columns, padded_tokens(tokens)))
    if rows.numel():
        grid = (triton.cdiv(columns, COLUMNS), triton.cdiv(tokens, ROWS))
        transpose_kernel[grid](
            *fp8_arguments(copies), tokens, padded_tokens(tokens), columns, ROWS, COLUMNS
        )
    return copies


@triton.jit(do_not_specialize=["tokens"])
def transpose_kernel(
    rows, out_columns, tokens, padded, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Transpose one tile of bytes. Grid: F / COLUMNS, T / ROWS.

    rows: uint8 [T, F]; out_columns: int32 [F, U / 4].
    """
    group = tl.program_id(1) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    small = tl.tuple(())
    for number in tl.static_range(4):
        row = group * 4 + number
        inside = (row < tokens)[:, None] & (column < columns)[None, :]
        place = row[:, None].to(tl.int64) * columns + column[None, :]
        small += (tl.load(rows + place, mask=inside, other=0),)
    store_columns(small, group, column, padded, columns, out_columns)


def _quantize(
    x, d_out, bias, scale, amax, dtype, operation, exact, sums, out=None
) -> tuple[Quantized, Tensor]:
    assert x.is_contiguous(), "contiguous activations expected"
    assert x.dtype in ACTIVATION_TYPES, f"expected one of {ACTIVATION_TYPES}, got {x.dtype}"
    assert d_out is None or (d_out.is_contiguous() and d_out.shape == x.shape), (
        "d_out must be contiguous, like x"
    )
    assert bias is None or bias.shape == x.shape[1:], (
        f"bias {tuple(bias.shape)} for {x.shape[1]} columns"
    )
    assert scale.dtype == amax.dtype == torch.float32, "scale and amax are float32"
    copies = out or quantized_buffers(x, dtype)
    tokens, columns = x.shape
    assert copies.rows.shape == x.shape, (
        f"buffer for {tuple(copies.rows.shape)}, not {tuple(x.shape)}"
    )
    blocks = triton.cdiv(tokens, ROWS)
    partial = torch.empty(blocks if sums else 0, columns, dtype=torch.float32, device=x.device)
    if x.numel():
        grid = (triton.cdiv(columns, COLUMNS), blocks)
        cast_kernel[grid](
            x,
            d_out,
            bias,
            scale,
            amax,
            *fp8_arguments(copies),
            partial if sums else None,
            tokens,
            padded_tokens(tokens),
            columns,
            operation,
            exact,
            dtype == torch.float8_e5m2,
            ROWS,
            COLUMNS,
        )
    return copies, partial


# Scales of all layers are in one tensor; do not recompile for their alignment.
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["scale", "amax"])
def cast_kernel(
    x, d_out, bias, scale, amax, out_rows, out_columns, partial, tokens, padded, columns,
    OPERATION: tl.constexpr, EXACT: tl.constexpr, E5M2: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Process one tile: the operation, two quantized copies, and the tile's sum over tokens.

    Grid: F / COLUMNS, P.

    x, d_out: [T, F]; bias: [F]; scale, amax: float32 scalars; out_rows uint8 [T, F], out_columns
    int32 [F, U / 4]; partial: float32 [P, F]. d_out, bias and partial are None if unused by the
    operation.
    """
    group = tl.program_id(1) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    row = group * 4
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    shift = None
    if bias is not None:
        shift = tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    values = tl.tuple(())
    for number in tl.static_range(4):
        values += (
            operation_on(x, d_out, shift, row + number, column, tokens, columns, OPERATION, EXACT),
        )
    raise_amax(amax, largest_magnitude(values[0], values[1], values[2], values[3]))
    if partial is not None:
        total = tl.sum((values[0] + values[1]) + (values[2] + values[3]), 0)
        tl.store(
            partial + tl.program_id(1).to(tl.int64) * columns + column, total, mask=column < columns
        )
    factor = tl.load(scale)
    small = tl.tuple(())
    for number in tl.static_range(4):
        small += (
            store_rows(
                values[number], factor, row + number, column, tokens, columns, out_rows, E5M2
            ),
        )
    store_columns(small, group, column, padded, columns, out_columns)
