"""One optimizer step: from this rank's micro-batches to new weights.

Eager steps and graphs run the same functions.

                      eager     segmented    full_iteration
    clear gradients   |         |            |
    forward, backward |         | graph      | one
    reduce            |         |            | graph
    update            |         |            |

Everything that differs between steps is written to device memory before a replay: the batch, padded
to a `StaticShape`, the dropout keys, the loss divisors and the learning rate. From the same
starting point, a replay gives the same bits as calling the functions eagerly (`NoCapture`).

Batches of varying size are padded to the smallest of several static shapes that holds them. Each
shape has its own graph. All graphs share one memory pool, so they need only as much memory as the
largest, including the graph of the step that finds the FP8 scales, which is replayed once. A step
whose batches exceed all shapes runs without a graph.

A graph also has a fixed number of micro-batches. While the batch grows (BATCHSIZE_WARMUP_START), a
step has fewer of them and runs without a graph, as long as whole micro-batches are missing; one
whose last micro-batch is not full is padded to the shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mlbert.data.batches import Batch, HostBatch, StaticShape
from mlbert.distributed.capture import Capture, CudaCapture
from mlbert.host.errors import UserError
from mlbert.training.protocols import (
    FlatBuffers,
    GradientSync,
    Keys,
    LossScale,
    Method,
    Model,
    Objective,
    Optimizer,
)

SETTING = "CUDA_GRAPH_MODE"
WARM_UP_TOKENS = 8
WARM_UP_SEQUENCES = 65  # on a GPU, because some kernels need many tokens

OnProgress = Callable[[Iterable[Any]], Iterable[Any]]


class HostCopy:
    """A copy of a tensor's current values, taken in stream order;
    reading it does not wait for work queued later.

    Args:
        values: any shape and dtype, on any device; may change afterwards.
    """

    def __init__(self, values: Tensor) -> None:
        self._done = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
        else:
            self._values = values.clone()

    def read(self) -> Tensor:
        """Wait until the device has computed the values, and return them on the host."""
        if self._done is not None:
            self._done.synchronize()
        return self._values


class GraphMode(Enum):
    """How much of a step one graph covers; see the module docstring."""

    SEGMENTED = "segmented"
    FULL_ITERATION = "full_iteration"


@dataclass(frozen=True)
class Graphs:
    """How to capture steps as graphs.

    Attributes:
        mode: how much of a step a graph covers.
        static_shape: shape of one micro-batch.
        micro_batches: micro-batches per step on this rank.
        capture: returns a `CudaCapture` with a new memory pool,
            or a `NoCapture` to run the same steps without graphs.
        smaller: further shapes for batches of varying size, smallest first.
            Each gets its own graph.
    """

    mode: GraphMode
    static_shape: StaticShape
    micro_batches: int
    capture: Callable[[], Capture]
    smaller: Sequence[StaticShape] = ()


@dataclass
class _StepGraph:
    """One graph: the shape it accepts, the batches it reads,
    its function and the function's replay.
    """

    static_shape: StaticShape
    targets: list[Batch]
    function: Callable[[], None]
    replay: Callable[[], None] | None = None


class StepResult:
    """The result of a step.

    Reading it waits until the device has done that step, not for work queued after it.

    Args:
        loss_sum: float64 scalar on the device, this rank's part of the step's loss;
            valid until the next step.
        grad_norm: float64 scalar on the device, copied now, in stream order.
    """

    def __init__(self, loss_sum: Tensor, grad_norm: Tensor) -> None:
        self.loss_sum = loss_sum
        self._grad_norm = HostCopy(grad_norm)

    @property
    def grad_norm(self) -> float:
        """Norm of the global gradient before clipping."""
        return float(self._grad_norm.read())

    @property
    def skipped(self) -> bool:
        """True if the update was skipped."""
        return not math.isfinite(self.grad_norm)


class Step:
    """Runs training steps.

    Args:
        model, objective, flat, sync, optimizer, loss_scale: see `mlbert.training.protocols.Method`.
        over_ranks: max all-reduce of a tensor over the ranks, in place.
        say: called once if a step runs without a graph.
        graphs: how to capture steps as graphs, if at all. If given, call `record` once, on all
            ranks together, before the first step.
    """

    @classmethod
    def of(
        cls,
        method: Method,
        over_ranks: Callable[[Tensor], Any],
        say: Callable[[str], object],
        graphs: Graphs | None = None,
    ) -> Step:
        """Return the steps of a method."""
        return cls(
            method.model,
            method.objective,
            method.flat,
            method.sync,
            method.optimizer,
            over_ranks,
            say,
            graphs,
            method.loss_scale,
        )

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
        self.graphs = graphs
        self._say = say
        self._has_said = False
        self._model = model
        self._objective = objective
        self._flat = flat
        self._sync = sync
        self._optimizer = optimizer
        self._loss_scale = loss_scale
        self._over_ranks = over_ranks
        self._device = device = flat.grad.device
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        # Around the micro-batches of a step. "External" ones may also be recorded in a graph.
        self._events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._events = [
                torch.cuda.Event(enable_timing=True, external=True),
                torch.cuda.Event(enable_timing=True, external=True),
            ]
        example = HostBatch.dummy(1)
        self._num_divisors = len(objective.divisors(objective.counts(example)))
        keys = model.dropout_keys(0, 0)
        # Keys and the bits of the divisors, so that one copy transfers both.
        self._numbers = torch.zeros(
            keys.numel() + self._num_divisors, dtype=torch.int32, device=device
        )
        # C kernels take the keys as host numbers; graphs
        # and Triton kernels read them on the device.
        self._keys_on_host = graphs is None and device.type == "cpu"
        self._keys: Keys = self._numbers[: keys.numel()].view(keys.shape)
        self._divisors = self._numbers[keys.numel() :].view(torch.float32).unbind()
        self._graphs: list[_StepGraph] = []
        self._calibrating: _StepGraph | None = None
        if graphs:
            shapes = (*graphs.smaller, graphs.static_shape)
            self._graphs = [self._graph(graphs, shape) for shape in shapes]
            # With the largest shape: the first step may have any size.
            largest = self._graphs[-1]
            self._calibrating = replace(largest, function=self._learning(largest))

    def _graph(self, graphs: Graphs, static_shape: StaticShape) -> _StepGraph:
        """Allocate the graph's batches; `record` captures it."""
        if graphs.mode is GraphMode.FULL_ITERATION:
            num_targets = graphs.micro_batches
            function = self._iteration
        else:
            num_targets = 1
            function = self._first_target
        targets = [static_shape.allocate(self._device) for _ in range(num_targets)]
        return _StepGraph(static_shape, targets, partial(function, targets))

    def _learning(self, graph: _StepGraph) -> Callable[[], None]:
        """Return the graph's function for unknown FP8 scales,
        which quantizes the weights inside the graph.
        """

        def function() -> None:
            self._model.is_calibrated = False
            self._model.weights_changed()
            graph.function()

        return function

    def graph_for(self, batches: Sequence[HostBatch]) -> _StepGraph | None:
        """Return the smallest graph that holds a step of these micro-batches, or None."""
        if self.graphs is None or len(batches) != self.graphs.micro_batches:
            return None
        assert self._calibrating is not None, "as there are graphs"
        usable = self._graphs if self._model.is_calibrated else [self._calibrating]
        return next(
            (graph for graph in usable if all(map(graph.static_shape.holds, batches))), None
        )

    def warm_up(self) -> None:
        """Run forward, backward, reduction and update, and an evaluation forward pass,
        on dummy tokens.

        Builds kernels and buffers and connects all groups of ranks, so that none of it is timed.
        All ranks call it together. Weights and optimizer do not change; gradients are zero
        afterwards.
        """
        is_cuda = self._device.type == "cuda"
        updates = self._optimizer.num_updates
        self._sync.warm_up()
        # Divisors of 0 make gradients that are not finite, and such an update changes nothing.
        self._write_numbers(0, 0, [0.0] * self._num_divisors)
        batch = HostBatch.dummy(
            WARM_UP_TOKENS, page_locked=is_cuda, sequences=WARM_UP_SEQUENCES if is_cuda else 1
        )
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
        """Run forward and backward on this rank without reducing.

        Weights do not change; gradients end up zero.
        """
        try:
            self._write_numbers(0, 0, [1.0] * self._num_divisors)
            self._sync.prepare(last=False)
            self._forward_backward(batch.to(self._device))
        finally:
            self._flat.zero_grad()
            self._model.forget_step()

    def record(
        self, tuned: Callable[[Callable[[], None]], None] = lambda warm_up: warm_up()
    ) -> None:
        """Warm up and capture the graphs.

        Weights, moments and scales keep their values; gradients are zero afterwards.

        Args:
            tuned: runs the warm-up it is given, and picks the kernels to capture from the ones it
                ran.
        """
        assert self.graphs is not None, "no graphs"
        updates = self._optimizer.num_updates
        scale = self._loss_scale
        scale_before = (
            {name: value.clone() for name, value in scale.state_dict().items()} if scale else {}
        )
        # Divisors of 0 make gradients that are not finite, and such an update changes nothing.
        self._numbers.zero_()
        # Largest first: the memory it leaves in the pool is enough for the others.
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
            # All of them before any capture: their memory must be free again before the pool
            # exists.
            tuned(warm_up)
            for graph in graphs:
                self._make_ready(graph)
                graph.replay = capture.record(graph.function)
            self._flat.zero_grad()
        assert self._optimizer.num_updates == updates, "a warm-up step changed the weights"
        if scale:
            scale.load_state_dict(scale_before)
        self._model.weights_changed()

    def release(self) -> None:
        """Destroy the graphs after the last step.

        NCCL cannot shut down while graphs hold its collectives.
        """
        self._graphs.clear()
        self._calibrating = None

    def _make_ready(self, graph: _StepGraph) -> None:
        """Refresh the copies of the weights, and mark the FP8 scales as known,
        unless the graph computes them.
        """
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
        """Run one optimizer step.

        With graphs, or a capturable optimizer, it does not wait for the device.

        Args:
            batches: this rank's micro-batches.
            seed, step: select the dropout masks.
            divisors: loss divisors, see `Objective.divisors`.
            lr: learning rate.
            on_progress: wraps the iterable of batches, which is consumed one at a time.
        """
        self._write_numbers(seed, step, divisors)
        graph = self.graph_for(batches)
        if self.graphs and not graph and not self._has_said:
            self._has_said = True
            reason = _without_graph(self.graphs, len(batches))
            self._say(f"step {step + 1} runs without a graph: {reason}")
        if graph and self.graphs and self.graphs.mode is GraphMode.FULL_ITERATION:
            norm = self._replay_iteration(graph, on_progress(batches), lr)
        else:
            norm = self._step(graph, self._timed(on_progress(batches)), len(batches), lr)
        return StepResult(self._loss_sum, norm)

    @property
    def device_seconds(self) -> float:
        """A GPU's time in the micro-batches of the last step, which is done; 0 on a CPU."""
        return self._events[0].elapsed_time(self._events[1]) / 1000 if self._events else 0.0

    def _timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        for event in self._events[:1]:
            event.record()
        yield from batches
        for event in self._events[1:]:
            event.record()

    def _step(
        self, graph: _StepGraph | None, batches: Iterable[HostBatch], num_batches: int, lr: float
    ) -> Tensor:
        if graph:
            # Its products add, because its micro-batches share one graph.
            self._flat.zero_grad()
        else:
            self._flat.begin_gradients()
        self._loss_sum.zero_()
        if graph and self._model.is_calibrated:
            self._model.refresh()  # once for all micro-batches: their graph only reads the copies
        for i, batch in enumerate(batches):
            self._sync.prepare(last=i == num_batches - 1)
            if graph:
                graph.static_shape.write(batch, graph.targets[0])
                _replay(graph)
            else:
                self._forward_backward(batch.to(self._device))
                self._flat.finish_gradients()
        self._sync.finish()
        norm = self._optimizer.step(lr)
        self._end()
        return norm

    def _replay_iteration(
        self, graph: _StepGraph, batches: Iterable[HostBatch], lr: float
    ) -> Tensor:
        for batch, target in zip(batches, graph.targets, strict=True):
            graph.static_shape.write(batch, target)
        self._optimizer.set_learning_rate(lr)
        _replay(graph)
        # The host does not see that a replay changes the weights and finds their scales.
        self._model.is_calibrated = True
        self._model.weights_changed()
        return self._optimizer.grad_norm

    def _first_target(self, targets: Sequence[Batch]) -> None:
        self._forward_backward(targets[0])

    def _iteration(self, targets: Sequence[Batch]) -> None:
        self._model.weights_changed()
        self._flat.begin_gradients()
        self._loss_sum.zero_()
        for i, batch in enumerate(self._timed(targets)):
            self._sync.prepare(last=i == len(targets) - 1)
            self._forward_backward(batch)
            self._flat.finish_gradients()
        self._sync.finish()
        self._optimizer.launch()
        self._end()

    def _end(self) -> None:
        if self._loss_scale:
            self._loss_scale.update(self._optimizer.grad_norm)
        self._model.end_step(self._over_ranks)

    def _forward_backward(self, batch: Batch) -> None:
        loss = self._objective.loss(self._model, batch, self._keys, self._divisors)
        (loss * self._loss_scale.value if self._loss_scale else loss).backward()
        self._loss_sum += loss.detach()

    def _write_numbers(self, seed: int, step: int, divisors: Sequence[float]) -> None:
        keys = self._model.dropout_keys(seed, step)
        numbers = torch.cat(
            [keys.flatten(), torch.tensor(divisors, dtype=torch.float32).view(torch.int32)]
        )
        # The allocator does not reuse pinned memory before the copy is done.
        numbers = numbers.pin_memory() if self._numbers.is_cuda else numbers
        self._numbers.copy_(numbers, non_blocking=True)
        if self._keys_on_host:
            self._keys = keys.tolist()


def _without_graph(graphs: Graphs, micro_batches: int) -> str:
    """Return why a step of so many micro-batches has no graph."""
    if micro_batches == graphs.micro_batches:
        return f"a batch exceeds {graphs.static_shape}"
    return (
        f"it has {micro_batches} of {graphs.micro_batches} micro-batches, as all steps while the "
        "batch grows"
    )


def _replay(graph: _StepGraph) -> None:
    assert graph.replay is not None, "record() first"
    graph.replay()


def check_device(mode: str, device: torch.device) -> None:
    """Raise UserError if graphs are requested without a GPU, before anything large is built."""
    if mode != "none" and device.type != "cuda":
        remedy = (
            "See nvidia-smi, docker's --gpus all, SRUN_ARGS=--gres=gpu:8 for Slurm; "
            "on a CPU set it to none"
        )
        raise UserError(
            "device.unavailable", f"{SETTING}={mode}", "needs a GPU, and PyTorch finds none", remedy
        )


def choose_graphs(
    mode: str, method: Method, micro_batches: int, device: torch.device, ranks: int
) -> Graphs | None:
    """Return the graphs that CUDA_GRAPH_MODE asks for; None for ``none``.

    Args:
        mode: the setting.
        method: the run's method.
        micro_batches: micro-batches per step on this rank.
        device: the run's device.
        ranks: number of ranks.

    Raises:
        UserError: graphs are requested but the model,
            the batches or the optimizer cannot be captured.
    """
    if mode == "none":
        return None
    static_shape = method.static_shape
    graph_mode = GraphMode(mode)
    if obstacle := method.model.capture_obstacle(
        device, static_shape.max_seqlen if static_shape else 0
    ):
        raise UserError(
            "config.conflict", f"{SETTING}={mode}", obstacle, f"Set OPS=auto, or {SETTING}=none"
        )
    if static_shape is None:
        reason = "this recipe's batches have no fixed sizes"
        raise UserError("config.conflict", f"{SETTING}={mode}", reason, f"Set {SETTING}=none")
    if graph_mode is GraphMode.FULL_ITERATION and not method.optimizer.can_capture:
        reason = (
            f"the {method.optimizer.implementation!r} optimizer decides on the host whether to "
            "update"
        )
        remedy = f"Set OPS=auto with Triton installed, or {SETTING}=segmented"
        raise UserError("config.conflict", f"{SETTING}={mode}", reason, remedy)
    smaller = static_shape.smaller_ones()
    if graph_mode is GraphMode.FULL_ITERATION and smaller and ranks > 1:
        # NCCL needs all ranks to replay collectives of the same graph.
        reason = "unpacked batches differ in size, so the ranks would replay different graphs"
        raise UserError("config.conflict", f"{SETTING}={mode}", reason, f"Set {SETTING}=segmented")
    return Graphs(graph_mode, static_shape, micro_batches, lambda: CudaCapture(device), smaller)
