"""The collectives of training in a group of one rank, called and replayed from a graph: one GPU is enough for NCCL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpu_check.hardware import median_seconds, synchronize
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
    """Be a group of one rank meanwhile, over NCCL on a GPU."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def rows(device: torch.device, numel: int, seconds: float) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield (name, check) of each collective in each type, called and replayed. The group must exist."""
    for name, collective in COLLECTIVES.items():
        for dtype in DTYPES:
            row = partial(check, collective, torch.zeros(numel, dtype=dtype, device=device), seconds)
            yield f"{name} {str(dtype).removeprefix('torch.')}", row


def check(collective: Collective, out: Tensor, seconds: float) -> dict[str, Any]:
    """Return whether the output is the input, called and replayed on new numbers, and how long a replay takes."""
    device, x = out.device, torch.randn(out.shape, device=out.device).to(out.dtype)
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
    return {"passed": is_right and torch.equal(out, x), "called": is_right, "replay_ms": 1e3 * taken}
