"""Check training's collectives in a group of one rank, which NCCL supports on one GPU,
with and without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpu_check.hardware import median_seconds, synchronize
from gpu_check.rows import Row
from mlbert.distributed.capture import CudaCapture, NoCapture

Collective = Callable[[Tensor, Tensor], Any]  # (output, input)
COLLECTIVES: dict[str, Collective] = {
    "all_reduce": lambda out, x: dist.all_reduce(out.copy_(x)),
    "reduce_scatter_tensor": lambda out, x: dist.reduce_scatter_tensor(out, x),
    "all_gather_into_tensor": lambda out, x: dist.all_gather_into_tensor(out, x),
    "broadcast": lambda out, x: dist.broadcast(out.copy_(x), 0),
}
DTYPES = (torch.float32, torch.bfloat16)


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Create a group of one rank for the block, over NCCL on a GPU and gloo on a CPU."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def rows(device: torch.device, numel: int, seconds: float) -> Iterator[Row]:
    """Yield the check of each collective in each dtype. The group must exist."""
    for name, collective in COLLECTIVES.items():
        for dtype in DTYPES:
            row = partial(
                check, collective, torch.zeros(numel, dtype=dtype, device=device), seconds
            )
            yield f"{name} {str(dtype).removeprefix('torch.')}", row


def check(collective: Collective, out: Tensor, seconds: float) -> dict[str, Any]:
    """Check that the output equals the input, in a call and in a replay on new numbers,
    and time the replay.
    """
    device = out.device
    x = torch.randn(out.shape, device=out.device).to(out.dtype)
    capture = CudaCapture(device) if device.type == "cuda" else NoCapture()

    def function() -> None:
        collective(out, x)

    function()
    synchronize(device)
    is_right = torch.equal(out, x)
    capture.warm_up(function)
    replay = capture.record(function)
    x.neg_()
    replay()
    synchronize(device)
    taken = median_seconds(replay, device, seconds)
    return {
        "passed": is_right and torch.equal(out, x),
        "called": is_right,
        "replay_ms": 1e3 * taken,
    }
