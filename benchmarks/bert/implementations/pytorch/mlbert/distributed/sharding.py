"""Shares a flat buffer out over the ranks: each sums, updates and hands out its own shard of every block.

    prepare(last=True)  backward (blocks start)  finish()  shard = layout.take(grad)  ...  layout.put  all_gather

The buffer is cut into blocks of equal parts, one part a rank of the group that shares it. A rank's shard is its parts
of all blocks, in ascending order. Block borders fall anywhere, inside parameters too, so that the ranks' shards are of
one size. A rank alone holds one shard, which is the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlbert.distributed.groups import ShardGroups
from mlbert.distributed.reduce import Bucket, GradientReducer, Steps, all_reduced, reduce_scattered
from mlbert.distributed.world import World

PART_MULTIPLE = 32  # elements: parts begin at 128 bytes


class ShardLayout:
    """Which elements of a flat buffer belong to which rank.

    Args:
        numel: elements of the buffer, a multiple of `multiple(groups)`.
        groups: who shares the buffer out.
        block_elements: least size of a block but the first one.
    """

    def __init__(self, numel: int, groups: ShardGroups, block_elements: int) -> None:
        unit = self.multiple(groups)
        assert numel % unit == 0, f"{numel} elements are no multiple of {unit}"
        length = max(unit, -(-block_elements // unit) * unit)
        # Cut from the end, where backward finishes first; the first block takes the remainder.
        starts = [0, *sorted(range(numel - length, 0, -length))] if numel > length else [0]
        self.groups, self.size = groups, groups.inside.size
        self.blocks = list(zip(starts, [*starts[1:], numel], strict=True))  # (start, stop) of each, ascending
        self.parts, self.spans = [], []  # (start, stop) of this rank's part of each block, and where it is in the shard
        rank, size = groups.inside.rank, groups.inside.size
        for start, stop in self.blocks:
            part = (stop - start) // size
            self.parts.append((start + rank * part, start + (rank + 1) * part))
            self.spans.append((start // size, stop // size))
        self.shard_numel = numel // size  # the same on all ranks

    @classmethod
    def whole(cls, numel: int) -> ShardLayout:
        """Everything belongs to this rank, in one block."""
        return cls(numel, ShardGroups(), numel)

    @staticmethod
    def multiple(groups: ShardGroups) -> int:
        """What the length of a buffer has to be a multiple of."""
        return groups.inside.size * PART_MULTIPLE if groups.inside.size > 1 else 1

    def take(self, buffer: Tensor) -> Tensor:
        """This rank's shard of a buffer [numel] -> [shard_numel]: a copy, or for a rank alone the buffer itself."""
        return buffer if self.size == 1 else torch.cat([buffer[start:stop] for start, stop in self.parts])

    def gather(self, shard: Tensor) -> Tensor:
        """All ranks' shards [shard_numel] -> [numel], a new buffer; for a rank alone its shard itself."""
        if self.size == 1:
            return shard
        buffer = shard.new_empty(self.blocks[-1][1])
        for (start, stop), (first, last) in zip(self.parts, self.spans, strict=True):
            buffer[start:stop].copy_(shard[first:last])
        self.all_gather(buffer)
        return buffer

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over the ranks whose shards make the buffer, in place on each; returns it."""
        return self.groups.inside.all_reduce_sum(tensor)

    def begin_all_gather(self, buffer: Tensor, block: int) -> dist.Work | None:
        """Starts filling one block of a buffer [numel], any dtype, with every rank's part of it; None for one rank."""
        start, stop = self.blocks[block]
        return self.groups.inside.begin_all_gather(buffer[start:stop])

    def all_gather(self, buffer: Tensor) -> None:
        """Fills a buffer [numel] with every rank's shard, each in its places; returns when it is full."""
        works = [self.begin_all_gather(buffer, block) for block in range(len(self.blocks))]
        for work in works:
            if work is not None:
                work.wait()

    def buckets(self, offsets: Sequence[int]) -> list[Bucket]:
        """The blocks, last first, with the parameters (first elements ascending) that reach into each."""
        stops = [*offsets[1:], self.blocks[-1][1]]
        buckets = []
        for start, stop in reversed(self.blocks):
            inside = [i for i, first in enumerate(offsets) if first < stop and stops[i] > start]
            buckets.append(Bucket(start, stop, range(inside[0], inside[-1] + 1)))
        return buckets


class ShardedReducer(GradientReducer):
    """Reduce-scatter (sum) of a flat gradient buffer, overlapping backward: afterwards each rank's shard is final.

    Where several ranks hold the same shard, its sum over them follows block by block; on a GPU that overlaps backward
    too. The other parts of the buffer are undefined after `finish`.

    Args:
        params, offsets, clip_before, loss_scale, in_bf16: as in `GradientReducer`.
        flat_grad: [elements], the padded buffer.
        world: started.
        layout: of this buffer.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        flat_grad: Tensor,
        offsets: Sequence[int],
        world: World,
        layout: ShardLayout,
        clip_before: float | None,
        loss_scale: Tensor | None = None,
        in_bf16: bool = False,
    ) -> None:
        self._layout = layout
        buckets = layout.buckets(offsets)
        super().__init__(params, flat_grad, offsets, world, buckets, clip_before, loss_scale, in_bf16)

    def warm_up(self) -> None:
        """As in `GradientReducer`; what a sharded optimizer sums and gathers runs once too."""
        super().warm_up()
        self._layout.all_reduce_sum(self._flat_grad.new_zeros(1))
        self._layout.all_gather(self._flat_grad)

    def _has_steps(self) -> bool:
        groups = self._layout.groups
        return super()._has_steps() or (groups.inside.size > 1 and groups.between.size > 1)

    def _sum(self, part: Tensor) -> Steps:
        groups = self._layout.groups
        yield from reduce_scattered(part, groups.inside, self._in_bf16)
        yield from all_reduced(part.chunk(groups.inside.size)[groups.inside.rank], groups.between, self._in_bf16)
