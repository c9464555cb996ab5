"""Device properties for kernels, and the second stage of sums over tokens.

Each program of a kernel writes a partial sum; `sum_partials` adds them in a fixed order.

Legend: P programs, N columns.
"""

from __future__ import annotations

# mypy: disallow-untyped-defs=False
import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlbert.ops.weights import GradientBuffer, kept_sum

ACTIVATION_TYPES = (torch.float32, torch.bfloat16, torch.float16)
# Programs per multiprocessor for kernels that loop over tiles,
# and the number of processors without a GPU.
PROGRAMS_PER_PROCESSOR = 4
CPU_PROCESSORS = 1
BLOCK_ROWS = 64
BLOCK_COLUMNS = 32
# For tensors not on a GPU: interpreted ones, and the "meta" tensors of tools/compile_kernels.py,
# which sets this.
assumed_capability = 90


def capability(device: torch.device) -> int:
    """Return the compute capability times ten: 80 for an A100, 90 for an H100 or H200,
    100 for a B200.
    """
    if device.type != "cuda":
        return assumed_capability
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a device has."""
    if device.type != "cuda":
        return CPU_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def walking_programs(device: torch.device) -> int:
    """Return how many programs fill the device once.

    Constant per device, so that sums are the same in every run.
    """
    return PROGRAMS_PER_PROCESSOR * multiprocessors(device)


def sum_partials(partial: Tensor, buffer: GradientBuffer | None = None) -> Tensor:
    """Return the sum over the first dimension of a contiguous float32 [P, ...],
    bitwise reproducible; in the buffer, if there is one.
    """
    rows = partial.shape[0]
    shape = partial.shape[1:]
    columns = shape.numel()
    if not rows:
        return kept_sum(torch.zeros(shape, dtype=torch.float32, device=partial.device), buffer)
    if buffer is None:
        out = torch.empty(shape, dtype=torch.float32, device=partial.device)
    else:
        out = buffer.out
        assert out.shape == shape, f"buffer for {tuple(out.shape)}, not {tuple(shape)}"
        assert out.is_contiguous(), "contiguous buffer expected"
    if columns:
        grid = (triton.cdiv(columns, BLOCK_COLUMNS),)
        sum_partials_kernel[grid](
            partial,
            out,
            rows,
            columns,
            ADDS=buffer is not None and buffer.adds,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK=BLOCK_COLUMNS,
        )
    return out


@triton.jit(do_not_specialize=["rows"])
def sum_partials_kernel(
    partial, out, rows, columns, ADDS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write, or add, out [N] = partial [P, N] summed over P, float32. Grid: N / BLOCK."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK_ROWS, BLOCK], tl.float32)
    start = 0
    while start < rows:
        row = start + tl.arange(0, BLOCK_ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        total += tl.load(
            partial + row[:, None].to(tl.int64) * columns + column[None, :], mask=inside, other=0.0
        )
        start += BLOCK_ROWS
    result = tl.sum(total, 0)
    if ADDS:
        result += tl.load(out + column, mask=column < columns, other=0.0)
    tl.store(out + column, result, mask=column < columns)
