"""Shard a flat buffer over the ranks: each rank sums,
updates and sends out its own shard of every block.

    prepare(last=True)  backward (blocks start)  finish()
    shard = layout.take(grad)  ...  layout.put  all_gather

The buffer is cut into blocks, and each block into equal parts, one per rank of the group. A rank's
shard is its parts of all blocks, in ascending order. Blocks may start inside a parameter, so that
all shards have the same size. In a group of one, the shard is the buffer itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlbert.distributed.groups import ShardGroups
from mlbert.distributed.reduce import Bucket, GradientReducer, Steps, all_reduced, reduce_scattered
from mlbert.distributed.world import World

PART_MULTIPLE = 32  # float32 elements: aligns parts to 128 bytes


class ShardLayout:
    """Maps the elements of a flat buffer to ranks.

    Args:
        numel: elements of the buffer, a multiple of `multiple(groups)`.
        groups: the ranks that shard the buffer.
        block_elements: minimum size of all blocks but the first.
    """

    def __init__(self, numel: int, groups: ShardGroups, block_elements: int) -> None:
        unit = self.multiple(groups)
        assert numel % unit == 0, f"{numel} elements are not a multiple of {unit}"
        length = max(unit, -(-block_elements // unit) * unit)
        # Cut from the end, where backward finishes first; the first block takes the remainder.
        starts = [0, *sorted(range(numel - length, 0, -length))]
        self.groups = groups
        self.size = groups.inside.size
        self.blocks = list(pairwise([*starts, numel]))  # (start, stop) of each, ascending
        # (start, stop) of this rank's part of each block: in the buffer, in the shard
        self.parts = []
        self.spans = []
        rank = groups.inside.rank
        size = groups.inside.size
        for start, stop in self.blocks:
            part = (stop - start) // size
            self.parts.append((start + rank * part, start + (rank + 1) * part))
            self.spans.append((start // size, stop // size))

    @classmethod
    def whole(cls, numel: int) -> ShardLayout:
        """Return the layout of an unsharded buffer, with one block."""
        return cls(numel, ShardGroups(), numel)

    @staticmethod
    def multiple(groups: ShardGroups) -> int:
        """Return the number that a buffer's length must be a multiple of."""
        return groups.inside.size * PART_MULTIPLE if groups.inside.size > 1 else 1

    def take(self, buffer: Tensor) -> Tensor:
        """Return this rank's shard [numel // size] of a buffer [numel]:
        a copy, or the buffer itself if unsharded.
        """
        return (
            buffer
            if self.size == 1
            else torch.cat([buffer[start:stop] for start, stop in self.parts])
        )

    def gather(self, shard: Tensor) -> Tensor:
        """Gather all ranks' shards [numel // size] into a new buffer [numel];
        if unsharded, return the shard itself.
        """
        if self.size == 1:
            return shard
        buffer = shard.new_empty(self.blocks[-1][1])
        for (start, stop), (first, last) in zip(self.parts, self.spans, strict=True):
            buffer[start:stop].copy_(shard[first:last])
        self.all_gather(buffer)
        return buffer

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks whose shards make up the buffer, in place on each,
        and return it.
        """
        return self.groups.inside.all_reduce_sum(tensor)

    def begin_all_gather(self, buffer: Tensor, block: int) -> dist.Work | None:
        """Start filling one block of a buffer [numel], any dtype, with every rank's part.

        None if unsharded.
        """
        start, stop = self.blocks[block]
        return self.groups.inside.begin_all_gather(buffer[start:stop])

    def all_gather(self, buffer: Tensor) -> None:
        """Fill a buffer [numel] with the parts of every rank, and return when it is complete."""
        works = [self.begin_all_gather(buffer, block) for block in range(len(self.blocks))]
        for work in works:
            if work is not None:
                work.wait()

    def buckets(self, offsets: Sequence[int]) -> list[Bucket]:
        """Return the blocks, last first, with the parameters that overlap each;
        ``offsets`` are ascending.
        """
        stops = [*offsets[1:], self.blocks[-1][1]]
        buckets = []
        for start, stop in reversed(self.blocks):
            inside = [i for i, first in enumerate(offsets) if first < stop and stops[i] > start]
            buckets.append(Bucket(start, stop, range(inside[0], inside[-1] + 1)))
        return buckets


class ShardedReducer(GradientReducer):
    """Reduce-scatters (sums) a flat gradient buffer, overlapping backward,
    so that each rank's shard is complete.

    If several ranks hold the same shard, it is then summed over them block by block; on a GPU this
    overlaps backward too. The other parts of the buffer are undefined after `finish`.

    Args:
        params, offsets, clip_before, loss_scale, in_bf16: as in `GradientReducer`.
        flat_grad: [elements], the padded buffer.
        world: already started.
        layout: layout of this buffer.
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
        super().__init__(
            params,
            flat_grad,
            offsets,
            world,
            layout.buckets(offsets),
            clip_before,
            loss_scale,
            in_bf16,
        )

    def warm_up(self) -> None:
        """See `GradientReducer`. Also runs the collectives of a sharded optimizer once."""
        super().warm_up()
        self._layout.all_reduce_sum(self._flat_grad.new_zeros(1))
        self._layout.all_gather(self._flat_grad)

    def _has_steps(self) -> bool:
        groups = self._layout.groups
        return super()._has_steps() or (groups.inside.size > 1 and groups.between.size > 1)

    def _sum(self, part: Tensor) -> Steps:
        groups = self._layout.groups
        yield from reduce_scattered(part, groups.inside, self._in_bf16)
        yield from all_reduced(
            part.chunk(groups.inside.size)[groups.inside.rank], groups.between, self._in_bf16
        )
