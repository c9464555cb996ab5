"""Sum gradients over ranks while backward is still running.

The flat gradient buffer is cut into buckets from its end, because backward finishes the last layers
first. When all parameters of a bucket have their gradients, its sum over the ranks starts and
overlaps the rest of backward:

    prepare(last=False)  backward  ...
    prepare(last=True)  backward (buckets start)  finish()  optimizer step

All ranks start the buckets in the same order, so a bucket
that is ready early waits for those before it.

Gradients are sent in float32 or bfloat16:

    fp32    one float32 collective
    bf16    each rank sends every other rank its part of the buffer, rounded to bfloat16
            (all-to-all). Each rank adds up what it received in float32, in rank order. If all ranks
            need the full sum, it is rounded again and sent to all (all-gather). Half the bytes.

Let u = 2^-8, half the spacing of bfloat16 numbers near 1, and g_r the ranks' addends. Apart from
float32 rounding, the error is at most u sum |g_r| if each rank keeps its part of the sum, and u
|sum| more if all ranks keep all of it. A library's bfloat16 sum may instead round at every hop.
Each element is added up once, on one rank, so all ranks get the same bits, and the same ones in
every run.

A sum is a generator of collectives, each of which starts when the previous one is done.
`PendingSum` runs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlbert.distributed.groups import RankGroup
from mlbert.distributed.world import World

NUM_STREAMS = 4  # used in turn by sums of several collectives
NORM_ROW = 4096  # elements per row whose norm is computed in float32
Steps = Iterator[dist.Work | None]


def all_reduced(part: Tensor, group: RankGroup, in_bf16: bool) -> Steps:
    """Sum a float32 tensor [n] of any length over the group, in place on each rank."""
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
    """Sum a float32 buffer over the group in place.

    Each rank keeps part `rank` of `size` equal parts.

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
    """Sum bfloat16 [size * n] to float32 [n], in rank order."""
    return received.view(size, -1).sum(0, dtype=torch.float32)


class PendingSum:
    """A running sum.

    On a GPU all its collectives are queued at once, on ``stream``, after the work queued on the
    current stream. On a CPU, where waiting blocks the host, the first collective starts now and
    `advance` starts the others.

    Args:
        steps: the sum.
        stream: side stream, or None to run as on a CPU. On a GPU, None is enough if the sum is a
            single collective with nothing after it.
    """

    def __init__(self, steps: Steps, stream: torch.cuda.Stream | None) -> None:
        self._steps = steps
        self._stream = stream
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
        """Wait for the current collective and start the next one.

        Return False once the sum is complete.

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


@dataclass(frozen=True)
class Bucket:
    """A slice of the flat gradient buffer that is summed by one collective."""

    start: int  # elements of the buffer
    stop: int
    parameters: range  # indices of the parameters in it


def cut_buckets(offsets: Sequence[int], numel: int, bucket_elements: int) -> list[Bucket]:
    """Cut a buffer of `numel` elements, with parameters at ascending `offsets`, into buckets,
    last first.

    A bucket is closed once it has at least `bucket_elements`.
    Parameters are never split, so it may be longer.
    """
    buckets: list[Bucket] = []
    stop = numel
    end = len(offsets)
    for index in range(len(offsets) - 1, -1, -1):
        if stop - offsets[index] >= bucket_elements or index == 0:
            buckets.append(Bucket(offsets[index], stop, range(index, end)))
            stop = offsets[index]
            end = index
    return buckets


class GradientReducer:
    """All-reduces (sums) a flat gradient buffer, overlapping backward.

    Does nothing for a single process.

    Losses are divided by counts of the full step (all ranks and micro-batches), so the sum is the
    gradient. A loss scale is divided out of each bucket before it is sent.

    Args:
        params: parameters in buffer order; each `.grad` is a view of the buffer. A tied parameter
            is listed once and is ready when all its uses have contributed.
        flat_grad: [elements], on any device that the world's backend supports.
        offsets: first element of each parameter, ascending.
        world: already started.
        buckets: buckets of the buffer in summation order; see `cut_buckets`.
        clip_before: norm to which each rank clips its share of the gradient before the sum, if any;
            see `clip_share`. Nothing may be clipped after it then, and buckets start only after
            backward.
        loss_scale: float32 scalar that the losses are multiplied by, if any.
        in_bf16: send gradients in bfloat16; see the module docstring.

    Attributes:
        num_buckets: buckets per step.
        num_overlapped: buckets whose sum started before backward ended, in the last finished step.
        grad_norm: float64 scalar written by `finish`,
            if the subclass computes the norm on the way; otherwise None.
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
        self._clip_before = clip_before
        self._loss_scale = loss_scale
        self._buckets = list(buckets)
        self._slices = [flat_grad[bucket.start : bucket.stop] for bucket in self._buckets]
        # Where backward must write each gradient: the buffer is useless
        # if autograd replaces a .grad tensor.
        self._addresses = [
            flat_grad.data_ptr() + offset * flat_grad.element_size() for offset in offsets
        ]
        self._buckets_of = [
            [n for n, b in enumerate(self._buckets) if i in b.parameters]
            for i in range(len(params))
        ]
        self._armed = False
        self._missing: list[set[int]] = []  # per bucket, the parameters without a gradient so far
        self._in_bf16 = in_bf16
        # One bucket can use one link while the next uses another, or is being added up.
        num_streams = NUM_STREAMS if flat_grad.is_cuda and self._has_steps() else 0
        self._streams = [torch.cuda.Stream(flat_grad.device) for _ in range(num_streams)]
        self._chains: list[PendingSum] = []
        self.num_buckets = len(self._buckets)
        self.num_started = 0  # buckets started in the current pass
        self.num_overlapped = 0
        self._is_alone = world.world_size == 1
        hooked = [] if self._is_alone else [(n, p) for n, p in enumerate(params) if p.requires_grad]
        self._hooks = [
            param.register_post_accumulate_grad_hook(
                lambda _, index=index: self._on_gradient(index)
            )
            for index, param in hooked
        ]

    def warm_up(self) -> None:
        """Run every gradient collective once, at its real size, on a zero gradient,
        which stays zero.

        This connects the ranks of every group: libraries connect lazily, with a transport chosen by
        size. All ranks call it together.
        """
        self._world.warm_up(self._flat_grad.device)
        self.prepare(last=True)
        self.finish()

    def prepare(self, last: bool) -> None:
        """Call before each micro-batch's backward; `last` if gradients are complete after it."""
        assert self.num_started == 0, "finish() was not called after the last backward"
        if last and self._clip_before is None:
            self._arm()

    def _arm(self) -> None:
        """Let the hooks start buckets."""
        self._armed = not self._is_alone
        if self._armed:
            self._missing = [
                {i for i in b.parameters if self._params[i].requires_grad} for b in self._buckets
            ]

    def finish(self) -> None:
        """Clip if `clip_before`, start the buckets that backward did not start,
        and wait for all of them.

        Parameters without a gradient keep a bucket from starting during backward.

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
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _on_gradient(self, index: int) -> None:
        if not self._armed:
            return
        grad = self._params[index].grad
        assert grad is not None, "gradients are views of the buffer"
        assert grad.data_ptr() == self._addresses[index], (
            "a .grad was replaced: use FlatParameters.zero_grad"
        )
        buckets = self._buckets_of[index]
        late = "a gradient changed after its sum had started: one backward after prepare"
        assert buckets[0] >= self.num_started, late
        for bucket in buckets:
            self._missing[bucket].discard(index)
        # In order, even if a later bucket is ready first:
        # ranks match collectives by the order in which they start.
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
        """Return True if a sum is more than one collective."""
        return self._in_bf16 and self._world.world_size > 1

    def _sum(self, part: Tensor) -> Steps:
        return all_reduced(part, RankGroup(self._world.rank, self._world.world_size), self._in_bf16)

    def _complete(self, chains: Sequence[PendingSum]) -> None:
        # One step of each chain at a time, so that all ranks start collectives in the same order.
        while chains:
            chains = [chain for chain in chains if chain.advance()]


def norm_of(x: Tensor) -> Tensor:
    """Return the L2 norm of a flat float32 tensor, a float64 scalar on its device.

    Norms of rows are computed in float32, several times faster on a CPU, and combined in float64.
    Infinite if a row's norm exceeds 1.8e19.
    """
    end = len(x) // NORM_ROW * NORM_ROW
    rows = torch.linalg.vector_norm(x[:end].view(end // NORM_ROW, NORM_ROW), dim=1)
    rest = torch.linalg.vector_norm(x[end:]).reshape(1)
    return torch.linalg.vector_norm(torch.cat([rows, rest]), dtype=torch.float64)


def clip_share(share: Tensor, limit: float, num_shares: int, loss_scale: Tensor | None) -> Tensor:
    """Clip one rank's share of the step's gradient to a norm, in place,
    before the shares are summed.

    The benchmark's rules for BERT allow clipping to the global norm before or after the reduction,
    but not both in one run. The reference clips on each worker before it averages over the workers.
    Here losses are divided by counts of the full step, so a rank's share is the gradient of its own
    mean divided by the number of ranks, and is multiplied by that number before clipping. With the
    same number of samples on each rank, the sum is

        sum over ranks of  clip(world_size * share, limit) / world_size

    If a share is not finite, neither is the sum, on any rank, and the optimizer skips the step.
    The host does not wait.

    Args:
        share: float [elements], changed in place.
        limit: the norm.
        num_shares: number of shares that are summed.
        loss_scale: float32 scalar that the share is multiplied by, if any; divided out here.

    Returns:
        The norm of ``num_shares`` times the unscaled share before clipping,
            a float64 scalar on its device.
    """
    scale = 1.0 if loss_scale is None else loss_scale
    norm = norm_of(share) * num_shares / scale
    share.mul_((limit / norm.clamp(min=limit) / scale).float())
    return norm
