"""The matrix-product rate that this process reaches, measured: the yardstick for model FLOP/s."""

from __future__ import annotations

import time

import torch

SIZE = 1024
REPEATS = 7


def gemm_peak_flops(dtype: torch.dtype, device: str = "cpu") -> float:
    """Best FLOP/s of a square [1024, 1024] matrix product with the current number of threads, a multiply-add as 2."""
    a = torch.randn(SIZE, SIZE, device=device).to(dtype)
    b = torch.randn(SIZE, SIZE, device=device).to(dtype)
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        torch.mm(a, b)
        if device != "cpu":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * SIZE**3 / best
