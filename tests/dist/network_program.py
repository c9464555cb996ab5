"""The network test under other host names."""

from __future__ import annotations

from dataclasses import asdict, replace

from mlbert.distributed.world import World
from mlbert.programs.bench.network import measure


def measure_as(world: World, hosts: list[str]) -> dict:
    """The report when rank i runs on the i-th of the hosts."""
    return asdict(measure(replace(world, host=hosts[world.rank]), [1]))
