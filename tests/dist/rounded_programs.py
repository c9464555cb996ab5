"""Rank programs for `test_rounded_sums`."""

from typing import Any

import torch
from torch import Tensor, nn

from mlbert.distributed.bucket_clipping import BucketClippingReducer
from mlbert.distributed.groups import ShardGroups
from mlbert.distributed.reduce import GradientReducer, cut_buckets
from mlbert.distributed.sharding import ShardedReducer, ShardLayout
from mlbert.distributed.world import World
from mlbert.optim.flat import FlatParameters

SHAPES = ((37, 11), (5,), (64, 64), (1,), (129,))  # no bucket size is divisible by the number of ranks
LIMIT = 0.5


def parameters() -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(SHAPES)]


def gradients(world: World, scale: float) -> list[Tensor]:
    """Return the gradients of every rank; their sizes span ten orders of magnitude."""
    numel = sum(torch.Size(shape).numel() for shape in SHAPES)
    found = []
    for rank in range(world.world_size):
        generator = torch.Generator().manual_seed(rank)
        sizes = 10 ** (10 * torch.rand(numel, generator=generator) - 8)
        found.append(torch.randn(numel, generator=generator) * sizes * scale)
    return found


def make(world: World, way: str, in_bf16: bool, loss_scale: Tensor | None) -> tuple[FlatParameters, Any, Any]:
    limit = LIMIT if way == "before" else None
    if way in ("all", "node"):
        groups = ShardGroups.inside_nodes(world) if way == "node" else ShardGroups.all_ranks(world)
        flat = FlatParameters(parameters(), ShardLayout.multiple(groups))
        layout = ShardLayout(flat.padded_data.numel(), groups, 500)
        common = (flat.parameters, flat.padded_grad, flat.offsets, world)
        return flat, ShardedReducer(*common, layout, limit, loss_scale, in_bf16), layout
    flat = FlatParameters(parameters())
    common = (flat.parameters, flat.grad, flat.offsets, world, cut_buckets(flat.offsets, flat.numel, 300))
    if way == "buckets":
        return flat, BucketClippingReducer(*common, max_norm=LIMIT, loss_scale=loss_scale, in_bf16=in_bf16), None
    return flat, GradientReducer(*common, limit, loss_scale, in_bf16), None


def summed(world: World, way: str, in_bf16: bool, bad: float = 1.0, scale: float = 1.0) -> dict[str, Any]:
    """Sum the same gradients twice through a backward pass; return the full sum on every rank."""
    loss_scale = None if scale == 1.0 else torch.tensor(scale)
    flat, reducer, layout = make(world, way, in_bf16, loss_scale)
    reducer.warm_up()
    own = gradients(world, scale)[world.rank].clone()
    if world.rank == world.world_size - 1:
        own[100] *= bad
    results = []
    for _ in range(2):
        flat.zero_grad()
        reducer.prepare(last=True)
        parts = own.split([p.numel() for p in flat.parameters])
        sum((p.flatten() * part).sum() for p, part in zip(flat.parameters, parts, strict=True)).backward()
        reducer.finish()
        if layout is not None:
            layout.all_gather(flat.padded_grad)
        results.append(flat.grad.tolist())
    assert str(results[0]) == str(results[1]), "repeated sums must be bit-equal"
    return {"sum": results[0], "overlapped": reducer.num_overlapped, "buckets": reducer.num_buckets}


def everything(world: World) -> dict[str, Any]:
    found = {}
    for way in ("whole", "before", "buckets", "all", "node"):
        for in_bf16 in (False, True):
            form = "bf16" if in_bf16 else "fp32"
            found[f"{way} {form}"] = summed(world, way, in_bf16)
    return found | {
        "scaled": summed(world, "whole", True, scale=1024.0),
        "bad": {way: summed(world, way, True, bad=float("nan")) for way in ("whole", "node")},
    }
