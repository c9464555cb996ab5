"""Clips gradients bucket by bucket, each rank its own, and averages them over the ranks while backward goes on.

With W ranks, A micro-batches, B buckets, and G(r, m, b) the part in bucket b of A times what micro-batch m adds to the
gradient of rank r's mean loss (if all are equally full: of the gradient of the micro-batch's own mean loss), the
gradient that the optimizer gets is, bucket by bucket,

    1 / (W A)  sum over r and m of  clip(G(r, m, b), max_norm / sqrt(B))        clip(x, c) = x min(1, c / ||x||)

so its norm is at most max_norm. Each bucket is clipped as soon as its last gradient has arrived, and its sum over the
ranks starts at once: there is no pass over the whole gradient, and nothing waits. Earlier micro-batches are clipped
likewise and kept in float32; the last one starts the sums. The ranks' norms travel in one small sum at the end, and
where a bucket of any rank is not finite, every rank finds that out and leaves the step out.

Source: the public description of Samsung's submissions to MLPerf Training v2.0 ("bucket-wise gradient clipping before
all-reduce"). The bound of each bucket follows from that of the whole: B squares of max_norm / sqrt(B) add up to
max_norm squared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mlbert.distributed.groups import RankGroup
from mlbert.distributed.reduce import Bucket, GradientReducer, PendingSum, all_reduced, clip_share
from mlbert.distributed.world import World


class BucketClippingReducer(GradientReducer):
    """Clipped buckets, averaged over the ranks; then nothing may be clipped any more.

    Losses carry divisors that make the sum of all shares the mean over ranks and micro-batches (`Objective.scope`
    "rank"), so a share counts W A times.

    Args:
        params, flat_grad, offsets, world, buckets, loss_scale, in_bf16: as in `GradientReducer`.
        max_norm: of the whole gradient.
        accumulation: micro-batches of a step; each is one `prepare` and one backward.

    Attributes:
        grad_norm: root of the mean over ranks and micro-batches of the squared norm of a whole gradient before
            clipping; float64 scalar on the device, not finite where a bucket was not. The same on all ranks.
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
        self._limit, self._num_shares = max_norm / len(buckets) ** 0.5, world.world_size * accumulation
        self._kept = torch.zeros_like(flat_grad) if accumulation > 1 else None  # clipped, of earlier micro-batches
        self._squares = torch.zeros(len(buckets), dtype=torch.float64, device=flat_grad.device)
        self.grad_norm = torch.zeros((), dtype=torch.float64, device=flat_grad.device)
        self._is_last: bool | None = None  # whether the present pass is the step's last one; None: there is none

    def prepare(self, last: bool) -> None:
        """As in `GradientReducer`. Buckets of the pass before that no hook has told of are clipped now."""
        assert not self._is_last, "finish() was not called after the last backward"
        while self._is_last is not None and self.num_started < self.num_buckets:
            self._begin_next()
        self._is_last, self.num_started = last, 0
        self._arm()

    def finish(self) -> None:
        """As in `GradientReducer`; `grad_norm` is written."""
        assert self._is_last, "prepare(last=True) comes first"
        super().finish()
        self._is_last = None

    def _begin_next(self) -> None:
        n = self.num_started
        part, bucket = self._slices[n], self._buckets[n]
        self._squares[n] += clip_share(part, self._limit, self._num_shares, self._loss_scale).square()
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
        super()._complete([*chains, PendingSum(all_reduced(mean_square, group, in_bf16=False), None)])
        self.grad_norm.copy_(mean_square.sqrt())
        self._squares.zero_()
