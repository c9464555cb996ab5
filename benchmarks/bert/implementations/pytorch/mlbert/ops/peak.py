"""Measure the peak rate of matrix products, as a reference for model FLOP/s."""

from __future__ import annotations

import time

import torch

SIZES = {"cpu": 1024, "cuda": 8192}
REPEATS = 7
ENOUGH_SECONDS = 2.0  # stop repeating: a dtype without hardware support is slow


def gemm_peak_flops(dtype: torch.dtype, device: torch.device | str = "cpu") -> float:
    """Return the best FLOP/s of a square matrix product of `SIZES`,
    with the current number of threads.
    """
    size = SIZES[torch.device(device).type]
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    best = float("inf")
    total = 0.0
    for _ in range(REPEATS):
        if a.is_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        torch.mm(a, b)
        if a.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        best = min(best, seconds)
        total += seconds
        if total > ENOUGH_SECONDS:
            break
    return 2 * size**3 / best
