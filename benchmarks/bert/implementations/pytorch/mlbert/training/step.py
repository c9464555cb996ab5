"""One optimizer step: from this rank's micro-batches to new weights. The same functions run called and replayed.

                      called    segmented    full_iteration
    clear gradients   |         |            |
    forward, backward |         | graph      | one
    reduce            |         |            | graph
    update            |         |            |

Whatever differs between steps is written into memory of the device before a replay: the batch, filled up to a
`StaticShape`; the dropout keys; what the losses are divided by; the learning rate. A replay gives the bits that the
same functions give when they are called (capture by `NoCapture`), given the same bits to start from.

Batches that vary are filled up to the smallest of several budgets that holds them, each with a graph of its own; all of
them share one pool of memory, so that they take that of the largest. So does the graph of the step that learns the
scales of FP8, which is replayed once. A step runs without graphs where its batches exceed all budgets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mlbert.data.loading.batches import Batch, HostBatch, StaticShape
from mlbert.distributed.capture import Capture, CudaCapture
from mlbert.host.errors import UserError
from mlbert.training.host_copy import HostCopy
from mlbert.training.protocols import FlatBuffers, GradientSync, Keys, LossScale, Method, Model, Objective, Optimizer

SETTING = "CUDA_GRAPH_MODE"
WARM_UP_TOKENS = 8
WARM_UP_SEQUENCES = 65  # on a GPU, where some kernels are for many tokens only

OnProgress = Callable[[Iterable[Any]], Iterable[Any]]


class GraphMode(Enum):
    """How much of a step is one graph; see the module docstring."""

    SEGMENTED = "segmented"
    FULL_ITERATION = "full_iteration"


@dataclass(frozen=True)
class Graphs:
    """How steps become graphs.

    Attributes:
        mode: what a graph holds.
        static_shape: of one micro-batch.
        micro_batches: of one step on this rank.
        capture: gives a `CudaCapture` with a memory pool of its own, or a `NoCapture` for the same without graphs.
        smaller: budgets for batches that vary, the smallest first; each has a graph of its own.
    """

    mode: GraphMode
    static_shape: StaticShape
    micro_batches: int
    capture: Callable[[], Capture]
    smaller: Sequence[StaticShape] = ()


@dataclass
class _StepGraph:
    """One graph: what its batches fit into, where it reads them, what it does and what repeats that."""

    static_shape: StaticShape
    targets: list[Batch]
    function: Callable[[], None]
    replay: Callable[[], None] | None = None


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
        model, objective, flat, sync, optimizer: see `mlbert.training.protocols.Method`.
        over_ranks: raises a tensor to the ranks' largest values, in place.
        say: told, once, that a step runs without its graph.
        graphs: how steps become graphs; then call `record` once, on all ranks together, before the first step.
            None: they do not.
        loss_scale: see `mlbert.training.protocols.Method`.
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
        example = HostBatch.dummy(1)
        self._num_divisors = len(objective.divisors(objective.counts(example)))
        keys = model.dropout_keys(0, 0)
        # Keys and divisors, bit by bit, so that one copy brings both.
        self._numbers = torch.zeros(keys.numel() + self._num_divisors, dtype=torch.int32, device=device)
        # C kernels take the keys as numbers; a graph, and Triton's kernels, find them on the device.
        self._keys_on_host = graphs is None and device.type == "cpu"
        self._keys: Keys = self._numbers[: keys.numel()].view(keys.shape)
        self._divisors = self._numbers[keys.numel() :].view(torch.float32).unbind()
        self._graphs = [self._graph(graphs, b) for b in (*graphs.smaller, graphs.static_shape)] if graphs else []
        # Of the largest budget: the first step may be any.
        self._calibrating = replace(self._graphs[-1], function=self._learning(self._graphs[-1])) if graphs else None

    def _graph(self, graphs: Graphs, static_shape: StaticShape) -> _StepGraph:
        """Not recorded yet."""
        whole = graphs.mode is GraphMode.FULL_ITERATION
        targets = [static_shape.allocate(self._device) for _ in range(graphs.micro_batches if whole else 1)]
        return _StepGraph(static_shape, targets, partial(self._iteration if whole else self._first_target, targets))

    def _learning(self, graph: _StepGraph) -> Callable[[], None]:
        """The graph's function while scales are not known: weights are quantised inside."""

        def function() -> None:
            self._model.is_calibrated = False
            self._model.weights_changed()
            graph.function()

        return function

    def graph_for(self, batches: Sequence[HostBatch]) -> _StepGraph | None:
        """The smallest graph that holds a step of these micro-batches; None: none does."""
        if self.graphs is None or len(batches) != self.graphs.micro_batches:
            return None
        assert self._calibrating is not None, "as there are graphs"
        usable = self._graphs if self._model.is_calibrated else [self._calibrating]
        return next((graph for graph in usable if all(map(graph.static_shape.holds, batches))), None)

    def warm_up(self) -> None:
        """Forward, backward, reduction and update, and a forward pass as in evaluation, on made-up tokens.

        Builds kernels and buffers, and connects the ranks in each of their groups, so that nothing of it is left for
        the time that counts; all ranks call it together. Weights and optimizer stay untouched, gradients are zero
        afterwards.
        """
        is_cuda, updates = self._device.type == "cuda", self._optimizer.num_updates
        self._sync.warm_up()
        # Divisors of 0 make gradients that are not finite, and such an update changes nothing.
        self._write_numbers(0, 0, [0.0] * self._num_divisors)
        batch = HostBatch.dummy(WARM_UP_TOKENS, page_locked=is_cuda, sequences=WARM_UP_SEQUENCES if is_cuda else 1)
        self._sync.prepare(last=True)
        self._forward_backward(batch.to(self._device))
        self._sync.finish()
        self._optimizer.step(0.0)
        assert self._optimizer.num_updates == updates, "warming up changed the weights"
        with torch.no_grad():
            self._objective.sums(self._model, batch.to(self._device))
        self._flat.zero_grad()
        self._model.forget_step()

    def dry_run(self, batch: HostBatch) -> None:
        """Forward and backward on this rank alone: nothing is reduced; weights stay, gradients are zero afterwards."""
        try:
            self._write_numbers(0, 0, [1.0] * self._num_divisors)
            self._sync.prepare(last=False)
            self._forward_backward(batch.to(self._device))
        finally:
            self._flat.zero_grad()
            self._model.forget_step()

    def record(self, tuned: Callable[[Callable[[], None]], None] = lambda warm_up: warm_up()) -> None:
        """Warms up and captures. Weights, moments and scales are afterwards as before, and gradients are zero.

        Args:
            tuned: runs the warm-up that it is given, and chooses what is captured by what that has run.
        """
        assert self.graphs is not None, "no graphs"
        updates, scale = self._optimizer.num_updates, self._loss_scale
        scale_before = {name: value.clone() for name, value in scale.state_dict().items()} if scale else {}
        # Divisors of 0 make gradients that are not finite, and such an update changes nothing.
        self._numbers.zero_()
        # The largest first: what it leaves in the pool suffices for the others.
        graphs = self._graphs[::-1]
        if self._calibrating is not None and not self._model.is_calibrated:
            graphs.append(self._calibrating)
        capture = self.graphs.capture()

        def warm_up() -> None:
            for graph in graphs:
                self._make_ready(graph)
                capture.warm_up(graph.function)

        with self._model.recording():
            self._flat.zero_grad()
            tuned(warm_up)  # of all of them first: their memory must be free again before there is a pool
            for graph in graphs:
                self._make_ready(graph)
                graph.replay = capture.record(graph.function)
            self._flat.zero_grad()
        assert self._optimizer.num_updates == updates, "a warm-up step changed the weights"
        if scale:
            scale.load_state_dict(scale_before)
        self._model.weights_changed()

    def release(self) -> None:
        """Ends the graphs; no step comes after it. NCCL waits for those that hold its collectives before it ends."""
        self._graphs.clear()
        self._calibrating = None

    def _make_ready(self, graph: _StepGraph) -> None:
        """For the graph's function: copies of the weights are there already, as its scales are."""
        self._model.is_calibrated = graph is not self._calibrating
        self._model.weights_changed()
        self._model.refresh()

    def __call__(
        self,
        batches: Sequence[HostBatch],
        seed: int,
        step: int,
        divisors: Sequence[float],
        lr: float,
        on_progress: OnProgress = iter,
    ) -> StepResult:
        """One optimizer step; with graphs, or an optimizer that can be captured, nothing waits for the device.

        Args:
            batches: this rank's micro-batches.
            seed, step: name the dropout masks.
            divisors: of the loss, `Objective.divisors`.
            lr: learning rate.
            on_progress: passes the batches on, one when it is asked for.
        """
        self._write_numbers(seed, step, divisors)
        graph = self.graph_for(batches)
        if self.graphs and not graph and not self._has_said:
            self._has_said = True
            self._say(f"step {step + 1} runs without a graph: a batch exceeds {self.graphs.static_shape}")
        if graph and self.graphs and self.graphs.mode is GraphMode.FULL_ITERATION:
            norm = self._replay_iteration(graph, on_progress(batches), lr)
        else:
            norm = self._step(graph, on_progress(batches), len(batches), lr)
        return StepResult(self._loss_sum, norm)

    def _step(self, graph: _StepGraph | None, batches: Iterable[HostBatch], num_batches: int, lr: float) -> Tensor:
        self._clear()
        if graph and self._model.is_calibrated:
            self._model.refresh()  # once for all micro-batches: their graph only reads the copies
        for i, batch in enumerate(batches):
            self._sync.prepare(last=i == num_batches - 1)
            if graph:
                graph.static_shape.write(batch, graph.targets[0])
                _replay(graph)
            else:
                self._forward_backward(batch.to(self._device))
        self._sync.finish()
        norm = self._optimizer.step(lr)
        self._end()
        return norm

    def _replay_iteration(self, graph: _StepGraph, batches: Iterable[HostBatch], lr: float) -> Tensor:
        for batch, target in zip(batches, graph.targets, strict=True):
            graph.static_shape.write(batch, target)
        self._optimizer.set_learning_rate(lr)
        _replay(graph)
        # A replay changes the weights, and learns their scales, behind the host's back.
        self._model.is_calibrated = True
        self._model.weights_changed()
        return self._optimizer.grad_norm

    def _first_target(self, targets: Sequence[Batch]) -> None:
        self._forward_backward(targets[0])

    def _iteration(self, targets: Sequence[Batch]) -> None:
        self._model.weights_changed()
        self._clear()
        for i, batch in enumerate(targets):
            self._sync.prepare(last=i == len(targets) - 1)
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


def _replay(graph: _StepGraph) -> None:
    assert graph.replay is not None, "record() first"
    graph.replay()


def check_device(mode: str, device: torch.device) -> None:
    """Raises UserError where graphs are asked for and there is no GPU: before anything large is built for nothing."""
    if mode != "none" and device.type != "cuda":
        remedy = "See nvidia-smi, docker's --gpus all, SRUN_ARGS=--gres=gpu:8 for Slurm; on a CPU set it to none"
        raise UserError("device.unavailable", f"{SETTING}={mode}", "needs a GPU, and PyTorch sees none here", remedy)


def choose_graphs(mode: str, method: Method, micro_batches: int, device: torch.device, ranks: int) -> Graphs | None:
    """What CUDA_GRAPH_MODE asks for; None for ``none``.

    Args:
        mode: the setting.
        method: of the run.
        micro_batches: of one step on this rank.
        device: where the run computes.
        ranks: of the run.

    Raises:
        UserError: graphs are asked for and the model, the batches or the optimizer cannot be captured.
    """
    if mode == "none":
        return None
    static_shape, wanted = method.static_shape, GraphMode(mode)
    if obstacle := method.model.capture_obstacle(device, static_shape.max_seqlen if static_shape else 0):
        raise UserError("config.conflict", f"{SETTING}={mode}", obstacle, f"Set OPS=auto, or {SETTING}=none")
    if static_shape is None:
        raise UserError(
            "config.conflict", f"{SETTING}={mode}", "this recipe's batches have no fixed sizes", f"Set {SETTING}=none"
        )
    if wanted is GraphMode.FULL_ITERATION and not method.optimizer.can_capture:
        reason = f"the optimizer in form {method.optimizer.implementation!r} decides on the host whether to update"
        raise UserError(
            "config.conflict",
            f"{SETTING}={mode}",
            reason,
            f"Set OPS=auto with Triton installed, or {SETTING}=segmented",
        )
    smaller = static_shape.smaller_ones()
    if wanted is GraphMode.FULL_ITERATION and smaller and ranks > 1:
        # NCCL wants all ranks to replay collectives of the same graph.
        reason = "batches that are not packed differ in size, and the ranks would replay different graphs"
        raise UserError("config.conflict", f"{SETTING}={mode}", reason, f"Set {SETTING}=segmented")
    return Graphs(wanted, static_shape, micro_batches, lambda: CudaCapture(device), smaller)
