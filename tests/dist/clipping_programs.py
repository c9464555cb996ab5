"""Rank programs for `test_bucket_clipping`."""

from typing import Any

import torch
from torch import nn

from mlbert.distributed.bucket_clipping import BucketClippingReducer
from mlbert.distributed.reduce import cut_buckets
from mlbert.distributed.world import World
from mlbert.optim.flat import FlatParameters
from rank_programs import SAMPLES, VOCABULARY, TinyModel, observe_backward

BUCKET_ELEMENTS = 50


def mean_loss(model: TinyModel, tokens: torch.Tensor, divisor: float) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens, True), (tokens * 3 + 1) % VOCABULARY, reduction="sum") / divisor


def clipped(
    world: World, accumulation: int, max_norm: float, scale: float | None = None, poisoned: bool = False
) -> dict[str, Any]:
    """Return the clipped gradient of a step, and the gradient of this rank's mean loss for each micro-batch."""
    torch.manual_seed(5)
    model = TinyModel()
    flat = FlatParameters(model.named_parameters())
    tokens = torch.randint(VOCABULARY, (SAMPLES,), generator=torch.Generator().manual_seed(9))
    parts = tokens.chunk(world.world_size)[world.rank].chunk(accumulation)
    own = []
    for part in parts:
        flat.zero_grad()
        mean_loss(model, part, len(part)).backward()
        own.append(flat.grad.tolist())
    flat.zero_grad()
    buckets = cut_buckets(flat.offsets, flat.numel, BUCKET_ELEMENTS)
    gradients = (flat.parameters, flat.grad, flat.offsets, world, buckets)
    loss_scale = None if scale is None else torch.tensor(scale)
    reducer = BucketClippingReducer(*gradients, max_norm=max_norm, accumulation=accumulation, loss_scale=loss_scale)
    steps = []
    for poison in (poisoned, False):  # a skipped step must not affect the next one
        flat.zero_grad()
        for index, part in enumerate(parts):
            reducer.prepare(last=index == accumulation - 1)
            loss = mean_loss(model, part, len(part) * accumulation * world.world_size) * (scale or 1.0)
            if poison and index == 0 and world.rank == world.world_size - 1:
                loss = loss * float("inf")
            loss.backward()
        reducer.finish()
        steps.append({"grad": flat.grad.tolist(), "norm": float(reducer.grad_norm)})
    return {"own": own, "steps": steps, "buckets": [(bucket.start, bucket.stop) for bucket in buckets]}


def arrivals(world: World) -> dict[str, Any]:
    """Count the buckets that are clipped and the sums that have started during backward."""
    layers = [nn.Linear(64, 64) for _ in range(4)]
    flat = FlatParameters(nn.Sequential(*layers).named_parameters())
    buckets = cut_buckets(flat.offsets, flat.numel, 64 * 64)
    reducer = BucketClippingReducer(
        flat.parameters, flat.grad, flat.offsets, world, buckets, max_norm=1.0, accumulation=2
    )
    reducer.warm_up()
    assert not flat.grad.any(), "warm-up must not leave gradients"
    return observe_backward(layers, reducer, lambda: (reducer.num_started, len(reducer._chains)))


CASES: dict[str, dict[str, Any]] = {
    "one": {"accumulation": 1, "max_norm": 0.5},
    "two": {"accumulation": 2, "max_norm": 0.5},
    "long limit": {"accumulation": 2, "max_norm": 1e6},
    "scaled": {"accumulation": 2, "max_norm": 0.5, "scale": 1024.0},
    "poisoned": {"accumulation": 2, "max_norm": 0.5, "poisoned": True},
}


def everything(world: World) -> dict[str, Any]:
    return {**{name: clipped(world, **case) for name, case in CASES.items()}, "arrivals": arrivals(world)}
