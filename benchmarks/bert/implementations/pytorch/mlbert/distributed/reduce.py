"""Sums gradients over ranks while backward is still running.

The flat gradient buffer is cut into buckets from its end, because backward finishes the last layers first. When all
parameters of a bucket have their gradients, its sum over the ranks starts and travels during the rest of backward:

    prepare(last=False)  backward  ...  prepare(last=True)  backward (buckets start)  finish()  optimizer step

All ranks start the buckets in the same order, so a bucket that is ready early waits for those before it.

How a part of the gradient is summed over ranks: as it is, or travelling in bfloat16.

    fp32    one collective of float32
    bf16    every rank sends each other one its part of the buffer, rounded to bfloat16 (all-to-all); each adds up what
            it got in float32, in the order of ranks. Where all need the whole sum, it travels rounded once more
            (all-gather). Half the bytes.

With u = 2^-8, half the distance of two bfloat16 numbers near 1, and g_r the ranks' addends: a sum of which each rank
keeps its part is off by at most u sum |g_r| besides float32's own rounding, and one that all keep by u |sum| more. A
library's own sum in bfloat16 may round at every hop instead. Each sum is added up once, on one rank, so all get the
same bits, and the same ones in every run.

A sum is a generator of collectives, each of which begins when the one before is done. `PendingSum` runs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlbert.distributed.groups import RankGroup
from mlbert.distributed.world import World

Steps = Iterator[dist.Work | None]


def all_reduced(part: Tensor, group: RankGroup, in_bf16: bool) -> Steps:
    """Sums a float32 tensor [n] of any length over the group, in place on each rank."""
    if group.size == 1:
        return
    if not in_bf16:
        yield group.begin_all_reduce_sum(part)
        return
    length = -(-len(part) // group.size)
    sent = part.new_zeros(group.size * length, dtype=torch.bfloat16)
    sent[: len(part)].copy_(part)
    received = torch.empty_like(sent)
    yield group.begin_all_to_all(received, sent)
    sent.view(group.size, length)[group.rank].copy_(_added_up(received, group.size))
    yield group.begin_all_gather(sent)
    part.copy_(sent[: len(part)])


def reduce_scattered(buffer: Tensor, group: RankGroup, in_bf16: bool) -> Steps:
    """Sums a float32 buffer over the group; each rank keeps one part, in place: part `rank` of `size` equal ones.

    The other parts of the buffer are undefined afterwards.
    """
    if group.size == 1:
        return
    if not in_bf16:
        yield group.begin_reduce_scatter_sum(buffer)
        return
    sent = buffer.to(torch.bfloat16)
    received = torch.empty_like(sent)
    yield group.begin_all_to_all(received, sent)
    buffer.chunk(group.size)[group.rank].copy_(_added_up(received, group.size))


def _added_up(received: Tensor, size: int) -> Tensor:
    """bfloat16 [size * n] -> float32 [n], added in the order of ranks."""
    return received.view(size, -1).sum(0, dtype=torch.float32)


class PendingSum:
    """A sum under way.

    On a GPU all of it is queued at once, on a stream of its own, behind what is queued on the current one. On a CPU,
    where waiting stops the host, its first collective has begun, and `advance` begins the others.

    Args:
        steps: the sum.
        stream: None: as on a CPU; on a GPU that is enough where the sum is a single collective and nothing after it.
    """

    def __init__(self, steps: Steps, stream: torch.cuda.Stream | None) -> None:
        self._steps, self._stream = steps, stream
        if stream is None:
            self._work, self._is_done = self._next()
            return
        self._is_done = True
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            for work in steps:
                _wait(work)

    def _next(self) -> tuple[dist.Work | None, bool]:
        for work in self._steps:
            return work, False
        return None, True

    def advance(self) -> bool:
        """Waits for the present collective and begins the next one; False if there is none, and the sum is there.

        Raises:
            RuntimeError: a rank died, or did not answer within the world's timeout.
        """
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        if not self._is_done:
            _wait(self._work)
            self._work, self._is_done = self._next()
        return not self._is_done


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


NUM_STREAMS = 4  # on which sums of several steps are queued in turn
NORM_ROW = 4096  # elements whose squares are added in float32


@dataclass(frozen=True)
class Bucket:
    """A slice of the flat gradient buffer that is summed by one collective."""

    start: int  # elements of the buffer
    stop: int
    parameters: range  # indices of those that lie in it


def cut_buckets(offsets: Sequence[int], numel: int, bucket_elements: int) -> list[Bucket]:
    """Cuts a buffer of `numel` elements, whose parameters start at ascending `offsets`, into buckets, last first.

    A bucket is closed once it has at least `bucket_elements`; parameters are never cut, so one may be longer.
    """
    buckets: list[Bucket] = []
    stop, end = numel, len(offsets)
    for index in range(len(offsets) - 1, -1, -1):
        if stop - offsets[index] >= bucket_elements or index == 0:
            buckets.append(Bucket(offsets[index], stop, range(index, end)))
            stop, end = offsets[index], index
    return buckets


class GradientReducer:
    """All-reduce (sum) of a flat gradient buffer, overlapping backward; nothing at all for a single process.

    Losses carry the divisor of the whole step (all ranks, all micro-batches), so the sum is the gradient; a loss scale
    that they carry too is taken out of each bucket before it travels.

    Args:
        params: in the order of the buffer; each one's `.grad` is a view of it. A tied parameter is listed once and
            counts as ready when all its uses have contributed.
        flat_grad: [elements], any device that the world's backend serves.
        offsets: first element of each parameter, ascending.
        world: started.
        buckets: of the buffer, in the order in which they are summed; see `cut_buckets`.
        clip_before: norm to which each rank clips its own share of the gradient before the sum; then nothing may be
            clipped after it, and buckets start after backward only. None: no clipping here. See `clip_share`.
        loss_scale: float32 scalar that losses are multiplied by; None: they are not.
        in_bf16: gradients travel rounded; see `mlbert.distributed.reduce`.

    Attributes:
        num_buckets: collectives of a step.
        num_overlapped: of them those that had started before backward ended, in the last finished step.
        grad_norm: float64 scalar, the norm that this finds on its way, written by `finish`; None: none.
    """

    grad_norm: Tensor | None = None

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        flat_grad: Tensor,
        offsets: Sequence[int],
        world: World,
        buckets: Sequence[Bucket],
        clip_before: float | None,
        loss_scale: Tensor | None = None,
        in_bf16: bool = False,
    ) -> None:
        assert len(params) == len(offsets), "one offset for each parameter"
        self._params = list(params)
        self._world = world
        self._flat_grad = flat_grad
        self._clip_before, self._loss_scale = clip_before, loss_scale
        self._buckets = list(buckets)
        self._slices = [flat_grad[bucket.start : bucket.stop] for bucket in self._buckets]
        # Where backward must leave each gradient: the buffer means nothing once autograd has put a tensor of its own.
        self._addresses = [flat_grad.data_ptr() + offset * flat_grad.element_size() for offset in offsets]
        self._buckets_of = [[n for n, b in enumerate(self._buckets) if i in b.parameters] for i in range(len(params))]
        self._armed = False
        self._missing: list[set[int]] = []  # of each bucket, the parameters whose gradients are not there yet
        self._in_bf16 = in_bf16
        # One bucket's sum goes on over one link while the next one's goes over another, or is added up.
        num_streams = NUM_STREAMS if flat_grad.is_cuda and self._has_steps() else 0
        self._streams = [torch.cuda.Stream(flat_grad.device) for _ in range(num_streams)]
        self._chains: list[PendingSum] = []
        self.num_buckets = len(self._buckets)
        self.num_started = 0  # buckets under way or done in the present pass
        self.num_overlapped = 0
        self._is_alone = world.world_size == 1
        hooked = [] if self._is_alone else [(n, p) for n, p in enumerate(params) if p.requires_grad]
        self._hooks = [
            param.register_post_accumulate_grad_hook(lambda _, index=index: self._gradient_is_there(index))
            for index, param in hooked
        ]

    def warm_up(self) -> None:
        """Runs every collective that gradients travel by, at its true size, on a gradient that is zero and stays so.

        It connects the ranks, of every group: a library of collectives connects lazily, by the way that it chooses for
        a size. All ranks call it together.
        """
        self._world.warm_up(self._flat_grad.device)
        self.prepare(last=True)
        self.finish()

    def prepare(self, last: bool) -> None:
        """Call before each micro-batch's backward; `last` tells that gradients are complete after this one."""
        assert self.num_started == 0, "finish() was not called after the last backward"
        if last and self._clip_before is None:
            self._arm()

    def _arm(self) -> None:
        """From here on the hooks start buckets."""
        self._armed = not self._is_alone
        if self._armed:
            self._missing = [{i for i in b.parameters if self._params[i].requires_grad} for b in self._buckets]

    def finish(self) -> None:
        """Clips, if asked to, starts what has not started (parameters without a gradient hold it up), waits for all.

        Raises:
            RuntimeError: a rank died, or did not answer within the world's timeout.
        """
        self._armed = False
        if self._clip_before is not None:
            clip_share(self._flat_grad, self._clip_before, self._world.world_size, self._loss_scale)
        self.num_overlapped = self.num_started
        while self.num_started < len(self._buckets):
            self._begin_next()
        self._complete(self._chains)
        self._chains.clear()
        self.num_started = 0

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _gradient_is_there(self, index: int) -> None:
        if not self._armed:
            return
        grad = self._params[index].grad
        assert grad is not None, "gradients are views of the buffer"
        assert grad.data_ptr() == self._addresses[index], "a .grad was replaced: use FlatParameters.zero_grad"
        buckets = self._buckets_of[index]
        late = "a gradient changed after its sum had started: one backward after prepare"
        assert buckets[0] >= self.num_started, late
        for bucket in buckets:
            self._missing[bucket].discard(index)
        # In order, however early a later one is ready: collectives pair up by the order of their start.
        while self.num_started < len(self._buckets) and not self._missing[self.num_started]:
            self._begin_next()

    def _begin_next(self) -> None:
        part = self._slices[self.num_started]
        if self._loss_scale is not None and self._clip_before is None:
            part.div_(self._loss_scale)
        self._begin(part)
        self.num_started += 1

    def _begin(self, part: Tensor) -> None:
        stream = self._streams[len(self._chains) % len(self._streams)] if self._streams else None
        self._chains.append(PendingSum(self._sum(part), stream))

    def _has_steps(self) -> bool:
        """Whether a sum is more than one collective."""
        return self._in_bf16 and self._world.world_size > 1

    def _sum(self, part: Tensor) -> Steps:
        return all_reduced(part, RankGroup(self._world.rank, self._world.world_size), self._in_bf16)

    def _complete(self, chains: Sequence[PendingSum]) -> None:
        # Chain after chain, step after step: all ranks begin collectives in the same order.
        while chains:
            chains = [chain for chain in chains if chain.advance()]


def norm_of(x: Tensor) -> Tensor:
    """L2 norm of a flat float32 tensor, float64 scalar on its device: rows in float32, which is several times faster on
    a CPU, and the rows in float64. Infinite from 1.8e19 in one row on."""
    end = len(x) // NORM_ROW * NORM_ROW
    rows = torch.linalg.vector_norm(x[:end].view(end // NORM_ROW, NORM_ROW), dim=1)
    rest = torch.linalg.vector_norm(x[end:]).reshape(1)
    return torch.linalg.vector_norm(torch.cat([rows, rest]), dtype=torch.float64)


def clip_share(share: Tensor, limit: float, num_shares: int, loss_scale: Tensor | None) -> Tensor:
    """Clips one of the equal shares of the step's gradient to a norm, in place, before they are added up.

    The benchmark's rules for BERT let the gradient be clipped to its global norm either before or after the
    reduction; one run does one of them. The reference clips on each worker before it averages over the workers. Here
    losses carry the divisor of the whole step, so a rank's share is its own mean's gradient divided by the number of
    ranks: it counts times that number. With equally many samples a rank:

        sum over ranks of  clip(world_size * share, limit) / world_size

    Where a share is not finite, the sum is not either, on any rank, and the optimizer leaves the step out. Nothing
    waits for the host.

    Args:
        share: float [elements], changed in place.
        limit: the norm.
        num_shares: how many are added up.
        loss_scale: float32 scalar that the share is multiplied by, and is not any more afterwards; None: it is not.

    Returns:
        The norm before clipping of what the share stands for, a float64 scalar on its device.
    """
    scale = 1.0 if loss_scale is None else loss_scale
    norm = norm_of(share) * num_shares / scale
    share.mul_((limit / norm.clamp(min=limit) / scale).float())
    return norm
