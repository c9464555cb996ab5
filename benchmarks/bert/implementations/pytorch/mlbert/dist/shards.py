"""Shares a flat buffer out over the ranks: each sums, updates and hands out its own shard of every block.

    prepare(last=True)  backward (blocks start)  finish()  shard = layout.take(grad)  ...  layout.put  all_gather

The buffer is cut into blocks of equal parts, one part a rank. A rank's shard is its parts of all blocks, in ascending
order. Block borders fall anywhere, inside parameters too, so that the ranks' shards are of one size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlbert.dist.reduce import Bucket, GradientReducer
from mlbert.dist.world import World

PART_MULTIPLE = 32  # elements: parts begin at 128 bytes


class ShardLayout:
    """Which elements of a flat buffer belong to which rank.

    Args:
        numel: elements of the buffer, a multiple of `multiple(world)`.
        world: the ranks.
        block_elements: least size of a block but the first one.

    Attributes:
        blocks: (start, stop) of each block, ascending.
        parts: (start, stop) of this rank's part of each block.
        shard_numel: elements of this rank's shard, the same on all ranks.
    """

    def __init__(self, numel: int, world: World, block_elements: int) -> None:
        unit = self.multiple(world)
        assert numel % unit == 0, f"{numel} elements are no multiple of {unit}"
        length = max(unit, -(-block_elements // unit) * unit)
        # Cut from the end, where backward finishes first; the first block takes the remainder.
        starts = [0, *sorted(range(numel - length, 0, -length))] if numel > length else [0]
        self.blocks = list(zip(starts, [*starts[1:], numel], strict=True))
        self._world = world
        self.parts = []
        for start, stop in self.blocks:
            part = (stop - start) // world.world_size
            self.parts.append((start + world.rank * part, start + (world.rank + 1) * part))
        self.shard_numel = numel // world.world_size

    @staticmethod
    def multiple(world: World) -> int:
        """What the length of a buffer has to be a multiple of."""
        return world.world_size * PART_MULTIPLE

    def take(self, buffer: Tensor) -> Tensor:
        """This rank's shard of a buffer [numel] -> [shard_numel], a copy."""
        return torch.cat([buffer[start:stop] for start, stop in self.parts])

    def put(self, shard: Tensor, buffer: Tensor) -> None:
        """Writes this rank's shard [shard_numel] to its places in a buffer [numel]."""
        pieces = shard.split([stop - start for start, stop in self.parts])
        for (start, stop), piece in zip(self.parts, pieces, strict=True):
            buffer[start:stop].copy_(piece)

    def all_gather(self, buffer: Tensor) -> None:
        """Fills a buffer [numel] with every rank's shard, each in its places; returns when it is full."""
        if self._world.world_size == 1:
            return
        works = [self._world.begin_all_gather(buffer[start:stop]) for start, stop in self.blocks]
        for work in works:
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

    The other parts of the buffer are undefined after `finish`.

    Args:
        params, offsets: as in `GradientReducer`.
        flat_grad: [elements], the padded buffer.
        world: started.
        layout: of this buffer.
        clip_before: norm to which each rank clips its own share of the gradient before the sum: the order that the
            benchmark's rules also allow. A rank's share counts times the number of ranks, as the mean over its own
            samples would; then blocks start after backward only. None: no clipping here.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        flat_grad: Tensor,
        offsets: Sequence[int],
        world: World,
        layout: ShardLayout,
        clip_before: float | None = None,
    ) -> None:
        self._layout = layout
        self._clip_before = clip_before
        self._flat_grad = flat_grad
        super().__init__(params, flat_grad, offsets, world)

    def _cut(self, offsets: Sequence[int], numel: int, elements: int) -> list[Bucket]:
        return self._layout.buckets(offsets)

    def _begin(self, part: Tensor) -> dist.Work:
        return self._world.begin_reduce_scatter_sum(part)

    def prepare(self, last: bool) -> None:
        """Call before each micro-batch's backward; `last` tells that gradients are complete after this one."""
        super().prepare(last and self._clip_before is None)

    def finish(self) -> None:
        """Clips, if asked to, then waits for all sums; errors as in `GradientReducer.finish`."""
        if self._clip_before is not None:
            norm = torch.linalg.vector_norm(self._flat_grad, dtype=torch.float64) * self._world.world_size
            # A norm that is not finite makes the sum so on every rank, and the optimizer leaves the step out.
            self._flat_grad.mul_((self._clip_before / norm.clamp(min=self._clip_before)).float())
        super().finish()
