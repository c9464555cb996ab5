"""Cast to FP8 in Triton: one pass quantises a tensor by rows and transposed, and finds its maximum.

FP8 products on Hopper read both operands along their inner dimension, so activations and their
gradients are needed by rows and transposed. The same pass can compute the bias gradient (the sum
over tokens), apply bias and GELU before quantising, or multiply by GELU's derivative. Scales and
maxima stay on the device. Values out of range, including infinity, become the largest number and
NaN stays NaN (PTX ISA, "cvt" with `satfinite`). The transposed copy is zero-padded to a multiple of
16 tokens, as the product over tokens requires.

Each thread has the same columns of four adjacent rows. It rounds four numbers of a row into one
32-bit word, stores the word by rows, and transposes four such words into words of one column each.
So each number is computed once, and only words pass through shared memory. The interpreter cannot
run inline assembly and uses an equivalent without it.

`gelu` and `gelu_backward` compute the same without FP8,
for products without a GELU epilogue (`mlbert.ops.cublaslt`).

Legend: T tokens, U tokens rounded up to a multiple of 16, F columns, P row blocks, G groups of four
rows of a tile, C columns of a tile.
"""

from __future__ import annotations

# mypy: disallow-untyped-defs=False
import math

# mypy: disallow-untyped-defs=False
import torch
import triton
import triton.language as tl
from torch import Tensor

from mlbert.ops import forms as registry
from mlbert.ops.fp8_scaling import Quantised, padded_tokens
from mlbert.ops.triton.device import ACTIVATION_TYPES, sum_partials

FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_ROUND = """{{
.reg .b16 low, high;
cvt.rn.satfinite.{0}.f32 low, $2, $1;
cvt.rn.satfinite.{0}.f32 high, $4, $3;
mov.b32 $0, {{low, high}};
}}"""
ROUND_E4M3 = tl.constexpr(_ROUND.format("e4m3x2"))
ROUND_E5M2 = tl.constexpr(_ROUND.format("e5m2x2"))
# Each digit of prmt's selector picks a byte of its two operands.
# $4 to $7 are rows, $0 to $3 columns.
TURN = tl.constexpr("""{
.reg .b32 a, b, c, d;
prmt.b32 a, $4, $5, 0x5140;
prmt.b32 b, $6, $7, 0x5140;
prmt.b32 c, $4, $5, 0x7362;
prmt.b32 d, $6, $7, 0x7362;
prmt.b32 $0, a, b, 0x5410;
prmt.b32 $1, a, b, 0x7632;
prmt.b32 $2, c, d, 0x5410;
prmt.b32 $3, c, d, 0x7632;
}""")


def quantised_buffers(x: Tensor, dtype: torch.dtype) -> Quantised:
    """Return uninitialised FP8 copies of x [T, F]."""
    assert dtype in FP8_TYPES, f"{dtype} is not an FP8 dtype"
    rows = torch.empty_like(x, dtype=dtype)
    columns = x.new_empty(x.shape[1], padded_tokens(x.shape[0]), dtype=dtype)
    return Quantised(rows, columns)


def fp8_arguments(copies: Quantised) -> tuple[Tensor, Tensor]:
    """Return the copies as kernels write them: bytes by rows, transposed words of four tokens."""
    return copies.rows.view(torch.uint8), copies.columns.view(torch.int32)


@triton.jit
def fp8_bytes(scaled, E5M2: tl.constexpr):
    """Convert float32 to FP8, as uint8."""
    if INTERPRETED:
        largest = 57344.0 if E5M2 else 448.0
        # Comparisons with NaN are false, so it stays NaN.
        scaled = tl.where(scaled > largest, largest, tl.where(scaled < -largest, -largest, scaled))
        return scaled.to(tl.float8e5 if E5M2 else tl.float8e4nv).to(tl.uint8, bitcast=True)
    # Not pure, so that the compiler does not recompute it in the layout of the store.
    code: tl.constexpr = ROUND_E5M2 if E5M2 else ROUND_E4M3
    return tl.inline_asm_elementwise(
        code, "=r,r,r,r,r", [scaled], dtype=tl.uint8, is_pure=False, pack=4
    )


@triton.jit
def column_words(row0, row1, row2, row3):
    """Combine bytes uint8 [G, C] of four rows into int32 [G, C],
    the first row in the lowest byte.
    """
    if INTERPRETED:
        low = row0.to(tl.int32) | (row1.to(tl.int32) << 8)
        return low | (row2.to(tl.int32) << 16) | (row3.to(tl.int32) << 24)
    rows = [row0, row1, row2, row3]
    return tl.inline_asm_elementwise(
        TURN, "=r,=r,=r,=r,r,r,r,r", rows, dtype=tl.int32, is_pure=False, pack=4
    )


@triton.jit
def store_rows(value, scale, row, column, tokens, columns, out_rows, E5M2: tl.constexpr):
    """Write float32 rows [G, C] times `scale` to out_rows uint8 [T, F]; return the bytes."""
    small = fp8_bytes(value * scale, E5M2)
    inside = (row < tokens)[:, None] & (column < columns)[None, :]
    tl.store(out_rows + row[:, None].to(tl.int64) * columns + column[None, :], small, mask=inside)
    return small


@triton.jit
def store_columns(rows, group, column, padded, columns, out_columns):
    """Write the bytes of four ``rows``, 0 past T, transposed to out_columns int32 [F, U / 4];
    `group`: rows / 4 [G].
    """
    words = column_words(rows[0], rows[1], rows[2], rows[3])
    # Also write zeros up to U: products read them.
    inside = (column < columns)[:, None] & (group < padded // 4)[None, :]
    place = column[:, None].to(tl.int64) * (padded // 4) + group[None, :]
    tl.store(out_columns + place, tl.trans(words), mask=inside)


@triton.jit
def largest_magnitude(value0, value1, value2, value3):
    """Return the element-wise largest magnitude of four float32 tiles [G, C]."""
    return tl.maximum(
        tl.maximum(tl.abs(value0), tl.abs(value1)), tl.maximum(tl.abs(value2), tl.abs(value3))
    )


@triton.jit
def raise_amax(amax, magnitude):
    """Raise the scalar to the largest of a float32 tile [G, C] of magnitudes."""
    # A maximum does not depend on the order, so the atomic is deterministic.
    tl.atomic_max(amax, tl.max(tl.max(magnitude, 1), 0), sem="relaxed")


PLAIN = 0
GELU = 1
GELU_BACKWARD = 2
_GELU = tl.constexpr(GELU)
_GELU_BACKWARD = tl.constexpr(GELU_BACKWARD)
# of a tile: 128 bytes of x and of a transposed row
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


@registry.register("fp8_quantise", "triton")
def cast_transpose(x, scale, amax, dtype, out=None) -> Quantised:
    """See `mlbert.ops.fp8.quantise`; ``out``: by default new memory."""
    return _quantise(x, None, None, scale, amax, dtype, PLAIN, False, False, out)[0]


@registry.register("fp8_quantise_sum", "triton")
def cast_transpose_bias(x, scale, amax, dtype) -> tuple[Quantised, Tensor]:
    """Return `cast_transpose` and the sum of x over tokens, float32 [F]:
    the bias gradient if x is a gradient.
    """
    copies, total = _quantise(x, None, None, scale, amax, dtype, PLAIN, False, True)
    return copies, sum_partials(total)


@registry.register("fp8_gelu", "triton")
def gelu_cast_transpose(pre, bias, exact, scale, amax, dtype) -> Quantised:
    """Return gelu(pre + bias) * scale in FP8: `pre` [T, F], `bias` [F]; in the tanh form unless
    `exact`. Other arguments as in `cast_transpose`.
    """
    return _quantise(pre, None, bias, scale, amax, dtype, GELU, exact, False)[0]


@registry.register("fp8_gelu_backward", "triton")
def gelu_backward_cast_transpose(
    d_out, pre, bias, exact, scale, amax, dtype
) -> tuple[Quantised, Tensor]:
    """Return d_out * gelu'(pre + bias), scaled, in FP8, and its unscaled sum over tokens,
    float32 [F].
    """
    copies, total = _quantise(pre, d_out, bias, scale, amax, dtype, GELU_BACKWARD, exact, True)
    return copies, sum_partials(total)


def _quantise(
    x, d_out, bias, scale, amax, dtype, operation, exact, sums, out=None
) -> tuple[Quantised, Tensor]:
    assert x.is_contiguous(), "contiguous activations expected"
    assert x.dtype in ACTIVATION_TYPES, f"expected one of {ACTIVATION_TYPES}, got {x.dtype}"
    assert d_out is None or (d_out.is_contiguous() and d_out.shape == x.shape), (
        "d_out must be contiguous, like x"
    )
    assert bias is None or bias.shape == x.shape[1:], (
        f"bias {tuple(bias.shape)} for {x.shape[1]} columns"
    )
    assert scale.dtype == amax.dtype == torch.float32, "scale and amax are float32"
    copies = out or quantised_buffers(x, dtype)
    tokens, columns = x.shape
    assert copies.rows.shape == x.shape, (
        f"room for {tuple(copies.rows.shape)}, not {tuple(x.shape)}"
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
    """Return rows `row` [G] of the values to quantise, float32 [G, C], 0 outside;
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


# Scales of all layers are in one tensor; do not recompile for their alignment.
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["scale", "amax"])
def cast_kernel(
    x, d_out, bias, scale, amax, out_rows, out_columns, partial, tokens, padded, columns,
    OPERATION: tl.constexpr, EXACT: tl.constexpr, E5M2: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Process one tile: the operation, two quantised copies, and the tile's sum over tokens.

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


# Without FP8. The fast exponential is exact enough for 16-bit results; float32 runs plain.
GELU_WARPS = 8  # 32 numbers of a tile to a thread, so that three blocks share a multiprocessor


@registry.register("gelu", "triton")
def gelu(pre, exact) -> Tensor:
    """See `mlbert.ops.linear.gelu`."""
    if pre.dtype == torch.float32:
        return registry.form("gelu", "plain")(pre, exact)
    return _gelu(pre, None, exact)[0]


@registry.register("gelu_backward", "triton")
def gelu_backward(d_out, pre, exact) -> tuple[Tensor, Tensor]:
    """See `mlbert.ops.linear.gelu_backward`."""
    if pre.dtype == torch.float32:
        return registry.form("gelu_backward", "plain")(d_out, pre, exact)
    assert d_out.is_contiguous(), "contiguous gradients expected"
    assert d_out.shape == pre.shape, f"gradient {tuple(d_out.shape)} of {tuple(pre.shape)}"
    d_pre, partial = _gelu(pre, d_out, exact)
    return d_pre, sum_partials(partial)


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
