"""The ranks that share a buffer out among themselves, and those that hold the same share of it.

all ranks     each holds 1 / world_size
of a node     each holds 1 / (ranks of the node), as its twins on the other nodes do: what is reduced inside a node
              over its fast links travels between nodes in shares only

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
    """Ranks that communicate with each other, and this one's place among them."""

    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None  # torch's group; None: all ranks, or this one alone

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sums the tensor over the group, in place on each rank; returns it."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.handle)
        return tensor

    def begin_all_reduce_sum(self, tensor: Tensor) -> dist.Work | None:
        """Starts such a sum and returns at once; `wait()` on the result before use. None for a rank alone."""
        return dist.all_reduce(tensor, group=self.handle, async_op=True) if self.size > 1 else None

    def begin_reduce_scatter_sum(self, buffer: Tensor) -> dist.Work | None:
        """Starts a sum over the group of which each rank keeps one part, in place: part `rank` of `size` equal ones.

        The other parts of the buffer are undefined afterwards. None for a rank alone.
        """
        if self.size == 1:
            return None
        # The newer name came with torch 2.13, the older one goes away.
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return reduce_scatter(buffer.chunk(self.size)[self.rank], buffer, group=self.handle, async_op=True)

    def begin_all_gather(self, buffer: Tensor) -> dist.Work | None:
        """Starts filling the buffer with each rank's part of it, as `begin_reduce_scatter_sum` divides it, in place.

        Bytes travel as they are, so any dtype does. None for a rank alone.
        """
        if self.size == 1:
            return None
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        data = buffer.view(torch.uint8)
        return all_gather(data, data.chunk(self.size)[self.rank], group=self.handle, async_op=True)

    def begin_all_to_all(self, received: Tensor, sent: Tensor) -> dist.Work | None:
        """Starts sending part `r` of `size` equal ones to each rank r, which gets them in the order of ranks.

        Bytes travel as they are, so any dtype does. None for a rank alone.
        """
        if self.size == 1:
            return None
        buffers = received.view(torch.uint8), sent.view(torch.uint8)
        return dist.all_to_all_single(*buffers, group=self.handle, async_op=True)

    def all_gather(self, data: np.ndarray, given_up: Callable[[], bool] = lambda: False) -> list[np.ndarray]:
        """The ``data`` of each rank of the group (uint8 [n], any n), on the host, in the order of ranks.

        Raises:
            RuntimeError: a rank is lost, or ``given_up`` says meanwhile that its result is not wanted any more; the
                group must not be used again then.
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
        while not work.is_completed():  # not a wait, which nothing could end before the time limit
            if given_up():
                raise RuntimeError("the ranks' data is not wanted any more")
            time.sleep(POLL_SECONDS)
        work.wait()
        return gathered


@dataclass(frozen=True)
class ShardGroups:
    """Where this rank stands when a buffer is shared out."""

    inside: RankGroup = RankGroup()  # the ranks whose shards together are the buffer
    between: RankGroup = RankGroup()  # the ranks that hold the same shard as this one

    @classmethod
    def of(cls, sharing: str, world: World) -> ShardGroups:
        """The groups that SHARDED_OPTIMIZER names: "off" (this rank alone), "node" or "all".

        All ranks call it together; arguments and errors as in `inside_nodes`.
        """
        if sharing == "node":
            return cls.inside_nodes(world)
        return cls.all_ranks(world) if sharing == "all" else cls()

    @classmethod
    def all_ranks(cls, world: World) -> ShardGroups:
        """A shard for each rank."""
        return cls(inside=RankGroup(world.rank, world.world_size))

    @classmethod
    def inside_nodes(cls, world: World) -> ShardGroups:
        """A shard for each rank of a node, the same on every node. All ranks call it.

        Raises:
            UserError: the nodes have unequally many ranks, or a node's ranks do not follow each other.
        """
        size = _ranks_of_a_node(world, "SHARDED_OPTIMIZER", "node")
        node, nodes = world.rank // size, world.world_size // size
        members = [node * size + local for local in range(size)]
        twins = [other * size + world.local_rank for other in range(nodes)]
        return cls(
            RankGroup(world.local_rank, size, _handle(members, world)),
            RankGroup(node, nodes, _handle(twins, world)),
        )


def exchange_group(data: DataConfig, world: World) -> RankGroup:
    """The ranks that EXCHANGE_PADDING names: this one alone, those of its node, or all.

    For EXCHANGE_BY=gather they are connected, over host memory and apart from every other group, so that a thread may
    use them while training goes on. All ranks call it together.

    Raises:
        UserError: the nodes have unequally many ranks, or a node's ranks do not follow each other.
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
    """How many ranks each node has, which all ranks ask together. Raises UserError naming the setting: unequally many,
    or they do not follow each other."""
    size = world.local_world_size
    table = torch.zeros(world.world_size, 2, dtype=torch.int64)
    table[world.rank] = torch.tensor([world.local_rank, size])
    found = world.all_reduce_sum(table).tolist()
    if world.world_size % size or found != [[rank % size, size] for rank in range(world.world_size)]:
        reason = f"{value} needs equally many ranks on each node, numbered node after node"
        raise UserError("distributed.layout", setting, reason, f"Start them so, or set {setting}=all")
    return size


def _handle(ranks: list[int], world: World) -> dist.ProcessGroup | None:
    if len(ranks) in (1, world.world_size):
        return None
    # Without local synchronisation every rank would have to make every other node's group too.
    timeout = world.collective_timeout
    return dist.new_group(ranks, timeout=timeout, pg_options=nccl_options(timeout), use_local_synchronization=True)
