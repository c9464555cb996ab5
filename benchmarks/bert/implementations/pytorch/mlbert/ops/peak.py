"""The matrix-product rate that this process reaches, measured: the yardstick for model FLOP/s."""

from __future__ import annotations

import time

import torch

SIZES = {"cpu": 1024, "cuda": 8192}
REPEATS = 7


def gemm_peak_flops(dtype: torch.dtype, device: torch.device | str = "cpu") -> float:
    """Best FLOP/s of a square matrix product of `SIZES`, with the current number of threads; a multiply-add as 2."""
    size = SIZES[torch.device(device).type]
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    best = float("inf")
    for _ in range(REPEATS):
        if a.is_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        torch.mm(a, b)
        if a.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
