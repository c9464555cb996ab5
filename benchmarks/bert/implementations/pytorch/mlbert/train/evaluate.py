"""Masked-LM accuracy on the whole evaluation set, sharded over ranks.

On a CUDA device an evaluation costs the host next to nothing: the samples stay on the device in compact form, every
batch is filled up to one shape, so that one graph serves all of them, and nothing is read before the end.

`Evaluator.begin` returns when all is queued, and `Evaluation.result` waits. In between the host makes the next training
step ready: it takes the micro-batches and agrees on their numbers with the other ranks. No training step is queued
before the accuracy is known, though the rules would allow it: the clock runs until the target is known to be reached,
so a step behind the last evaluation delays `run_stop`, and it changes the weights that are written, unless a copy of
them is taken at every evaluation. All that it could save is the device's wait for one answer of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from mlbert.dist.capture import Capture
from mlbert.dist.world import World
from mlbert.feed.batch import Batch
from mlbert.feed.budget import Budget
from mlbert.feed.compact import CompactBatch
from mlbert.models.bert import BertForPreTraining
from mlbert.models.objectives import PreTraining
from mlbert.optim.host_copy import HostCopy

Passing = Callable[[Iterable[Any]], Iterable[Any]]


class EvaluationSet(Protocol):
    """This rank's share of the evaluation samples."""

    num_examples: int

    def open(self) -> None:
        """First touch of the data."""

    def __iter__(self) -> Iterator[Batch]:
        """This rank's batches, the same at each pass."""


def evaluate(model: BertForPreTraining, batches: Iterable[Batch], world: World) -> tuple[float, float]:
    """Accuracy and mean loss over every masked token of the set; see `Evaluation.result`."""
    return Evaluator(model, batches, world).begin().result()


class Evaluation:
    """The result of an evaluation that is queued.

    Args:
        sums: float64 [3] on the device: right predictions, summed loss, masked tokens, over all ranks. Their values are
            taken now, in stream order.
    """

    def __init__(self, sums: Tensor) -> None:
        self._sums = HostCopy(sums)

    def result(self) -> tuple[float, float]:
        """Accuracy and mean loss over every masked token of the set, the same on all ranks; waits for them.

        The accuracy is the benchmark's: hits divided by masked tokens, each token counting once. The tokens are summed
        before the division, so sharding does not change the accuracy.
        """
        num_correct, loss_sum, num_masked = self._sums.read().tolist()
        if num_masked == 0:
            raise AssertionError("the evaluation set holds no masked token")
        return num_correct / num_masked, loss_sum / num_masked


class Evaluator:
    """Evaluates a model again and again on the same batches.

    Args:
        model: on its device.
        batches: this rank's; read at the first evaluation, and at every one unless they stay on the device.
        world: the ranks.
        capture: makes the graph of one batch; None: no graph.
        resident: keep the batches on the device, filled up to one shape; None: on CUDA, and for a graph.
    """

    def __init__(
        self,
        model: BertForPreTraining,
        batches: Iterable[Batch],
        world: World,
        capture: Capture | None = None,
        resident: bool | None = None,
    ) -> None:
        self._model, self._batches, self._world, self._capture = model, batches, world, capture
        self._device = next(model.parameters()).device
        self._sums = torch.zeros(3, dtype=torch.float64, device=self._device)
        is_cuda = self._device.type == "cuda"
        self._resident = is_cuda or capture is not None if resident is None else resident
        self._kept: list[CompactBatch] | None = None
        self._target: Batch | None = None  # the one batch of the graph; its shape holds every kept one
        self._replay: Callable[[], None] | None = None

    @torch.no_grad()
    def begin(self, each: Passing = iter) -> Evaluation:
        """Queues an evaluation of the weights as they are; on a GPU nothing waits for it.

        Args:
            each: passes the batches on, one when it is asked for.
        """
        self._model.eval()
        self._sums.zero_()
        self._model.refresh()  # once for all batches: a graph only reads the copies
        num_masked = self._over_kept(each) if self._resident else self._over_given(each)
        self._sums[2].fill_(num_masked)
        self._model.train()
        self._world.all_reduce_sum(self._sums)
        return Evaluation(self._sums)

    def _over_given(self, each: Passing) -> int:
        num_masked = 0
        for batch in each(self._batches):
            self._add(batch.to(self._device))
            num_masked += batch.num_masked
        return num_masked

    def _over_kept(self, each: Passing) -> int:
        if self._kept is None:
            self._kept = [self._keep(batch) for batch in self._batches]
            self._target = Budget.over(self._kept).allocate(self._device) if self._kept else None
        for batch in each(self._kept):
            batch.to(self._device, out=self._target)
            if self._capture is None or not self._model.is_calibrated:
                self._add_target()
            else:
                self._replay = self._replay or self._record(self._capture)
                self._replay()
        return sum(batch.num_masked for batch in self._kept)

    def _keep(self, batch: Batch) -> CompactBatch:
        compact = CompactBatch.of(batch)
        return replace(compact, data=compact.data.to(self._device))

    def _record(self, capture: Capture) -> Callable[[], None]:
        """The graph of one batch; leaves the sums as they are."""
        sums = self._sums.clone()
        capture.warm_up(self._add_target)
        replay = capture.record(self._add_target)
        self._sums.copy_(sums)
        return replay

    def _add_target(self) -> None:
        assert self._target is not None
        self._add(self._target)

    def _add(self, batch: Batch) -> None:
        self._sums[:2] += PreTraining("step").sums(self._model, batch)[:2]
