"""One optimizer step on inputs of fixed sizes, captured once as a graph and replayed for every batch.

    segmented        forward and backward of a micro-batch is the graph; what the gradients are cleared by, their
                     reduction and the update run outside, as without graphs
    full_iteration   all of a step from clearing the gradients to the new weights, collectives included, is the graph

Whatever differs between steps is written into tensors before a replay: the batch, filled up to a `Budget`; the dropout
keys; what the losses are divided by; the learning rate. A replay gives the bits that the same functions give when they
are called (capture by `NoCapture`), given the same bits to start from.

Legend: L layers; a step's micro-batches are of one budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from mlbert.dist.capture import Capture
from mlbert.feed.batch import Batch
from mlbert.feed.budget import Budget
from mlbert.feed.compact import CompactBatch
from mlbert.models.bert import BertForPreTraining
from mlbert.models.encoder import Keys
from mlbert.models.objectives import PreTraining

NUM_DIVISORS = 2


class GraphMode(Enum):
    """How much of a step is one graph; see the module docstring."""

    SEGMENTED = "segmented"
    FULL_ITERATION = "full_iteration"


class Gradients(Protocol):
    """Flat gradients; see `mlbert.optim.flat`."""

    grad: Tensor

    def zero_grad(self) -> None:
        """Clears the gradients."""


class Optimizer(Protocol):
    """An optimizer; see `mlbert.optim.base`. A whole iteration needs the three methods that follow `step`."""

    @property
    def num_updates(self) -> int:
        """Updates made so far."""

    def step(self, lr: float) -> Any:
        """One update and its result."""

    def set_learning_rate(self, lr: float) -> None:
        """The rate of the next `launch`."""

    def launch(self) -> None:
        """Queues one update."""

    def result(self) -> Any:
        """What the last `launch` did."""


class Reducer(Protocol):
    """Gradient reduction over ranks; see `mlbert.dist.reduce`."""

    def prepare(self, last: bool) -> None:
        """Announces a backward pass."""

    def finish(self) -> None:
        """Waits until every gradient is the sum over ranks."""


class GraphedStep:
    """An optimizer step of which a part, or all, is replayed.

    Args:
        model: on its device, with parameters whose gradients are views of `flat.grad`.
        flat: the gradients.
        optimizer: on the same buffers.
        budget: of one micro-batch.
        micro_batches: of one step on this rank.
        mode: what a graph holds.
        capture: `CudaCapture`, or `NoCapture` for the same step without graphs.
        reducer: sums gradients over the ranks; None for one rank.
        over_ranks: raises a tensor to the ranks' largest values, in place, for FP8 scales; None for one rank.

    Call `record` once, on all ranks together, before the first step.
    """

    def __init__(
        self,
        model: BertForPreTraining,
        flat: Gradients,
        optimizer: Optimizer,
        budget: Budget,
        micro_batches: int,
        mode: GraphMode,
        capture: Capture,
        reducer: Reducer | None = None,
        over_ranks: Callable[[Tensor], Any] | None = None,
    ) -> None:
        self.budget, self.mode, self.micro_batches = budget, mode, micro_batches
        self._model, self._flat, self._optimizer, self._reducer = model, flat, optimizer, reducer
        self._over_ranks = over_ranks or (lambda magnitudes: magnitudes)
        self._capture = capture
        device = flat.grad.device
        copies = micro_batches if mode is GraphMode.FULL_ITERATION else 1
        self._batches = [budget.allocate(device) for _ in range(copies)]
        self._objective = PreTraining("step")
        keys = model.dropout_keys(0, 0)
        # Keys and divisors, bit by bit, so that one copy brings both.
        self._numbers = torch.zeros(keys.numel() + NUM_DIVISORS, dtype=torch.int32, device=device)
        self._keys: Keys = self._numbers[:-NUM_DIVISORS].view(keys.shape)
        self._divisors = self._numbers[-NUM_DIVISORS:].view(torch.float32).unbind()
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._replay: Callable[[], None] | None = None

    def holds(self, batches: Sequence[Batch | CompactBatch]) -> bool:
        """Whether a step of these micro-batches fits the graph."""
        return len(batches) == self.micro_batches and all(self.budget.holds(batch) for batch in batches)

    def record(self) -> None:
        """Warms up and captures. Weights, moments and scales are afterwards as before, and gradients are zero."""
        updates = self._optimizer.num_updates
        with self._model.recording():  # an uncalibrated step is never replayed
            # Divisors of 0 make gradients that are not finite, and such an update changes nothing.
            self._write_numbers(0, 0, (0.0, 0.0))
            self._flat.zero_grad()
            self._model.refresh()
            function = self._iteration if self.mode is GraphMode.FULL_ITERATION else self._micro_batch
            self._capture.warm_up(function)
            self._replay = self._capture.record(function)
            self._flat.zero_grad()
            assert self._optimizer.num_updates == updates, "a warm-up step changed the weights"

    def __call__(
        self,
        batches: Iterable[Batch | CompactBatch],
        seed: int,
        step: int,
        num_masked: int,
        num_samples: int,
        lr: float,
    ) -> tuple[Tensor, Any]:
        """One optimizer step; nothing waits for the device.

        Args:
            batches: this rank's micro-batches, which must be held; on any device.
            seed, step: name the dropout masks, see `BertBase.dropout_keys`.
            num_masked, num_samples: masked tokens and sequences of the step over all ranks.
            lr: learning rate.

        Returns:
            (float64 scalar on the device, this rank's part of the step's loss, valid until the next step; the
            optimizer's result).
        """
        self._write_numbers(seed, step, self._objective.divisors((num_masked, num_samples)))
        if self.mode is GraphMode.FULL_ITERATION:
            result = self._whole_step(batches, lr)
        else:
            result = self._segmented_step(batches, lr)
        return self._loss_sum, result

    def _whole_step(self, batches: Iterable[Batch | CompactBatch], lr: float) -> Any:
        for batch, target in zip(batches, self._batches, strict=True):
            self.budget.write(batch, target)
        self._optimizer.set_learning_rate(lr)
        self._run(self._iteration)
        self._model.weights_changed()  # a replay changes the weights behind the host's back
        return self._optimizer.result()

    def _segmented_step(self, batches: Iterable[Batch | CompactBatch], lr: float) -> Any:
        self._clear()
        self._model.refresh()  # once for all micro-batches: their graph only reads the copies
        for batch in batches:
            self.budget.write(batch, self._batches[0])
            self._run(self._micro_batch)
        if self._reducer:
            self._reducer.finish()
        result = self._optimizer.step(lr)
        self._model.end_step(self._over_ranks)
        return result

    def _run(self, function: Callable[[], None]) -> None:
        """Replays the function, or calls it where FP8 scales are not known yet: then each tensor finds its own."""
        assert self._replay is not None, "record() first"
        (self._replay if self._model.is_calibrated else function)()

    def _micro_batch(self) -> None:
        self._forward_backward(self._batches[0])

    def _iteration(self) -> None:
        self._model.weights_changed()
        self._clear()
        for i, batch in enumerate(self._batches):
            if self._reducer:
                self._reducer.prepare(last=i == len(self._batches) - 1)
            self._forward_backward(batch)
        if self._reducer:
            self._reducer.finish()
        self._optimizer.launch()
        self._model.end_step(self._over_ranks)

    def _clear(self) -> None:
        self._flat.zero_grad()
        self._loss_sum.zero_()

    def _forward_backward(self, batch: Batch) -> None:
        loss = self._objective.loss(self._model, batch, self._keys, self._divisors)
        loss.backward()
        self._loss_sum += loss.detach()

    def _write_numbers(self, seed: int, step: int, divisors: tuple[float, ...]) -> None:
        keys = self._model.dropout_keys(seed, step).flatten()
        numbers = torch.cat([keys, torch.tensor(divisors, dtype=torch.float32).view(torch.int32)])
        # The allocator gives page-locked memory to nobody else before the copy is made.
        numbers = numbers.pin_memory() if self._numbers.is_cuda else numbers
        self._numbers.copy_(numbers, non_blocking=True)
