"""How a part of the gradient is summed over ranks: as it is, or travelling in bfloat16.

    fp32    one collective of float32
    bf16    every rank sends each other one its part of the buffer, rounded to bfloat16 (all-to-all); each adds up what
            it got in float32, in the order of ranks. Where all need the whole sum, it travels rounded once more
            (all-gather). Half the bytes.

With u = 2^-8, half the distance of two bfloat16 numbers near 1, and g_r the ranks' addends: a sum of which each rank
keeps its part is off by at most u sum |g_r| besides float32's own rounding, and one that all keep by u |sum| more. A
library's own sum in bfloat16 may round at every hop instead. Each sum is added up once, on one rank, so all get the
same bits, and the same ones in every run.

A sum is a generator of collectives, each of which begins when the one before is done. `Chain` runs it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from mlbert.distributed.groups import RankGroup

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


class Chain:
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
