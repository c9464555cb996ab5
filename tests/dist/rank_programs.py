"""Rank programs for `test_ranks`. Each function gets the started world and returns a JSON-serializable value."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlbert.distributed import world as world_module
from mlbert.distributed.groups import ShardGroups, exchange_group_size
from mlbert.distributed.reduce import GradientReducer, cut_buckets
from mlbert.distributed.sharding import ShardLayout
from mlbert.distributed.world import World
from mlbert.host.errors import UserError
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb
from mlbert.programs.bench.network import measure
from mlbert.runs.progress import TrainState
from mlbert.runs.step_folders import StepFolders
from mlbert.training.checkpoint import CheckpointFolder, Snapshots

SAMPLES, WIDTH = 8, 6
SLOW_SECONDS = 3.0  # of a disk, with collectives that may take 2 s
VOCABULARY = 11


class TinyModel(nn.Module):
    """An embedding tied to the output layer, two dense layers, and an optional layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.optional = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH)
        self.output_bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, tokens: Tensor, use_optional: bool) -> Tensor:
        hidden = torch.tanh(self.first(self.embedding(tokens)))
        if use_optional:
            hidden = hidden + self.optional(hidden)
        hidden = self.LayerNorm(torch.tanh(self.second(hidden)))
        return hidden @ self.embedding.weight.T + self.output_bias


def loss_sum(model: TinyModel, tokens: Tensor, use_optional: bool) -> Tensor:
    logits = model(tokens, use_optional)
    return nn.functional.cross_entropy(logits, (tokens * 3 + 1) % VOCABULARY, reduction="sum") / SAMPLES


def bucket_reducer(flat: FlatParameters, world: World, bucket_elements: int) -> GradientReducer:
    buckets = cut_buckets(flat.offsets, flat.numel, bucket_elements)
    return GradientReducer(flat.parameters, flat.grad, flat.offsets, world, buckets, clip_before=None)


def train(world: World, accumulation: int = 1) -> dict[str, Any]:
    """Train the tiny model with LAMB and a global batch of 8; the optional layer is used in the last update only."""
    torch.manual_seed(5)
    model = TinyModel()
    flat = FlatParameters(model.named_parameters())
    numbers = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.01, "max_grad_norm": 1.0}
    optimizer = Lamb(flat, ShardLayout.whole(flat.numel), **numbers)
    reducer = bucket_reducer(flat, world, 50)
    generator = torch.Generator().manual_seed(9)
    grads, losses, norms = [], [], []
    for update in range(3):
        tokens = torch.randint(VOCABULARY, (SAMPLES,), generator=generator)
        flat.zero_grad()
        loss = torch.zeros(())
        mine = tokens.chunk(world.world_size)[world.rank]
        for index, part in enumerate(mine.chunk(accumulation)):
            reducer.prepare(last=index == accumulation - 1)
            part_loss = loss_sum(model, part, use_optional=update == 2)
            part_loss.backward()
            loss += part_loss.detach()
        reducer.finish()
        grads.append(flat.grad.tolist())
        losses.append(world.all_reduce_sum(loss).item())
        norms.append(float(optimizer.step(0.02)))
    return {"grads": grads, "losses": losses, "norms": norms, "weights": flat.data.tolist()}


def uneven_use(world: World) -> dict[str, Any]:
    """Use a layer on rank 0 only, so that buckets become ready in a different order on each rank."""
    torch.manual_seed(5)
    model = TinyModel()
    flat = FlatParameters(model.named_parameters())
    reducer = bucket_reducer(flat, world, 1)
    own: list[float] = []
    for last in (False, True):
        flat.zero_grad()
        reducer.prepare(last)
        loss_sum(model, torch.arange(4) + world.rank, use_optional=world.rank == 0).backward()
        own = own or flat.grad.tolist()
    reducer.finish()
    return {"own": own, "summed": flat.grad.tolist()}


def one_parameter(world: World, numel: int) -> tuple[nn.Parameter, GradientReducer]:
    parameter = nn.Parameter(torch.ones(numel))
    return parameter, bucket_reducer(FlatParameters([("w", parameter)]), world, numel)


def no_backward(world: World) -> list[float]:
    parameter, reducer = one_parameter(world, 3)
    if world.rank == 0:
        reducer.prepare(last=True)
        (parameter * torch.arange(3.0)).sum().backward()
    reducer.finish()
    return parameter.grad.tolist()


def observe_backward(layers: list[nn.Linear], reducer: Any, observe: Callable[[], Any]) -> dict[str, Any]:
    """Observe the moment when backward reaches the first of four layers, in each of two micro-batches."""
    seen = []
    for last in (False, True):
        reducer.prepare(last)
        x = layers[0](torch.ones(2, 64))
        x.register_hook(lambda grad: seen.append(observe()))
        for layer in layers[1:]:
            x = layer(x)
        x.sum().backward()
    reducer.finish()
    return {"seen": seen, "overlapped": reducer.num_overlapped, "buckets": reducer.num_buckets}


def overlap(world: World) -> dict[str, Any]:
    layers = [nn.Linear(64, 64) for _ in range(4)]
    reducer = bucket_reducer(FlatParameters(nn.Sequential(*layers).named_parameters()), world, 64 * 64)
    return observe_backward(layers, reducer, lambda: reducer.num_started)


def second_backward(world: World) -> str:
    parameter, reducer = one_parameter(world, 3)
    reducer.prepare(last=True)
    parameter.sum().backward()
    with pytest.raises(AssertionError) as caught:
        parameter.sum().backward()
    reducer.finish()
    return str(caught.value)


def numbers(world: World) -> dict[str, Any]:
    world.barrier()
    summed = world.all_reduce_sum(torch.tensor([world.rank + 1, 10], dtype=torch.int64))
    return {"sum": summed.tolist(), "seed": world.broadcast_int(2**61 + 7 if world.rank == 0 else -1)}


def rows(world: World) -> dict[str, Any]:
    own = torch.arange(2 * world.rank, dtype=torch.float64).view(-1, 2) + 10 * world.rank
    gathered = world.gather_rows(own)
    return {"rows": gathered.tolist(), "dtype": str(gathered.dtype)}


def uneven_nodes(world: World) -> list[str]:
    """Return the errors of groups inside nodes if rank 1 claims local rank 0, as with round-robin placement."""
    placed = replace(world, local_rank=0) if world.rank == 1 else world
    with pytest.raises(UserError) as sharding:
        ShardGroups.inside_nodes(placed)
    with pytest.raises(UserError) as exchange:
        exchange_group_size(SimpleNamespace(exchange_padding="group"), placed)
    return [str(sharding.value), str(exchange.value)]


def measure_as(world: World, hosts: list[str]) -> dict[str, Any]:
    return asdict(measure(replace(world, host=hosts[world.rank]), [1]))


def everything(world: World) -> dict[str, Any]:
    """Run all of the above with the ranks started once, since starting takes longer than the programs."""
    exchanges = ("off", "group", "all")
    return {
        "train": {str(n): train(world, n) for n in (1, 2)},
        "uneven_use": uneven_use(world),
        "no_backward": no_backward(world),
        "overlap": overlap(world),
        "second_backward": second_backward(world),
        "numbers": numbers(world),
        "rows": rows(world),
        "exchange groups": {e: exchange_group_size(SimpleNamespace(exchange_padding=e), world) for e in exchanges},
        "uneven nodes": uneven_nodes(world),
        "network of one host": measure_as(world, ["n1"] * world.world_size)["nodes"],
    }


def lose_a_rank(world: World, how: str) -> str:
    """Rank 1 kills or suspends itself in the middle of a step, or before ranks are connected ("kill early"); the others
    exit with the error from finish()."""
    parameter, reducer = one_parameter(world, 1 << 16)
    if how != "kill early":
        world.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
    started = time.monotonic()
    reducer.prepare(last=True)
    parameter.sum().backward()
    try:
        reducer.finish()
    except RuntimeError as error:
        raise SystemExit(f"after {time.monotonic() - started:.1f} s: {type(error).__name__}: {error}") from error
    return "no error"


def wait_for_slow_disks(world: World, folder: str) -> list[int]:
    """Save and load on a disk that is slower than a collective may be; return the steps that were loaded."""

    def slowed(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (time.sleep(SLOW_SECONDS), method(*arguments))[1]

    StepFolders.save, StepFolders.load_newest = slowed(StepFolders.save), slowed(StepFolders.load_newest)
    world_module.ROUND_SECONDS = 0.5
    flat = SimpleNamespace(data=torch.zeros(3), layout=[])
    stateless = {"state_dict": dict, "load_state_dict": lambda state: None}
    optimizer, source = SimpleNamespace(exact_weights=contextlib.nullcontext, **stateless), SimpleNamespace(**stateless)
    model = SimpleNamespace(derived_state=dict, load_derived_state=lambda state: None)
    method = SimpleNamespace(flat=flat, optimizer=optimizer, model=model, source=source, loss_scale=None)
    steps = []
    for saves in (1, 2):
        state = TrainState()
        run = Snapshots(CheckpointFolder(Path(folder), 2, {}), method, state, 1, world)
        if run.load(lambda line: None):
            steps.append(state.step)
        for _ in range(saves):  # the second save waits for the first one
            state.step += 1
            run.save({})
        run.wait()
        run.close()
    return steps


def load_checkpoint(world: World, folders: list[str]) -> dict[str, Any]:
    """Load the newest checkpoint of this rank's folder; return its step and the bytes that this process read."""
    before = int(Path("/proc/self/io").read_text().split()[1])  # rchar, which leaves out mapped files
    try:
        checkpoint, _ = CheckpointFolder(Path(folders[world.rank]), 9, {}).load_newest(world)
    except UserError as error:
        return {"error": str(error)}
    assert checkpoint is not None
    read = int(Path("/proc/self/io").read_text().split()[1]) - before
    return {"step": int(checkpoint.path.name.removeprefix("step_")), "bytes": read}
