"""The matrix-product rate that this process reaches, measured: the yardstick for model FLOP/s."""

from __future__ import annotations

import time

import torch

SIZES = {"cpu": 1024, "cuda": 8192}
REPEATS = 7
ENOUGH_SECONDS = 2.0  # of repeats: a type that the processor has no instructions for is slow in each of them


def gemm_peak_flops(dtype: torch.dtype, device: torch.device | str = "cpu") -> float:
    """Best FLOP/s of a square matrix product of `SIZES`, with the current number of threads; a multiply-add as 2."""
    size = SIZES[torch.device(device).type]
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    best, total = float("inf"), 0.0
    for _ in range(REPEATS):
        if a.is_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        torch.mm(a, b)
        if a.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        best, total = min(best, seconds), total + seconds
        if total > ENOUGH_SECONDS:
            break
    return 2 * size**3 / best
