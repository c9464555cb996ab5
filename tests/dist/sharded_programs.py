"""Rank programs for `test_sharded_lamb`; each function gets the started world."""

import math
from functools import partial
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mlbert.distributed.groups import ShardGroups
from mlbert.distributed.reduce import GradientReducer, cut_buckets
from mlbert.distributed.sharding import ShardedReducer, ShardLayout
from mlbert.distributed.world import World
from mlbert.optim.acclip import ACClip
from mlbert.optim.adamw import AdamW, StableAdamW
from mlbert.optim.compiled import CompiledOptimizer
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb
from mlbert.optim.madgrad import Madgrad
from mlbert.optim.sgd import SGD
from rank_programs import TinyModel, loss_sum
from unsharded import unsharded

OTHERS: tuple[type[CompiledOptimizer], ...] = (AdamW, StableAdamW, ACClip, Madgrad, SGD)
# Those whose kernels sum over a tensor's ranks or keep the initial weights; the interpreter takes seconds for each.
WITH_OWN_STATE = (StableAdamW, Madgrad)
NUMBERS = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.01}
SHARD_SHAPES = {"word.weight": (37, 11), "one.weight": (1,), "LayerNorm.weight": (129,), "zero.weight": (33,)}
SHARD_SHAPES |= {"wide.weight": (64, 100), "last.bias": (5,)}


def random_parameters() -> list[tuple[str, nn.Parameter]]:
    """Return parameters of odd sizes, one of them zero, equal on all ranks."""
    generator, found = torch.Generator().manual_seed(3), []
    for name, shape in SHARD_SHAPES.items():
        values = torch.randn(shape, generator=generator) * (0.0 if name.startswith("zero") else 0.02)
        found.append((name, nn.Parameter(values)))
    return found


def gradient_share(update: int, share: int, numel: int) -> Tensor:
    """Return the gradient of one of four shares of a batch; in update 2, one element of one share is infinite."""
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(100 * update + share)) * 0.3
    if update == 2 and share == 3:
        grad[numel // 2] = torch.inf
    return grad


def set_gradient(world: World, flat: FlatParameters, update: int) -> None:
    flat.zero_grad()
    for share in torch.arange(4).chunk(world.world_size)[world.rank].tolist():
        flat.grad += gradient_share(update, share, flat.numel)


def make_layout(world: World, nodes: bool, block_elements: int) -> tuple[FlatParameters, ShardLayout]:
    groups = ShardGroups.inside_nodes(world) if nodes else ShardGroups.all_ranks(world)
    flat = FlatParameters(random_parameters(), ShardLayout.multiple(groups))
    return flat, ShardLayout(flat.padded_data.numel(), groups, block_elements)


def assert_copied(flat: FlatParameters) -> None:
    assert flat.padded_copy is not None
    assert torch.equal(flat.padded_copy, flat.padded_data.bfloat16())


def sharded_lamb(
    world: World,
    folder: str,
    updates: int = 5,
    block_elements: int = 1000,
    clip_before: float | None = None,
    implementation: str = "plain",
    load_from: str | None = None,
    nodes: bool = False,
    gathered: str = "fp32",
    save_as: str | None = None,
    method: type[CompiledOptimizer] = Lamb,
) -> dict[str, Any]:
    """Run LAMB or another optimizer on fixed gradients; optionally save the state after update 3 or load it."""
    flat, layout = make_layout(world, nodes, block_elements)
    reducer = ShardedReducer(flat.parameters, flat.padded_grad, flat.offsets, world, layout, clip_before)
    numbers = {**NUMBERS, "max_grad_norm": None if clip_before else 1.0, "copy_dtype": torch.bfloat16}
    optimizer = method(flat, layout, **numbers, implementation=implementation, gathered=gathered)
    first, norms = 0, []
    if load_from is not None:
        first = 3
        state = load_file(f"{folder}/{load_from}.safetensors")
        flat.data.copy_(state.pop("weights"))
        optimizer.load_state_dict({**state, "num_updates": int(state["num_updates"])})
    for update in range(first, updates):
        set_gradient(world, flat, update)
        reducer.finish()
        norms.append(float(optimizer.step(0.02)))
        assert_copied(flat)
        if update == 2 and save_as:
            state = optimizer.state_dict()
            with optimizer.exact_weights():
                tensors = {k: torch.as_tensor(v) for k, v in state.items()} | {"weights": flat.data.clone()}
            if world.rank == 0:
                save_file(tensors, f"{folder}/{save_as}.safetensors")
            world.barrier()
    trained = flat.data.tolist()
    with optimizer.exact_weights():
        exact = flat.data.tolist()
        assert_copied(flat)
    assert_copied(flat)
    assert flat.data.tolist() == trained, "rounding again must give the same bits"
    return {
        "trained": trained,
        "weights": exact,
        "norms": [norm for norm in norms if math.isfinite(norm)],
        "skipped": [not math.isfinite(norm) for norm in norms],
        "shard": optimizer.weights.shard.numel(),
        "blocks": len(layout.blocks),
    }


def sharded_overlap(world: World, nodes: bool = False) -> dict[str, Any]:
    """Run the sharded reduction during the tiny model's backward, with blocks that cut parameters."""
    torch.manual_seed(5)
    model = TinyModel()
    groups = ShardGroups.inside_nodes(world) if nodes else ShardGroups.all_ranks(world)
    flat = FlatParameters(model.named_parameters(), ShardLayout.multiple(groups))
    layout = ShardLayout(flat.padded_data.numel(), groups, 1)
    reducer = ShardedReducer(flat.parameters, flat.padded_grad, flat.offsets, world, layout, None)
    reducer.warm_up()
    assert not flat.padded_grad.any(), "warm-up must not leave gradients"
    own = torch.zeros(flat.numel)
    for last in (False, True):
        reducer.prepare(last)
        loss_sum(model, torch.arange(4) + world.rank, use_optional=True).backward()
        own = own if last else 2 * flat.grad
    reducer.finish()
    layout.all_gather(flat.padded_grad)
    total = world.all_reduce_sum(own)
    return {"difference": float((flat.grad - total).abs().max()), "overlapped": reducer.num_overlapped}


def sharded_triton(world: World, folder: str) -> dict[str, Any]:
    run = partial(sharded_lamb, world, folder, implementation="triton")
    found = {"first": run(save_as="triton"), "continued": run(load_from="triton"), "bf16": run(gathered="bf16")}
    found["methods"] = {method.name: run(method=method) for method in WITH_OWN_STATE}
    return found | {"read on the host": host_reads(world)}


class HostReads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def host_reads(world: World) -> list[str]:
    """Return the host reads of one Triton update, including clipping and communication."""
    flat, layout = make_layout(world, False, 500)
    reducer = ShardedReducer(flat.parameters, flat.padded_grad, flat.offsets, world, layout, clip_before=1.0)
    optimizer = Lamb(flat, layout, **NUMBERS, max_grad_norm=None, implementation="triton", gathered="bf16")
    set_gradient(world, flat, 0)
    with HostReads() as reads:
        reducer.finish()
        optimizer.launch()
        num_reads = len(reads.found)
        float(flat.data[0])
    assert len(reads.found) == num_reads + 1, "reads must be recorded"
    return reads.found[:num_reads]


def sharded(world: World, folder: str) -> dict[str, Any]:
    run, forms = partial(sharded_lamb, world, folder), ("plain", "native")
    return {
        "plain": run(save_as="saved"),
        "one block": run(block_elements=1 << 20),
        "again": run(),
        "native": run(implementation="native"),
        "methods": {f"{m.name} {form}": run(implementation=form, method=m) for m in OTHERS for form in forms},
        "clipped before": run(clip_before=1.0),
        "clipped before, not sharded": clipped_before(world),
        "continued": run(load_from="alone"),
        "overlap": sharded_overlap(world),
        "rounded": {form: sharded_rounded(world, folder, form) for form in ("bf16", "e5m2")},
        "madgrad rounded": sharded_rounded(world, folder, "bf16", Madgrad),
    }


def sharded_rounded(world: World, folder: str, form: str, method: type[CompiledOptimizer] = Lamb) -> dict[str, Any]:
    """Run with a rounded all-gather, uninterrupted and resumed from a checkpoint."""
    name = form if method is Lamb else f"{method.name}_{form}"
    return {
        "whole": sharded_lamb(world, folder, gathered=form, save_as=name, method=method),
        "continued": sharded_lamb(world, folder, gathered=form, load_from=name, method=method),
    }


def sharded_in_nodes(world: World, folder: str) -> dict[str, Any]:
    return {
        "plain": sharded_lamb(world, folder, nodes=True, save_as="saved"),
        "continued": sharded_lamb(world, folder, nodes=True, load_from="alone"),
        "clipped before": sharded_lamb(world, folder, nodes=True, clip_before=1.0),
        "clipped before, not sharded": clipped_before(world),
        "rounded": {"bf16": {"whole": sharded_lamb(world, folder, nodes=True, gathered="bf16")}},
        "overlap": sharded_overlap(world, nodes=True),
    }


def clipped_before(world: World) -> dict[str, Any]:
    """Run unsharded `Lamb` with gradients clipped before the sum, then a backward pass to count early starts."""
    flat = FlatParameters(random_parameters())
    buckets = cut_buckets(flat.offsets, flat.numel, 500)
    reducer = GradientReducer(flat.parameters, flat.grad, flat.offsets, world, buckets, clip_before=1.0)
    optimizer = unsharded(Lamb, flat, **NUMBERS, max_grad_norm=None, implementation="plain")
    norms = []
    for update in range(5):
        set_gradient(world, flat, update)
        reducer.finish()
        norms.append(float(optimizer.step(0.02)))
    reducer.prepare(last=True)
    sum(parameter.sum() for parameter in flat.parameters).backward()
    started = reducer.num_started
    reducer.finish()
    return {
        "weights": flat.data.tolist(),
        "norms": [norm for norm in norms if math.isfinite(norm)],
        "skipped": [not math.isfinite(norm) for norm in norms],
        "started_in_backward": started,
    }
