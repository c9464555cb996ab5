"""Clip each rank's gradients bucket by bucket and average them over the ranks during backward.

With W ranks, A micro-batches and B buckets, let G(r, m, b) be bucket b of A times the contribution
of micro-batch m to the gradient of rank r's mean loss. (If all micro-batches are equally full, that
is the gradient of micro-batch m's mean loss.) Bucket by bucket, the optimizer gets the gradient

    1 / (W A)  sum over r and m of  clip(G(r, m, b), max_norm / sqrt(B))

with clip(x, c) = x min(1, c / ||x||), so its norm is at most max_norm. Each bucket is clipped as
soon as its last gradient is ready, and its sum over the ranks starts at once, without a pass over
the full gradient or a wait. Earlier micro-batches are clipped the same way and accumulated in
float32; the last one starts the sums. One small all-reduce at the end sums the squared norms, so if
a bucket of any rank is not finite, every rank skips the step.

Source: the public description of Samsung's submissions to MLPerf Training v2.0 ("bucket-wise
gradient clipping before all-reduce"). The bound of each bucket follows from that of the full
gradient: B squares of max_norm / sqrt(B) add up to max_norm squared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mlbert.distributed.groups import RankGroup
from mlbert.distributed.reduce import Bucket, GradientReducer, PendingSum, all_reduced, clip_share
from mlbert.distributed.world import World


class BucketClippingReducer(GradientReducer):
    """Clips buckets and averages them over the ranks. Nothing may be clipped after that.

    Losses are divided so that the sum of all shares is the mean over ranks and micro-batches
    (`Objective.scope` "rank"), so each share is multiplied by W A before it is clipped.

    Args:
        params, flat_grad, offsets, world, buckets, loss_scale, in_bf16: as in `GradientReducer`.
        max_norm: bound on the norm of the full gradient.
        accumulation: micro-batches per step; each is one `prepare` and one backward.

    Attributes:
        grad_norm: root mean square, over ranks and micro-batches, of the norm of the full gradient
            before clipping; float64 scalar on the device, the same on all ranks. Not finite if any
            bucket is not.
    """

    grad_norm: Tensor

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        flat_grad: Tensor,
        offsets: Sequence[int],
        world: World,
        buckets: Sequence[Bucket],
        *,
        max_norm: float,
        accumulation: int = 1,
        loss_scale: Tensor | None = None,
        in_bf16: bool = False,
    ) -> None:
        super().__init__(params, flat_grad, offsets, world, buckets, None, loss_scale, in_bf16)
        self._limit = max_norm / len(buckets) ** 0.5
        self._num_shares = world.world_size * accumulation
        # Earlier micro-batches, clipped.
        self._kept = torch.zeros_like(flat_grad) if accumulation > 1 else None
        self._squares = torch.zeros(len(buckets), dtype=torch.float64, device=flat_grad.device)
        self.grad_norm = torch.zeros((), dtype=torch.float64, device=flat_grad.device)
        self._is_last: bool | None = None  # True in the step's last pass; None outside a pass

    def prepare(self, last: bool) -> None:
        """See `GradientReducer`.

        Buckets of the previous pass that no hook has started are clipped now.
        """
        assert not self._is_last, "finish() was not called after the last backward"
        while self._is_last is not None and self.num_started < self.num_buckets:
            self._begin_next()
        self._is_last = last
        self.num_started = 0
        self._arm()

    def finish(self) -> None:
        """See `GradientReducer`. Also writes `grad_norm`."""
        assert self._is_last, "call prepare(last=True) first"
        super().finish()
        self._is_last = None

    def _begin_next(self) -> None:
        n = self.num_started
        part = self._slices[n]
        bucket = self._buckets[n]
        self._squares[n] += clip_share(
            part, self._limit, self._num_shares, self._loss_scale
        ).square()
        kept = None if self._kept is None else self._kept[bucket.start : bucket.stop]
        if self._is_last:
            if kept is not None:
                part.add_(kept)
                kept.zero_()
            self._begin(part)
        else:
            assert kept is not None, "more micro-batches than announced"
            kept.add_(part)
            part.zero_()
        self.num_started += 1

    def _complete(self, chains: Sequence[PendingSum]) -> None:
        mean_square = self._squares.sum() / self._num_shares
        group = RankGroup(self._world.rank, self._world.world_size)
        super()._complete(
            [*chains, PendingSum(all_reduced(mean_square, group, in_bf16=False), None)]
        )
        self.grad_norm.copy_(mean_square.sqrt())
        self._squares.zero_()
