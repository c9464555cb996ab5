"""Round numbers of a tile to FP8, and store them by rows and transposed.

Each thread has the same columns of four adjacent rows. It rounds four numbers of a row into one
32-bit word, stores the word by rows, and transposes four such words into words of one column each.
So each number is computed once, and only words pass through shared memory. The interpreter cannot
run inline assembly and uses an equivalent without it.

Values out of range, including infinity, become the largest number and NaN stays NaN (PTX ISA, "cvt"
with `satfinite`).

Legend: T tokens, U tokens rounded up to a multiple of 16, F columns, G groups of four rows of a
tile, C columns of a tile.
"""

from __future__ import annotations

# mypy: disallow-untyped-defs=False
import torch
import triton
import triton.language as tl
from torch import Tensor

from mlbert.ops.fp8_scaling import Quantized, padded_tokens

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


def quantized_buffers(x: Tensor, dtype: torch.dtype) -> Quantized:
    """Return uninitialized FP8 copies of x [T, F]."""
    assert dtype in FP8_TYPES, f"{dtype} is not an FP8 dtype"
    rows = torch.empty_like(x, dtype=dtype)
    columns = x.new_empty(x.shape[1], padded_tokens(x.shape[0]), dtype=dtype)
    return Quantized(rows, columns)


def fp8_arguments(copies: Quantized) -> tuple[Tensor, Tensor]:
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
