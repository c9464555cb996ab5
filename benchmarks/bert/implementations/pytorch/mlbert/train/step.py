"""One optimizer step: from this rank's micro-batches to new weights. The same functions run called and replayed.

                      called    segmented    full_iteration
    clear gradients   |         |            |
    forward, backward |         | graph      | one
    reduce            |         |            | graph
    update            |         |            |

Whatever differs between steps is written into memory of the device before a replay: the batch, filled up to a `Budget`;
the dropout keys; what the losses are divided by; the learning rate. A replay gives the bits that the same functions
give when they are called (capture by `NoCapture`), given the same bits to start from.

A step runs without graphs where its batches exceed the budget, and while the model still learns its scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from mlbert.core.errors import UserError
from mlbert.dist.capture import Capture, CudaCapture
from mlbert.feed.batch import Batch
from mlbert.feed.budget import Budget
from mlbert.feed.host_batch import HostBatch
from mlbert.train.host_copy import HostCopy
from mlbert.train.protocols import FlatBuffers, GradientSync, Keys, LossScale, Method, Model, Objective, Optimizer

SETTING = "CUDA_GRAPH_MODE"
WARM_UP_TOKENS = 8

Passing = Callable[[Iterable[Any]], Iterable[Any]]


class GraphMode(Enum):
    """How much of a step is one graph; see the module docstring."""

    SEGMENTED = "segmented"
    FULL_ITERATION = "full_iteration"


@dataclass(frozen=True)
class Graphs:
    """How steps become graphs.

    Attributes:
        mode: what a graph holds.
        budget: of one micro-batch.
        micro_batches: of one step on this rank.
        capture: gives a `CudaCapture` with a memory pool of its own, or a `NoCapture` for the same without graphs.
    """

    mode: GraphMode
    budget: Budget
    micro_batches: int
    capture: Callable[[], Capture]


class StepResult:
    """What a step did; reading it waits for the device to have done that step, not for what is queued behind it.

    Args:
        loss_sum: float64 scalar on the device, this rank's part of the step's loss; valid until the next step.
        grad_norm: float64 scalar on the device, taken now, in stream order.
    """

    def __init__(self, loss_sum: Tensor, grad_norm: Tensor) -> None:
        self.loss_sum, self._grad_norm = loss_sum, HostCopy(grad_norm)

    @property
    def grad_norm(self) -> float:
        """Norm of the whole gradient before clipping."""
        return float(self._grad_norm.read())

    @property
    def skipped(self) -> bool:
        """Whether the update was left out."""
        return not math.isfinite(self.grad_norm)


class Step:
    """Makes steps with a model's objects.

    Args:
        model, objective, flat, sync, optimizer: see `mlbert.train.protocols.Method`.
        over_ranks: raises a tensor to the ranks' largest values, in place.
        say: told, once, that a step runs without its graph.
        graphs: how steps become graphs; then call `record` once, on all ranks together, before the first step.
            None: they do not.
        loss_scale: see `mlbert.train.protocols.Method`.
    """

    def __init__(
        self,
        model: Model,
        objective: Objective,
        flat: FlatBuffers,
        sync: GradientSync,
        optimizer: Optimizer,
        over_ranks: Callable[[Tensor], Any],
        say: Callable[[str], object],
        graphs: Graphs | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.graphs, self._say, self._has_said = graphs, say, False
        self._model, self._objective, self._flat, self._sync = model, objective, flat, sync
        self._optimizer, self._loss_scale, self._over_ranks = optimizer, loss_scale, over_ranks
        self._device = device = flat.grad.device
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        example = HostBatch.made_up(1)
        self._num_divisors = len(objective.divisors(objective.counts(example)))
        keys = model.dropout_keys(0, 0)
        # Keys and divisors, bit by bit, so that one copy brings both.
        self._numbers = torch.zeros(keys.numel() + self._num_divisors, dtype=torch.int32, device=device)
        # C kernels take the keys as numbers; a graph, and Triton's kernels, find them on the device.
        self._keys_on_host = graphs is None and device.type == "cpu"
        self._keys: Keys = self._numbers[: keys.numel()].view(keys.shape)
        self._divisors = self._numbers[keys.numel() :].view(torch.float32).unbind()
        copies = 0 if graphs is None else graphs.micro_batches if graphs.mode is GraphMode.FULL_ITERATION else 1
        self._targets = [graphs.budget.allocate(device) for _ in range(copies)] if graphs else []
        self._replay: Callable[[], None] | None = None

    def holds(self, batches: Sequence[HostBatch]) -> bool:
        """Whether a step of these micro-batches fits the graph."""
        graphs = self.graphs
        return graphs is not None and len(batches) == graphs.micro_batches and all(map(graphs.budget.holds, batches))

    def warm_up(self) -> None:
        """Forward, backward, the reduction, and a forward pass as in evaluation, on made-up tokens.

        Builds kernels, buffers and the communicators that gradients travel by; all ranks call it together. Weights and
        optimizer stay untouched, gradients are zero afterwards.
        """
        self._write_numbers(0, 0, [1.0] * self._num_divisors)
        batch = HostBatch.made_up(WARM_UP_TOKENS, page_locked=self._device.type == "cuda")
        self._sync.prepare(last=True)
        self._forward_backward(batch.to(self._device))
        self._sync.finish()
        with torch.no_grad():
            self._objective.sums(self._model, batch.to(self._device))
        self._flat.zero_grad()
        self._model.forget_step()

    def try_out(self, batch: HostBatch) -> None:
        """Forward and backward on this rank alone: nothing is reduced; weights stay, gradients are zero afterwards."""
        try:
            self._write_numbers(0, 0, [1.0] * self._num_divisors)
            self._sync.prepare(last=False)
            self._forward_backward(batch.to(self._device))
        finally:
            self._flat.zero_grad()
            self._model.forget_step()

    def record(self) -> None:
        """Warms up and captures. Weights, moments and scales are afterwards as before, and gradients are zero."""
        assert self.graphs is not None, "no graphs"
        updates, scale = self._optimizer.num_updates, self._loss_scale
        scale_before = {name: value.clone() for name, value in scale.state_dict().items()} if scale else {}
        # Divisors of 0 make gradients that are not finite, and such an update changes nothing.
        self._numbers.zero_()
        function = self._iteration if self.graphs.mode is GraphMode.FULL_ITERATION else self._first_target
        with self._model.recording():
            self._flat.zero_grad()
            self._model.refresh()
            capture = self.graphs.capture()
            capture.warm_up(function)
            self._replay = capture.record(function)
            self._flat.zero_grad()
        assert self._optimizer.num_updates == updates, "a warm-up step changed the weights"
        if scale:
            scale.load_state_dict(scale_before)
        self._model.weights_changed()

    def __call__(
        self,
        batches: Sequence[HostBatch],
        seed: int,
        step: int,
        divisors: Sequence[float],
        lr: float,
        passing: Passing = iter,
    ) -> StepResult:
        """One optimizer step; with graphs, or an optimizer that can be captured, nothing waits for the device.

        Args:
            batches: this rank's micro-batches.
            seed, step: name the dropout masks.
            divisors: of the loss, `Objective.divisors`.
            lr: learning rate.
            passing: passes the batches on, one when it is asked for.
        """
        self._write_numbers(seed, step, divisors)
        graphs = self.graphs if self.holds(batches) else None
        if self.graphs and not graphs and not self._has_said:
            self._has_said = True
            self._say(f"step {step + 1} runs without a graph: a batch exceeds {self.graphs.budget}")
        if graphs and graphs.mode is GraphMode.FULL_ITERATION:
            norm = self._replay_iteration(graphs, passing(batches), lr)
        else:
            norm = self._step(graphs, passing(batches), len(batches), lr)
        return StepResult(self._loss_sum, norm)

    def _step(self, graphs: Graphs | None, batches: Iterable[HostBatch], num_batches: int, lr: float) -> Tensor:
        self._clear()
        if graphs:
            self._model.refresh()  # once for all micro-batches: their graph only reads the copies
        for i, batch in enumerate(batches):
            self._sync.prepare(last=i == num_batches - 1)
            if graphs:
                graphs.budget.write(batch, self._targets[0])
                self._run(self._first_target)
            else:
                self._forward_backward(batch.to(self._device))
        self._sync.finish()
        norm = self._optimizer.step(lr)
        self._end()
        return norm

    def _replay_iteration(self, graphs: Graphs, batches: Iterable[HostBatch], lr: float) -> Tensor:
        for batch, target in zip(batches, self._targets, strict=True):
            graphs.budget.write(batch, target)
        self._optimizer.set_learning_rate(lr)
        self._run(self._iteration)
        self._model.weights_changed()  # a replay changes the weights behind the host's back
        return self._optimizer.grad_norm

    def _run(self, function: Callable[[], None]) -> None:
        """Replays the function, or calls it where the model does not know its scales yet."""
        assert self._replay is not None, "record() first"
        (self._replay if self._model.is_calibrated else function)()

    def _first_target(self) -> None:
        self._forward_backward(self._targets[0])

    def _iteration(self) -> None:
        self._model.weights_changed()
        self._clear()
        for i, batch in enumerate(self._targets):
            self._sync.prepare(last=i == len(self._targets) - 1)
            self._forward_backward(batch)
        self._sync.finish()
        self._optimizer.launch()
        self._end()

    def _end(self) -> None:
        if self._loss_scale:
            self._loss_scale.update(self._optimizer.grad_norm)
        self._model.end_step(self._over_ranks)

    def _clear(self) -> None:
        self._flat.zero_grad()
        self._loss_sum.zero_()

    def _forward_backward(self, batch: Batch) -> None:
        loss = self._objective.loss(self._model, batch, self._keys, self._divisors)
        (loss * self._loss_scale.value if self._loss_scale else loss).backward()
        self._loss_sum += loss.detach()

    def _write_numbers(self, seed: int, step: int, divisors: Sequence[float]) -> None:
        keys = self._model.dropout_keys(seed, step)
        numbers = torch.cat([keys.flatten(), torch.tensor(divisors, dtype=torch.float32).view(torch.int32)])
        # The allocator gives page-locked memory to nobody else before the copy is made.
        numbers = numbers.pin_memory() if self._numbers.is_cuda else numbers
        self._numbers.copy_(numbers, non_blocking=True)
        if self._keys_on_host:
            self._keys = keys.tolist()


def choose_graphs(mode: str, method: Method, micro_batches: int, device: torch.device) -> Graphs | None:
    """What CUDA_GRAPH_MODE asks for; None for ``none``.

    Args:
        mode: the setting.
        method: of the run.
        micro_batches: of one step on this rank.
        device: where the run computes.

    Raises:
        UserError: graphs are asked for and the device, the model, the batches or the optimizer cannot be captured.
    """
    if mode == "none":
        return None
    budget, wanted = method.budget, GraphMode(mode)
    if device.type != "cuda":
        raise UserError(f"{SETTING}={mode}", f"needs a CUDA device, this run is on the {device}", f"Set {SETTING}=none")
    if obstacle := method.model.capture_obstacle(device):
        raise UserError(f"{SETTING}={mode}", obstacle, f"Set OPS=auto, or {SETTING}=none")
    if budget is None:
        raise UserError(f"{SETTING}={mode}", "this recipe's batches have no fixed sizes", f"Set {SETTING}=none")
    if wanted is GraphMode.FULL_ITERATION and not method.optimizer.can_capture:
        reason = f"the optimizer in form {method.optimizer.implementation!r} decides on the host whether to update"
        raise UserError(f"{SETTING}={mode}", reason, f"Set OPS=auto with Triton installed, or {SETTING}=segmented")
    return Graphs(wanted, budget, micro_batches, lambda: CudaCapture(device))
