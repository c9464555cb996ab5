"""A residual sum with dropout in Triton, one pass over memory each way.

The plain mask takes some fifty launches and 64-bit integers. Backward computes the mask again.

Legend: T tokens, D columns.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlbert.ops import forms as registry
from mlbert.ops.dropout import dropout_threshold
from mlbert.ops.native_library import check_rows
from mlbert.ops.triton.device import ACTIVATION_TYPES
from mlbert.ops.triton.mask import keep, key_argument, load_key, row_hash

# Of a tile.
ROWS = 32
COLUMNS = 128
WARPS = 4


@registry.register("add_dropout", "triton")
def add_dropout(residual, x, dropout_p, key, rows) -> Tensor:
    """See `mlbert.ops.norm.add_dropout`."""
    threshold = dropout_threshold(dropout_p)
    if threshold == 0:
        return residual + x
    return _AddDropout.apply(residual.contiguous(), x.contiguous(), threshold, key, rows)


class _AddDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual, x, threshold, key, rows):
        assert x.dtype in ACTIVATION_TYPES, f"expected one of {ACTIVATION_TYPES}, got {x.dtype}"
        check_rows(rows, x.shape[0], threshold)
        key_on_device = key if isinstance(key, Tensor) else None
        ctx.save_for_backward(rows, key_on_device)
        ctx.key = None if isinstance(key, Tensor) else key
        ctx.threshold = threshold
        out = torch.empty_like(x)
        _launch(residual, x, out, threshold, key, rows)
        return out

    @staticmethod
    def backward(ctx, d_out):
        rows, key_on_device = ctx.saved_tensors
        key = ctx.key if key_on_device is None else key_on_device
        d_out = d_out.contiguous()
        d_x = torch.empty_like(d_out)
        _launch(None, d_out, d_x, ctx.threshold, key, rows)
        return d_out, d_x, None, None, None


def _launch(residual, x, out, threshold, key, rows) -> None:
    tokens, columns = x.shape
    if x.numel():
        add_dropout_kernel[(triton.cdiv(columns, COLUMNS), triton.cdiv(tokens, ROWS))](
            residual,
            x,
            out,
            rows,
            key_argument(key),
            tokens,
            columns,
            SCALE=256.0 / (256 - threshold),
            THRESHOLD=threshold,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=WARPS,
        )


@triton.jit(do_not_specialize=["tokens", "key"])
def add_dropout_kernel(
    residual, x, out, rows, key, tokens, columns, SCALE: tl.constexpr, THRESHOLD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of residual + dropout(x), or of dropout(x). Grid: D / COLUMNS, T / ROWS.

    residual, x, out: [T, D]; rows: int32 [T]. residual is None for dropout alone.
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(0) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    inside = (row < tokens)[:, None] & (column < columns)[None, :]
    mask_rows = tl.load(rows + row, mask=row < tokens, other=0)
    kept = keep(row_hash(load_key(key), mask_rows), first, COLUMNS, THRESHOLD)
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * SCALE
    value = tl.where(kept, value, 0.0)
    if residual is not None:
        value += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
