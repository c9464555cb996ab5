"""Rank programs for `test_exchange`; each function gets the started world."""

from __future__ import annotations

import hashlib
import os
import time
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch

from mlbert.data.formats.order import by_length, contiguous
from mlbert.data.loading.batches import HostBatch
from mlbert.data.loading.packed import PackedSource
from mlbert.data.loading.synthetic import SyntheticSource
from mlbert.distributed.groups import exchange_group
from mlbert.distributed.world import World

UNITS, STEPS = 4, 9


def settings(over: str, by: str) -> Any:
    return SimpleNamespace(exchange_padding=over, exchange_by=by)


def digest(batch: HostBatch) -> str:
    """Return a digest of all arrays of a batch, including the dropout rows, and of its sizes."""
    sizes = (batch.num_tokens, batch.num_samples, batch.num_masked, batch.max_seqlen)
    parts = b"|".join(name.encode() + array.tobytes() for name, array in batch.arrays().items())
    return hashlib.sha256(repr(sizes).encode() + parts).hexdigest()


def make(world: World, over: str, by: str, accumulation: int, folder: str | None, each: int) -> Any:
    group = exchange_group(settings(over, by), world)
    common = {"packs_per_step": UNITS, "accumulation": accumulation, "max_sequences_per_pack": each, "seed": 3}
    common |= {"rank": world.rank, "world_size": world.world_size}
    common |= (
        {"partition": contiguous, "gather_over": group} if by == "gather" else {"partition": by_length(group.size)}
    )
    if folder is None:
        return SyntheticSource(vocab_size=300, max_tokens=64, **common)
    source = PackedSource(folder, **common)
    source.open()
    return source


def both_ways(world: World, folder: str) -> dict[str, list[list[str]]]:
    """Return digests of every step's micro-batches by case; the main thread communicates at the same time."""
    found = {}
    data = ((folder, 1), (folder, 3), (None, 2))
    for over, accumulation, (path, each), by in product(("group", "all"), (1, 2), data, ("lengths", "gather")):
        source, steps = make(world, over, by, accumulation, path, each), []
        for _ in range(STEPS):
            steps.append([digest(batch) for batch in source.next_step()])
            world.all_reduce_sum(torch.ones(3))
        source.close()
        world.barrier()
        found[f"{over} {accumulation} {path is None} {each} {by}"] = steps
    return found


def lost_rank(world: World, folder: str) -> dict[str, Any]:
    """End the last rank in step 2."""
    source = make(world, "all", "gather", 1, folder, 1)
    source.next_step()
    if world.rank == world.world_size - 1:
        os._exit(7)
    started = time.monotonic()
    try:
        for _ in range(20):
            source.next_step()
    except RuntimeError as error:
        print(f"after {time.monotonic() - started:.1f} s: {error}", flush=True)
        os._exit(5)
    return {}


def uneven_end(world: World, folder: str) -> dict[str, float]:
    """Close the ranks one after the other, with their threads at different steps; return the time to close."""
    source = make(world, "all", "gather", 1, folder, 1)
    for _ in range(3):
        source.next_step()
    for _ in range(world.rank):
        world.barrier()
    started = time.monotonic()
    source.close()
    seconds = time.monotonic() - started
    for _ in range(world.world_size - world.rank):
        world.barrier()
    return {"seconds": seconds}


def uneven_nodes(world: World) -> None:
    """Create the node's exchange group with a wrong local rank."""
    other = World(world.rank, 0, world.world_size, 2, "variables")
    exchange_group(settings("group", "lengths"), other)
