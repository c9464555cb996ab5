"""Ranks on gloo: small collectives, groups, the network benchmark, and lost ranks."""

import os
import re
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness import run_ranks
from mlbert.distributed.groups import ShardGroups, exchange_group_size
from mlbert.distributed.reduce import GradientReducer, cut_buckets
from mlbert.distributed.world import World
from mlbert.host.errors import UserError
from mlbert.optim.flat import FlatParameters
from mlbert.programs.bench.network import measure


def small_programs(world: World) -> dict[str, Any]:
    """Rank 0 has no rows to gather, rank 1 has one, and so on."""
    world.barrier()
    summed = world.all_reduce_sum(torch.tensor([world.rank + 1, 10], dtype=torch.int64))
    own = torch.arange(2 * world.rank, dtype=torch.float64).view(-1, 2) + 10 * world.rank
    gathered = world.gather_rows(own)
    exchanges = ("off", "group", "all")
    return {
        "sum": summed.tolist(),
        "seed": world.broadcast_int(2**61 + 7 if world.rank == 0 else -1),
        "rows": gathered.tolist(),
        "dtype": str(gathered.dtype),
        "exchange groups": {e: exchange_group_size(e, world) for e in exchanges},
        "uneven nodes": uneven_nodes(world),
        "network of one host": measure_as(world, ["n1"] * world.world_size)["nodes"],
    }


def uneven_nodes(world: World) -> list[str]:
    """Return the errors of groups inside nodes if rank 1 claims local rank 0,
    as with round-robin placement.
    """
    placed = replace(world, local_rank=0) if world.rank == 1 else world
    with pytest.raises(UserError) as sharding:
        ShardGroups.inside_nodes(placed)
    with pytest.raises(UserError) as exchange:
        exchange_group_size("group", placed)
    return [str(sharding.value), str(exchange.value)]


def measure_as(world: World, hosts: list[str]) -> dict[str, Any]:
    return asdict(measure(replace(world, host=hosts[world.rank]), [1]))


def test_small_programs(tmp_path: Path) -> None:
    """Padding is exchanged by a rank alone, its node or all;
    groups inside nodes need ranks numbered node by node.
    """
    for found in run_ranks(small_programs, 4, tmp_path, node_size=2):
        sharding, exchange = found.pop("uneven nodes")
        assert "numbered node by node" in sharding
        assert "EXCHANGE_PADDING: group needs the same number of ranks on each node" in exchange
        assert "\n" not in sharding + exchange
        assert found == {
            "sum": [1 + 2 + 3 + 4, 4 * 10],
            "seed": 2**61 + 7,
            "dtype": "torch.float64",
            "rows": [
                [10.0, 11.0],
                [20.0, 21.0],
                [22.0, 23.0],
                [30.0, 31.0],
                [32.0, 33.0],
                [34.0, 35.0],
            ],
            "exchange groups": {"off": 1, "group": 2, "all": 4},
            "network of one host": {},
        }


def test_network_benchmark_measures_every_link(tmp_path: Path) -> None:
    """Three hosts, an odd ring."""
    reports = run_ranks(measure_as, 3, tmp_path, hosts=["n1", "n2", "n3"])
    assert reports[0] == reports[1] == reports[2]
    assert list(reports[0]["nodes"]) == ["n1", "n2", "n3"]
    assert all(speed > 0 for speed in reports[0]["nodes"].values())
    assert list(reports[0]["reduce"]) == [str(2**20)]


def lose_a_rank(world: World, how: str) -> None:
    """Rank 1 kills or suspends itself in the middle of a step, or before ranks are connected ("kill
    early"); the others exit with the error from finish().
    """
    parameter = nn.Parameter(torch.ones(1 << 16))
    flat = FlatParameters([("w", parameter)])
    buckets = cut_buckets(flat.offsets, flat.numel, flat.numel)
    reducer = GradientReducer(
        flat.parameters, flat.grad, flat.offsets, world, buckets, clip_before=None
    )
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
        raise SystemExit(
            f"after {time.monotonic() - started:.1f} s: {type(error).__name__}: {error}"
        ) from error


def seconds_to_the_error(output: str) -> float:
    match = re.search(r"after ([\d.]+) s: .*Error", output)
    assert match, output
    return float(match[1])


@pytest.mark.parametrize("how", ["kill", "kill early"])
def test_killed_rank_ends_the_others(tmp_path: Path, how: str) -> None:
    limits = {"collective_timeout_s": 15.0, "time_limit_s": 60.0}
    first, killed, last = run_ranks(lose_a_rank, 3, tmp_path, check=False, how=how, **limits)
    assert [code for code, _ in (first, killed, last)] == [1, -signal.SIGKILL, 1]
    assert max(seconds_to_the_error(output) for _, output in (first, last)) < 20.0


def test_hung_rank_ends_the_others_at_the_timeout(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as failure:
        run_ranks(lose_a_rank, 2, tmp_path, how="stop", collective_timeout_s=3.0, time_limit_s=60.0)
    assert 2.0 < seconds_to_the_error(str(failure.value)) < 50.0
