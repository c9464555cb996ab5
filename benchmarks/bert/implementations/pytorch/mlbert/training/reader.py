"""Read steps from the source ahead of time, sum their counts over the ranks while the step before
them runs, and count what has been trained.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mlbert.data.batches import HostBatch
from mlbert.distributed.health import HealthMonitor
from mlbert.distributed.stages import Stage
from mlbert.distributed.world import World
from mlbert.runs.progress import StepCounts, TrainState
from mlbert.training.protocols import Model, Objective, Source
from mlbert.training.step import HostCopy, StepResult


@dataclass(frozen=True)
class Upcoming:
    """A step that is ready to run.

    Attributes:
        batches: this rank's micro-batches.
        divisors: divisor of each part of the loss.
        counts: counts over all ranks.
        warned: True if any rank was warned that the job is about to end.
        seconds: rank 0's clock when the counts were collected.
    """

    batches: Sequence[HostBatch]
    divisors: tuple[float, ...]
    counts: StepCounts
    warned: bool
    seconds: float


class BatchReader:
    """Reads the steps of a source in order.

    The counts of a step are summed while the step before it runs,
    so that no rank waits for the others in between.

    Args:
        source, objective, model: objects of the run; the model counts the FLOPs of a batch.
        world: the ranks; all of them call each method together.
        watch: receives this rank's progress.
        is_warned: returns True if this rank was warned that the job is about to end.

    Attributes:
        read_seconds: how long this rank has waited for the source.
    """

    def __init__(
        self,
        source: Source,
        objective: Objective,
        model: Model,
        world: World,
        watch: HealthMonitor,
        is_warned: Callable[[], bool],
    ) -> None:
        self._source = source
        self._objective = objective
        self._model = model
        self._world = world
        self._watch = watch
        self._is_warned = is_warned
        self.read_seconds = 0.0
        self._read: deque[Sequence[HostBatch]] = deque()  # the steps that were read and not taken
        self._counting: Callable[[], Upcoming] | None = None
        self._ready: Upcoming | None = None
        watch.expect_long_reads(lambda: source.is_preparing)

    def position(self) -> dict[str, Any]:
        """Return the source's position before the first step that was not taken."""
        return self._source.state_dict(back=len(self._read))

    def take(self, step: int) -> Upcoming:
        """Return the step that follows ``step`` completed steps.

        Waits for its counts unless `finish_count` did.
        """
        if self._ready is None and self._counting is None:
            self.begin_count(step, 0.0)
        ready = self._ready or self.finish_count(step)
        self._ready = None
        assert ready is not None, "it was begun"
        self._read.popleft()
        return ready

    def read_ahead(self, step: int) -> None:
        """Read a further step now, so that `begin_count` does not need to."""
        self._read_next(step, Stage.READ_AHEAD)

    def begin_count(self, step: int, seconds: float) -> None:
        """Read the next step unless it has been read, and start to sum its counts.

        ``seconds``: rank 0's clock.
        """
        if not self._read:
            self._read_next(step, Stage.READ)
        batches = self._read[0]
        for_loss = [
            sum(column) for column in zip(*map(self._objective.counts, batches), strict=True)
        ]
        samples = sum(b.num_samples for b in batches)
        tokens = sum(b.num_tokens for b in batches)
        flops = sum(map(self._model.training_flops, batches))
        clock_ms = round(seconds * 1000)
        # One all-reduce for everything: each further one would cost a round trip.
        numbers = [
            samples,
            tokens,
            flops,
            self._is_warned(),
            clock_ms if self._world.rank == 0 else 0,
            *for_loss,
        ]
        total = self._begin_sum(torch.tensor(numbers))
        self._counting = lambda: self._upcoming(batches, for_loss, total().tolist())

    def finish_count(self, step: int) -> Upcoming | None:
        """Wait for the counts of the step that was begun, if any, and return it;
        `take` will return it too.
        """
        counting = self._counting
        self._counting = None
        if counting is not None:
            self._watch.mark(step, Stage.COUNT)
            self._ready = counting()
        return self._ready

    def _read_next(self, step: int, stage: Stage) -> None:
        self._watch.mark(step, stage)
        began = time.monotonic()
        self._read.append(self._source.next_step())
        self.read_seconds += time.monotonic() - began

    def _begin_sum(self, numbers: Tensor) -> Callable[[], Tensor]:
        """Start a sum over the ranks, and return a function that waits for it."""
        if self._world.device.type == "cuda" and self._world.world_size > 1:
            # On the current stream, before the step that is queued next:
            # waiting for the sum does not wait for that.
            numbers = numbers.pin_memory().to(self._world.device, non_blocking=True)
            return HostCopy(self._world.all_reduce_sum(numbers)).read
        work = self._world.begin_all_reduce_sum(numbers)

        def wait() -> Tensor:
            if work is not None:
                work.wait()
            return numbers

        return wait

    def _upcoming(
        self, batches: Sequence[HostBatch], for_loss: Sequence[int], total: Sequence[int]
    ) -> Upcoming:
        samples, tokens, flops, warned, clock_ms, *for_loss_total = total
        if self._objective.scope == "rank":
            # Gradients are summed over ranks, but the objective needs their mean.
            divisors = tuple(self._world.world_size * d for d in self._objective.divisors(for_loss))
        else:
            divisors = self._objective.divisors(for_loss_total)
        return Upcoming(
            batches, divisors, StepCounts(samples, tokens, flops), bool(warned), clock_ms / 1000
        )


@dataclass(frozen=True)
class _Entry:
    result: StepResult
    step: int
    counts: StepCounts


class SampleCounter:
    """Counts the samples of one run before the results of its steps are known, and subtracts those
    of a step again if its update was skipped.

    On a CUDA device a step's result is read only after the next step is queued, so that the device
    never waits for the host. Until then the step counts as if it had changed the weights.

    Args:
        state: the run's progress, updated in place.
        skipped: called when an update turns out to have been skipped, with the state at that step.
    """

    def __init__(self, state: TrainState, skipped: Callable[[TrainState], None]) -> None:
        self._state = state
        self._skipped = skipped
        self._open: _Entry | None = None

    @property
    def is_open(self) -> bool:
        """True while the last step's result is not known."""
        return self._open is not None

    def count(self, result: StepResult, counts: StepCounts) -> None:
        """Record a queued step and finalize the previous one."""
        self.settle()
        self._state.step += 1
        self._state.add(counts)
        self._open = _Entry(result, self._state.step, counts)

    def settle(self) -> None:
        """Wait for the last step, and subtract its samples if its update was skipped."""
        entry = self._open
        self._open = None
        if entry is None or not entry.result.skipped:
            return
        self._state.skipped_steps += 1
        self._state.add(entry.counts, sign=-1)
        self._skipped(replace(self._state, step=entry.step))
