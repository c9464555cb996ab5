"""A gated GELU in Triton, one pass over memory each way.

PyTorch needs ten passes, most of them in float32. Backward recomputes GELU from the saved input.

Legend: T tokens, F columns of the result.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlbert.ops import forms as registry
from mlbert.ops import reference
from mlbert.ops.triton.device import ACTIVATION_TYPES
from mlbert.ops.triton.gelu import gelu_parts

# Of a tile.
ROWS = 32
COLUMNS = 128
WARPS = 8


@registry.register("gated_gelu", "triton")
def gated_gelu(pre, exact) -> Tensor:
    """See `mlbert.ops.linear.gated_gelu`; float32 runs plain."""
    if pre.dtype == torch.float32:
        return reference.gated_gelu(pre, exact)
    return _GatedGelu.apply(pre.contiguous(), exact)


class _GatedGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, pre, exact):
        assert pre.dtype in ACTIVATION_TYPES, f"expected one of {ACTIVATION_TYPES}, got {pre.dtype}"
        ctx.save_for_backward(pre)
        ctx.exact = exact
        out = pre.new_empty(pre.shape[0], pre.shape[1] // 2)
        _launch(pre, None, out, exact)
        return out

    @staticmethod
    def backward(ctx, d_out):
        (pre,) = ctx.saved_tensors
        d_pre = torch.empty_like(pre)
        _launch(pre, d_out.contiguous(), d_pre, ctx.exact)
        return d_pre, None


def _launch(pre, d_out, out, exact) -> None:
    tokens = pre.shape[0]
    columns = pre.shape[1] // 2
    if pre.numel():
        gated_gelu_kernel[(triton.cdiv(columns, COLUMNS), triton.cdiv(tokens, ROWS))](
            pre,
            d_out,
            out,
            tokens,
            columns,
            EXACT=exact,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=WARPS,
        )


@triton.jit(do_not_specialize=["tokens"])
def gated_gelu_kernel(
    pre, d_out, out, tokens, columns, EXACT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of gelu(a) b, or of the gradients of a and b. Grid: F / COLUMNS, T / ROWS.

    pre: [T, 2 F] = (a, b). Forward: d_out None, out [T, F]. Backward: d_out [T, F], out [T, 2 F].
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < tokens)[:, None] & (column < columns)[None, :]
    wide = row[:, None].to(tl.int64) * (2 * columns) + column[None, :]
    narrow = row[:, None].to(tl.int64) * columns + column[None, :]
    gate = tl.load(pre + wide, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(pre + wide + columns, mask=inside, other=0.0).to(tl.float32)
    activated, slope = gelu_parts(gate, EXACT)
    if d_out is None:
        result = activated * value
        tl.store(out + narrow, result.to(out.dtype.element_ty), mask=inside)
    else:
        gradient = tl.load(d_out + narrow, mask=inside, other=0.0).to(tl.float32)
        d_gate = gradient * value * slope
        d_value = gradient * activated
        tl.store(out + wide, d_gate.to(out.dtype.element_ty), mask=inside)
        tl.store(out + wide + columns, d_value.to(out.dtype.element_ty), mask=inside)
