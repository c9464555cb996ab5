"""Rank programs for `test_exchange`; each function gets the started world."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mlbert.distributed.groups import exchange_group_size
from mlbert.distributed.world import World


def settings(over: str) -> Any:
    return SimpleNamespace(exchange_padding=over)


def sizes(world: World) -> dict[str, int]:
    """Return the size of the group for each value of EXCHANGE_PADDING."""
    return {over: exchange_group_size(settings(over), world) for over in ("off", "group", "all")}


def uneven_nodes(world: World) -> None:
    """Ask for the node's group with a wrong local rank."""
    other = World(world.rank, 0, world.world_size, 2, "variables")
    exchange_group_size(settings("group"), other)
