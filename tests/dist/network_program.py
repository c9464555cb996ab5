"""The network benchmark with fake host names."""

from __future__ import annotations

from dataclasses import asdict, replace

from mlbert.distributed.world import World
from mlbert.programs.bench.network import measure


def measure_as(world: World, hosts: list[str]) -> dict:
    """Return the report with rank i on ``hosts[i]``."""
    return asdict(measure(replace(world, host=hosts[world.rank]), [1]))
