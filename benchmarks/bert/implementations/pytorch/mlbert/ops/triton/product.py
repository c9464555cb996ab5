"""The FP8 products before GELU and before its derivative,
with GELU and the casts to FP8 in their epilogue, in Triton.

    apart   product -> bfloat16 [T, F] in memory -> bias, GELU,
            two FP8 copies (`mlbert.ops.triton.fp8_copies`)
    here    product, bias, GELU and two FP8 copies in one kernel;
            the backward pass never writes the product

So a layer reads and writes three bfloat16 tensors [T, F] less, 0.6 GB for 48 packs of BERT-large.
Two blocks of 128 x 128, each with at most 128 registers a thread and 96 KiB of shared memory, share
a multiprocessor, so that one computes GELU while the other multiplies. Tiles are read and written
by TMA.

With ``OPS=slopes``, forward writes GELU's derivative in a byte (`mlbert.ops.fp8_casts.SLOPE_SCALE`)
in place of the bfloat16 pre-activation: 0.2 GB less a layer, and no exponential in backward.

The kernel has not run on a GPU, so only ``OPS=fused`` and ``OPS=slopes`` use it.

Legend: T tokens, U tokens rounded up to a multiple of 16, D inner dimension, F columns,
P row blocks.
"""

from __future__ import annotations

# mypy: disallow-untyped-defs=False
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mlbert.ops import forms as registry
from mlbert.ops import fp8_casts
from mlbert.ops.fp8_scaling import Quantized
from mlbert.ops.triton.device import sum_partials
from mlbert.ops.triton.fp8_copies import fp8_bytes, quantized_buffers, raise_amax
from mlbert.ops.triton.gelu import gelu_parts

SLOPE_SCALE = tl.constexpr(fp8_casts.SLOPE_SCALE)
SLOPE_ZERO = tl.constexpr(fp8_casts.SLOPE_ZERO)
# of a block
ROWS = 128
COLUMNS = 128
INNER = 128
OPTIONS = {"num_warps": 8, "num_stages": 3, "maxnreg": 128}


@registry.register("fp8_product_gelu", "fused")
def product_gelu(a, b, inverses, bias, exact, scale, amax, dtype) -> tuple[Tensor, Quantized]:
    """See `mlbert.ops.fp8._product_gelu`. Only the tanh form of GELU is fused."""
    if exact:
        return registry.form("fp8_product_gelu", "triton")(
            a, b, inverses, bias, exact, scale, amax, dtype
        )
    pre = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=a.device)
    return pre, _product(a, b, inverses, pre, bias, scale, amax, dtype, None)


@registry.register("fp8_product_gelu_backward", "fused")
def product_gelu_backward(
    a, b, inverses, fast, pre, bias, exact, scale, amax, dtype, buffer=None
) -> tuple[Quantized, Tensor]:
    """See `mlbert.ops.fp8._product_gelu_backward`.

    Only fast accumulation and the tanh form are fused.
    """
    if exact or not fast:
        apart = registry.form("fp8_product_gelu_backward", "triton")
        return apart(a, b, inverses, fast, pre, bias, exact, scale, amax, dtype, buffer=buffer)
    partial = torch.empty(
        triton.cdiv(a.shape[0], ROWS), b.shape[0], dtype=torch.float32, device=a.device
    )
    copies = _product(a, b, inverses, pre, bias, scale, amax, dtype, partial)
    return copies, sum_partials(partial, buffer)


@registry.register("fp8_product_slope", "slopes")
def product_slope(a, b, inverses, bias, scale, amax, dtype) -> tuple[Tensor, Quantized]:
    """See `mlbert.ops.fp8.plain_product_slope`."""
    slopes = torch.empty(a.shape[0], b.shape[0], dtype=torch.uint8, device=a.device)
    return slopes, _product(a, b, inverses, slopes, bias, scale, amax, dtype, None)


@registry.register("fp8_product_slope_backward", "slopes")
def product_slope_backward(
    a, b, inverses, slopes, scale, amax, dtype, buffer=None
) -> tuple[Quantized, Tensor]:
    """See `mlbert.ops.fp8.plain_product_slope_backward`."""
    partial = torch.empty(
        triton.cdiv(a.shape[0], ROWS), b.shape[0], dtype=torch.float32, device=a.device
    )
    copies = _product(a, b, inverses, slopes, None, scale, amax, dtype, partial)
    return copies, sum_partials(partial, buffer)


def buffers_of_product(a, b, pre, dtype) -> Quantized:
    """Return empty FP8 copies for what follows the product of a [T, D] and b [F, D].

    Asserts that ``pre`` [T, F] fits them.
    """
    columns = pre.shape[1]
    assert all(x.is_contiguous() for x in (a, b, pre)), (
        "contiguous operands and pre-activations expected"
    )
    assert b.shape == (columns, a.shape[1]), f"{tuple(b.shape)} for a product of {tuple(a.shape)}"
    return quantized_buffers(pre, dtype)


def _product(a, b, inverses, pre, bias, scale, amax, dtype, partial) -> Quantized:
    tokens, columns = pre.shape
    copies = buffers_of_product(a, b, pre, dtype)
    if a.numel():
        grid = (triton.cdiv(columns, COLUMNS), triton.cdiv(tokens, ROWS))
        by_rows = [ROWS, COLUMNS]
        product_kernel[grid](
            TensorDescriptor.from_tensor(a, [ROWS, INNER]),
            TensorDescriptor.from_tensor(b, [COLUMNS, INNER]),
            *inverses,
            bias,
            scale,
            amax,
            TensorDescriptor.from_tensor(pre, by_rows),
            TensorDescriptor.from_tensor(copies.rows.view(torch.uint8), by_rows),
            TensorDescriptor.from_tensor(copies.columns.view(torch.uint8), [COLUMNS, ROWS]),
            partial,
            tokens,
            columns,
            a.shape[1],
            dtype == torch.float8_e5m2,
            pre.dtype == torch.uint8,
            ROWS,
            COLUMNS,
            INNER,
            **OPTIONS,
        )
    return copies


@triton.jit(
    do_not_specialize=["tokens"],
    do_not_specialize_on_alignment=["inverse_a", "inverse_b", "scale", "amax"],
)
def product_kernel(
    a, b, inverse_a, inverse_b, bias, scale, amax, pre, out_rows, out_columns, partial, tokens,
    columns, inner: tl.constexpr, E5M2: tl.constexpr, SLOPES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Compute one block of the product and of what follows it. Grid: F / COLUMNS, P.

    Descriptors: a FP8 [T, D], b FP8 [F, D], pre bfloat16 [T, F], or with SLOPES uint8, out_rows
    uint8 [T, F], out_columns uint8 [F, U]. bias: [F], None backward with SLOPES; inverses, scale,
    amax: float32 scalars. Forward, `partial` is None, and pre is written. Backward, pre is read,
    and partial float32 [P, F] gets the sums over the block's tokens.
    """
    # `inner` is a constant: if the loop might not run, ptxas lets no two matrix products overlap.
    first_row = tl.program_id(1) * ROWS
    first_column = tl.program_id(0) * COLUMNS
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, inner, INNER):
        total = tl.dot(a.load([first_row, start]), b.load([first_column, start]).T, total)
    value = total * (tl.load(inverse_a) * tl.load(inverse_b))
    column = first_column + tl.arange(0, COLUMNS)
    if bias is not None:
        shift = tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if partial is None:
        if SLOPES:
            value, slope = gelu_parts(value + shift, False)
            # Rounded: the conversion cuts off.
            coded = slope * SLOPE_SCALE + (SLOPE_ZERO + 0.5)
            pre.store([first_row, first_column], coded.to(tl.uint8))
        else:
            pre.store([first_row, first_column], value.to(tl.bfloat16))
            value = gelu_parts(value + shift, False)[0]
    else:
        kept = pre.load([first_row, first_column]).to(tl.float32)
        if SLOPES:
            value *= (kept - SLOPE_ZERO) * (1.0 / SLOPE_SCALE)
        else:
            value *= gelu_parts(kept + shift, False)[1]
    inside = first_row + tl.arange(0, ROWS) < tokens
    # gelu(0 + bias) is not 0, and the transposed copy is padded with 0.
    value = tl.where(inside[:, None], value, 0.0)
    if partial is not None:
        sums = partial + tl.program_id(1).to(tl.int64) * columns + column
        tl.store(sums, tl.sum(value, 0), mask=column < columns)
    small = fp8_bytes(value * tl.load(scale), E5M2)
    out_rows.store([first_row, first_column], small)
    raise_amax(amax, tl.abs(value))  # at this place, registers do not spill
    out_columns.store([first_column, first_row], tl.trans(small))
