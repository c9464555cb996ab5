"""Read steps from the source, optionally one ahead, and sum their counts over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mlbert.data.loading.batches import HostBatch
from mlbert.distributed.health import HealthMonitor, Stage
from mlbert.distributed.world import World
from mlbert.runs.progress import StepCounts
from mlbert.training.protocols import Model, Objective, Source


@dataclass(frozen=True)
class Upcoming:
    """A step that is ready to run.

    Attributes:
        batches: this rank's micro-batches.
        divisors: divisor of each part of the loss.
        counts: counts over all ranks.
        warned: True if any rank was warned that the job is about to end.
    """

    batches: Sequence[HostBatch]
    divisors: tuple[float, ...]
    counts: StepCounts
    warned: bool


class BatchReader:
    """Reads the steps of a source in order.

    Args:
        source, objective, model: objects of the run; the model counts the FLOPs of a batch.
        world: the ranks; all of them call `take` and `read_ahead` together.
        watch: receives this rank's progress.
        is_warned: returns True if this rank was warned that the job is about to end.
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
        self._source, self._objective, self._model = source, objective, model
        self._world, self._watch, self._is_warned = world, watch, is_warned
        self._ahead: Upcoming | None = None
        watch.expect_long_reads(lambda: source.is_preparing)

    def take(self, step: int) -> Upcoming:
        """Return the step that follows ``step`` completed steps."""
        ready, self._ahead = self._ahead or self._make_ready(step, Stage.READ, Stage.COUNT), None
        return ready

    def read_ahead(self, step: int) -> None:
        """Prepare the next step now. The source's position moves past it."""
        self._ahead = self._make_ready(step, Stage.READ_AHEAD, Stage.COUNT_AHEAD)

    def _make_ready(self, step: int, reading: Stage, counting: Stage) -> Upcoming:
        """Read and count the next step without waiting for the device."""
        self._watch.mark(step, reading)
        batches = self._source.next_step()
        self._watch.mark(step, counting)
        for_loss = [sum(column) for column in zip(*map(self._objective.counts, batches), strict=True)]
        samples, tokens = sum(b.num_samples for b in batches), sum(b.num_tokens for b in batches)
        flops = sum(map(self._model.training_flops, batches))
        # One all-reduce for everything: each further one would cost a round trip.
        numbers = torch.tensor([samples, tokens, flops, self._is_warned(), *for_loss])
        samples, tokens, flops, warned, *total = self._world.all_reduce_sum(numbers).tolist()
        if self._objective.scope == "rank":
            # Gradients are summed over ranks, but the objective needs their mean.
            divisors = tuple(self._world.world_size * d for d in self._objective.divisors(for_loss))
        else:
            divisors = self._objective.divisors(total)
        return Upcoming(batches, divisors, StepCounts(samples, tokens, flops), bool(warned))
