"""Sums over tokens in two stages: each program leaves a partial sum, `sum_partials` adds them in a fixed order.

Legend: P programs, N columns.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs a multiprocessor for kernels that walk over their tiles, and the stand-in where there is no GPU.
PROGRAMS_PER_PROCESSOR = 4
CPU_PROCESSORS = 1
BLOCK_ROWS, BLOCK_COLUMNS = 64, 32


@functools.cache
def walking_programs(device: torch.device) -> int:
    """How many programs fill the device once; a constant of the device, so that sums do not change between runs."""
    if device.type != "cuda":
        return PROGRAMS_PER_PROCESSOR * CPU_PROCESSORS
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def sum_partials(partial: Tensor) -> Tensor:
    """Sum over the first dimension of a contiguous float32 [P, ...], the same bits each time."""
    rows, columns = partial.shape[0], partial[0].numel() if partial.shape[0] else 0
    out = torch.zeros(partial.shape[1:], dtype=torch.float32, device=partial.device)
    if rows and columns:
        grid = (triton.cdiv(columns, BLOCK_COLUMNS),)
        sum_partials_kernel[grid](partial, out, rows, columns, BLOCK_ROWS=BLOCK_ROWS, BLOCK=BLOCK_COLUMNS)
    return out


@triton.jit(do_not_specialize=["rows"])
def sum_partials_kernel(partial, out, rows, columns, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out [N] = partial [P, N] summed over P, float32. Grid: N / BLOCK."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK_ROWS, BLOCK], tl.float32)
    start = 0
    while start < rows:
        row = start + tl.arange(0, BLOCK_ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        total += tl.load(partial + row[:, None].to(tl.int64) * columns + column[None, :], mask=inside, other=0.0)
        start += BLOCK_ROWS
    tl.store(out + column, tl.sum(total, 0), mask=column < columns)
