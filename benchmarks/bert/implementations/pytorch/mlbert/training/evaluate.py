"""An objective's metrics on the full evaluation set, sharded over ranks.

On a CUDA device an evaluation costs the host almost nothing: the samples stay on the device in
compact form, every batch is padded to the shape of a captured graph (or to one common shape), and
no result is read before the end.

`Evaluator.begin` returns once everything is queued; `Evaluation.result` waits. In between, the host
prepares the next training steps: it reads micro-batches. No training step is queued before the
result is known, although the rules allow it. The clock runs until the target is known to be
reached, so a step queued after the last evaluation would delay `run_stop` and change the weights
that are exported, unless every evaluation copied them. It would save only the time that the device
waits for one answer from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from mlbert.data.batches import Batch, HostBatch, StaticShape
from mlbert.distributed.capture import Capture
from mlbert.distributed.world import World
from mlbert.training.protocols import Model, Objective
from mlbert.training.step import HostCopy, OnProgress


class Evaluation:
    """The result of a queued evaluation.

    Args:
        objective: computes metrics from the sums.
        sums: float64 [names] on the device, over all ranks. Copied now, in stream order.
        rows: float64 [samples, columns] of all ranks, or None.
    """

    def __init__(self, objective: Objective, sums: Tensor, rows: Tensor | None) -> None:
        self._objective = objective
        self._sums = HostCopy(sums)
        self._rows = rows

    def result(self) -> dict[str, float]:
        """Wait for the objective's metrics over the full set and return them;
        they are the same on all ranks.

        Sums are added before the division, so sharding does not change a metric.
        """
        return self._objective.metrics(self._sums.read().tolist(), self._rows)


@dataclass(frozen=True)
class _EvaluationGraph:
    """A graph: the shape it accepts, the batch it reads, and its function, called or replayed."""

    static_shape: StaticShape
    target: Batch
    function: Callable[[], None]
    replay: Callable[[], None]


class Evaluator:
    """Evaluate a model repeatedly on the same batches.

    Args:
        model: on its device.
        objective: defines the sums and metrics.
        batches: this rank's batches. Read once if they stay on the device,
            otherwise at every evaluation.
        world: the ranks.
        capture: captures one graph per static shape when `record` is called.
            Without it there are no graphs.
        static_shapes: shapes of the graphs, smallest first.
            A batch that exceeds all of them runs without a graph.
        resident: keep the batches on the device, padded to one shape.
            The default (None) does so on CUDA and with graphs.
    """

    def __init__(
        self,
        model: Model,
        objective: Objective,
        batches: Iterable[HostBatch],
        world: World,
        capture: Capture | None = None,
        static_shapes: Sequence[StaticShape] = (),
        resident: bool | None = None,
    ) -> None:
        self._model = model
        self._objective = objective
        self._batches = batches
        self._world = world
        self._capture = capture
        self._device = next(model.parameters()).device
        self._sums = torch.zeros(len(objective.sum_names), dtype=torch.float64, device=self._device)
        self._resident = (
            self._device.type == "cuda" or capture is not None if resident is None else resident
        )
        self._kept: list[HostBatch] | None = None
        self._target: Batch | None = None  # large enough for every resident batch that has no graph
        self._static_shapes = static_shapes
        self._graphs = list[_EvaluationGraph]()

    @torch.no_grad()
    def record(self) -> None:
        """Capture the graphs, before any sample is read."""
        if self._capture is None or self._objective.num_columns:
            return
        self._model.train(False)
        with self._model.recording():
            self._model.is_calibrated = True
            self._model.refresh()
            for static_shape in reversed(
                self._static_shapes
            ):  # largest first: the smaller ones reuse its memory
                target = static_shape.allocate(self._device)
                function = partial(self._add, target)
                self._capture.warm_up(function)
                self._graphs.insert(
                    0,
                    _EvaluationGraph(
                        static_shape, target, function, self._capture.record(function)
                    ),
                )
        self._model.train()

    @torch.no_grad()
    def begin(self, on_progress: OnProgress = iter) -> Evaluation:
        """Queue an evaluation of the current weights.

        On a GPU this does not wait, unless the objective needs rows.

        Args:
            on_progress: wraps the iterable of batches, which is consumed one at a time.
        """
        self._model.train(False)
        self._sums.zero_()
        self._model.refresh()  # once for all batches: a graph only reads the copies
        rows = None
        if self._objective.num_columns:
            rows = self._with_rows(on_progress)
        elif self._resident:
            self._over_kept(on_progress)
        else:
            for batch in on_progress(self._batches):
                self._add(batch.to(self._device))
        self._model.train()
        self._world.all_reduce_sum(self._sums)
        return Evaluation(self._objective, self._sums, rows)

    def _with_rows(self, on_progress: OnProgress) -> Tensor:
        """Return the rows of all ranks, for metrics that sums cannot give,
        such as a rank correlation.
        """
        rows = [torch.empty(0, self._objective.num_columns, dtype=torch.float64)]
        for batch in on_progress(self._batches):
            moved = batch.to(self._device)
            self._add(moved)
            rows.append(self._objective.rows(self._model, moved).cpu())
        return self._world.gather_rows(torch.cat(rows))

    def _over_kept(self, on_progress: OnProgress) -> None:
        if self._kept is None:
            self._kept = [
                replace(batch, data=batch.data.to(self._device)) for batch in self._batches
            ]
            others = [batch for batch in self._kept if self._graph_for(batch) is None]
            self._target = StaticShape.over(others).allocate(self._device) if others else None
        for batch in on_progress(self._kept):
            graph = self._graph_for(batch)
            if graph is None:
                self._add(batch.to(self._device, out=self._target))
            else:
                batch.to(self._device, out=graph.target)
                (graph.replay if self._model.is_calibrated else graph.function)()

    def _graph_for(self, batch: HostBatch) -> _EvaluationGraph | None:
        return next((graph for graph in self._graphs if graph.static_shape.holds(batch)), None)

    def _add(self, batch: Batch) -> None:
        self._sums += self._objective.sums(self._model, batch)


def evaluate(
    model: Model,
    objective: Objective,
    batches: Iterable[HostBatch],
    world: World,
    on_progress: OnProgress = iter,
) -> dict[str, float]:
    """Return the objective's metrics over every sample of the set;
    see `Evaluator.begin` and `Evaluation.result`.
    """
    return Evaluator(model, objective, batches, world).begin(on_progress).result()
