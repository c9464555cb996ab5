"""Groups of ranks: those that shard a buffer among themselves,
and those that hold the same shard of it.

all ranks     each holds 1 / world_size
node          each holds 1 / (ranks of the node), the same shard as its counterparts on the other
              nodes: a node reduces over its fast links first, and only shards are sent between
              nodes

Source of the second scheme: the benchmark's NVIDIA submissions shard their optimizer over the GPUs
of a node (apex's distributed fused LAMB), with an all-reduce of the shards between nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mlbert.distributed.world import World, nccl_options
from mlbert.host.errors import UserError


@dataclass(frozen=True)
class RankGroup:
    """Ranks that communicate with each other, and this rank's index among them."""

    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None  # torch's group; None for all ranks, or this one alone

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum the tensor over the group, in place on each rank, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.handle)
        return tensor

    def begin_all_reduce_sum(self, tensor: Tensor) -> dist.Work | None:
        """Start a sum and return without waiting; `wait()` on the result before use.

        None in a group of one.
        """
        return dist.all_reduce(tensor, group=self.handle, async_op=True) if self.size > 1 else None

    def begin_reduce_scatter_sum(self, buffer: Tensor) -> dist.Work | None:
        """Start an in-place sum over the group of which each rank keeps part `rank` of `size` equal
        parts.

        The other parts of the buffer are undefined afterwards.
        """
        # torch 2.13 added the new name; the old one will be removed.
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return reduce_scatter(
            buffer.chunk(self.size)[self.rank], buffer, group=self.handle, async_op=True
        )

    def begin_all_gather(self, buffer: Tensor) -> dist.Work | None:
        """Start filling the buffer in place with each rank's part,
        divided as in `begin_reduce_scatter_sum`.

        Any dtype works, since raw bytes are sent. None in a group of one.
        """
        if self.size == 1:
            return None
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        data = buffer.view(torch.uint8)
        return all_gather(data, data.chunk(self.size)[self.rank], group=self.handle, async_op=True)

    def begin_all_to_all(self, received: Tensor, sent: Tensor) -> dist.Work | None:
        """Start sending part `r` of `size` equal parts to each rank r,
        which receives them in rank order.

        Any dtype works, since raw bytes are sent.
        """
        return dist.all_to_all_single(
            received.view(torch.uint8), sent.view(torch.uint8), group=self.handle, async_op=True
        )


@dataclass(frozen=True)
class ShardGroups:
    """This rank's groups when a buffer is sharded."""

    inside: RankGroup = RankGroup()  # the ranks whose shards together make up the buffer
    between: RankGroup = RankGroup()  # the ranks that hold the same shard as this one

    @classmethod
    def of(cls, sharing: str, world: World) -> ShardGroups:
        """Return the groups for a value of SHARDED_OPTIMIZER:
        "off" (this rank alone), "node" or "all".

        All ranks call it together. Raises UserError as `inside_nodes` does.
        """
        if sharing == "node":
            return cls.inside_nodes(world)
        return cls.all_ranks(world) if sharing == "all" else cls()

    @classmethod
    def all_ranks(cls, world: World) -> ShardGroups:
        """Return groups with a shard for each rank."""
        return cls(inside=RankGroup(world.rank, world.world_size))

    @classmethod
    def inside_nodes(cls, world: World) -> ShardGroups:
        """Return groups with a shard for each rank of a node, the same on every node.

        All ranks call it together.

        Raises:
            UserError: the nodes have different numbers of ranks,
                or a node's ranks are not consecutive.
        """
        size = _ranks_of_a_node(world, "SHARDED_OPTIMIZER", "node")
        node = world.rank // size
        nodes = world.world_size // size
        members = [node * size + local for local in range(size)]
        counterparts = [other * size + world.local_rank for other in range(nodes)]
        return cls(
            RankGroup(world.local_rank, size, _handle(members, world)),
            RankGroup(node, nodes, _handle(counterparts, world)),
        )


def exchange_group_size(exchange_padding: str, world: World) -> int:
    """Return the number of ranks that EXCHANGE_PADDING names: this one alone, those of its node, or
    all. All ranks call it together. Raises UserError as `ShardGroups.inside_nodes` does.
    """
    size = {"off": 1, "all": world.world_size}.get(exchange_padding)
    return size or _ranks_of_a_node(world, "EXCHANGE_PADDING", "group")


def _ranks_of_a_node(world: World, setting: str, value: str) -> int:
    """Return the number of ranks per node.

    All ranks call it together. Raises UserError, naming the setting, if the nodes differ in it or a
    node's ranks are not consecutive.
    """
    size = world.local_world_size
    is_misplaced = world.local_rank != world.rank % size or world.world_size % size != 0
    most, least, any_misplaced = world.all_reduce_max(
        torch.tensor([size, -size, int(is_misplaced)])
    ).tolist()
    if most != -least or any_misplaced:
        reason = f"{value} needs the same number of ranks on each node, numbered node by node"
        raise UserError(
            "distributed.layout", setting, reason, f"Start them so, or set {setting}=all"
        )
    return size


def _handle(ranks: list[int], world: World) -> dist.ProcessGroup | None:
    if len(ranks) in (1, world.world_size):
        return None
    # Without local synchronization every rank would have to create the groups of all other nodes
    # too.
    timeout = world.collective_timeout
    return dist.new_group(
        ranks, timeout=timeout, pg_options=nccl_options(timeout), use_local_synchronization=True
    )
