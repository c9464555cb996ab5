"""Groups of ranks: those that shard a buffer among themselves, and those that hold the same shard of it.

all ranks     each holds 1 / world_size
node          each holds 1 / (ranks of the node), the same shard as its counterparts on the other nodes: a node reduces
              over its fast links first, and only shards are sent between nodes

Source of the second scheme: the benchmark's NVIDIA submissions shard their optimizer over the GPUs of a node (apex's
distributed fused LAMB), with an all-reduce of the shards between nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mlbert.data.loading.config import DataConfig
from mlbert.distributed.world import World, nccl_options
from mlbert.host.errors import UserError

POLL_SECONDS = 1e-4


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
        """Start a sum and return without waiting; `wait()` on the result before use. None in a group of one."""
        return dist.all_reduce(tensor, group=self.handle, async_op=True) if self.size > 1 else None

    def begin_reduce_scatter_sum(self, buffer: Tensor) -> dist.Work | None:
        """Start an in-place sum over the group of which each rank keeps part `rank` of `size` equal parts.

        The other parts of the buffer are undefined afterwards.
        """
        # torch 2.13 added the new name; the old one will be removed.
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return reduce_scatter(buffer.chunk(self.size)[self.rank], buffer, group=self.handle, async_op=True)

    def begin_all_gather(self, buffer: Tensor) -> dist.Work | None:
        """Start filling the buffer in place with each rank's part, divided as in `begin_reduce_scatter_sum`.

        Any dtype works, since raw bytes are sent. None in a group of one.
        """
        if self.size == 1:
            return None
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        data = buffer.view(torch.uint8)
        return all_gather(data, data.chunk(self.size)[self.rank], group=self.handle, async_op=True)

    def begin_all_to_all(self, received: Tensor, sent: Tensor) -> dist.Work | None:
        """Start sending part `r` of `size` equal parts to each rank r, which receives them in rank order.

        Any dtype works, since raw bytes are sent.
        """
        buffers = received.view(torch.uint8), sent.view(torch.uint8)
        return dist.all_to_all_single(*buffers, group=self.handle, async_op=True)

    def all_gather(self, data: np.ndarray, given_up: Callable[[], bool] = lambda: False) -> list[np.ndarray]:
        """Return the ``data`` of each rank of the group (uint8 [n], any n), on the host, in rank order.

        Raises:
            RuntimeError: a rank is lost, or ``given_up()`` became true while waiting. The group must not be used again.
        """
        sizes = self._gather_equal(torch.tensor([len(data)]), given_up).flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = torch.from_numpy(data)
        rows = self._gather_equal(padded, given_up).numpy()
        return [row[:size] for row, size in zip(rows, sizes, strict=True)]

    def _gather_equal(self, row: Tensor, given_up: Callable[[], bool]) -> Tensor:
        """[n] of each rank -> [size, n]."""
        gathered = row.new_empty(self.size, *row.shape)
        if self.size == 1:
            return gathered.copy_(row)
        work = dist.all_gather(list(gathered), row, group=self.handle, async_op=True)
        while not work.is_completed():  # not wait(), which cannot be interrupted before the timeout
            if given_up():
                raise RuntimeError("the ranks' data is no longer needed")
            time.sleep(POLL_SECONDS)
        work.wait()
        return gathered


@dataclass(frozen=True)
class ShardGroups:
    """This rank's groups when a buffer is sharded."""

    inside: RankGroup = RankGroup()  # the ranks whose shards together make up the buffer
    between: RankGroup = RankGroup()  # the ranks that hold the same shard as this one

    @classmethod
    def of(cls, sharing: str, world: World) -> ShardGroups:
        """Return the groups for a value of SHARDED_OPTIMIZER: "off" (this rank alone), "node" or "all".

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
        """Return groups with a shard for each rank of a node, the same on every node. All ranks call it together.

        Raises:
            UserError: the nodes have different numbers of ranks, or a node's ranks are not consecutive.
        """
        size = _ranks_of_a_node(world, "SHARDED_OPTIMIZER", "node")
        node, nodes = world.rank // size, world.world_size // size
        members = [node * size + local for local in range(size)]
        counterparts = [other * size + world.local_rank for other in range(nodes)]
        return cls(
            RankGroup(world.local_rank, size, _handle(members, world)),
            RankGroup(node, nodes, _handle(counterparts, world)),
        )


def exchange_group(data: DataConfig, world: World) -> RankGroup:
    """Return the ranks that EXCHANGE_PADDING names: this one alone, those of its node, or all.

    For EXCHANGE_BY=gather, connect them through host memory in a separate group, so that a thread can use it during
    training. All ranks call it together.

    Raises:
        UserError: the nodes have different numbers of ranks, or a node's ranks are not consecutive.
    """
    size = {"off": 1, "all": world.world_size}.get(data.exchange_padding)
    size = size or _ranks_of_a_node(world, "EXCHANGE_PADDING", "group")
    place = world.rank % size
    if data.exchange_by == "lengths" or size == 1:
        return RankGroup(place, size)
    members = list(range(world.rank - place, world.rank - place + size))
    handle = dist.new_group(members, timeout=world.collective_timeout, backend="gloo", use_local_synchronization=True)
    group = RankGroup(place, size, handle)
    group.all_gather(np.zeros(1, np.uint8))  # connects them
    return group


def _ranks_of_a_node(world: World, setting: str, value: str) -> int:
    """Return the number of ranks per node. All ranks call it together. Raises UserError, naming the setting, if the
    nodes differ in it or a node's ranks are not consecutive."""
    size = world.local_world_size
    is_misplaced = world.local_rank != world.rank % size or world.world_size % size != 0
    most, least, any_misplaced = world.all_reduce_max(torch.tensor([size, -size, int(is_misplaced)])).tolist()
    if most != -least or any_misplaced:
        reason = f"{value} needs the same number of ranks on each node, numbered node by node"
        raise UserError("distributed.layout", setting, reason, f"Start them so, or set {setting}=all")
    return size


def _handle(ranks: list[int], world: World) -> dist.ProcessGroup | None:
    if len(ranks) in (1, world.world_size):
        return None
    # Without local synchronization every rank would have to create the groups of all other nodes too.
    timeout = world.collective_timeout
    return dist.new_group(ranks, timeout=timeout, pg_options=nccl_options(timeout), use_local_synchronization=True)
