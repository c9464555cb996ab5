"""Protocols of the objects that the training loop uses. A recipe chooses the implementations.

    Source          this rank's batches of each step        mlbert.data.loading
    EvaluationSet   this rank's evaluation batches           mlbert.data.loading
    Model           logits of a batch                        mlbert.models
    Objective       loss and metrics of the logits           mlbert.models.objectives
    GradientSync    reduction of the gradients               mlbert.distributed.reduce,
                                                             mlbert.distributed.sharding
    Optimizer       the update                               mlbert.optim
    LossScale       factor for float16 losses                mlbert.optim.loss_scale
    Schedule        the learning rate of a step              mlbert.optim.schedules
    Events          logs and displays                        mlbert.runs.events,
                                                             mlbert.training.loggers

Legend: S sequences of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mlbert.config.bert_config import BertConfig
from mlbert.config.configuration import Configuration
from mlbert.data.batches import Batch, HostBatch, StaticShape
from mlbert.distributed.world import World
from mlbert.ops.config import ComputeConfig

# Dropout keys as keys[layer][site]: a table on the device, or 32-bit numbers on the host.
Keys = Tensor | Sequence[Sequence[int]]
Event = Callable[[str, int | float | str], None]


class Source(Protocol):
    """A stream of optimizer steps."""

    @property
    def is_preparing(self) -> bool:
        """True while an epoch is being prepared, when `next_step` may take minutes.

        Read by another thread.
        """

    def open(self) -> None:
        """Open the data, which is not touched before.

        Raises UserError for a damaged file or too little data.
        """

    def next_step(self) -> Sequence[HostBatch]:
        """Return this rank's micro-batches of the next step."""

    def state_dict(self, back: int = 0) -> dict[str, Any]:
        """Return the position ``back`` steps ago, JSON-serializable. All ranks call it together."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at a position. Raises UserError if it belongs to other data or settings."""

    def finish(self) -> None:
        """Wait for pending checks of the data at the end of the run.

        Raises UserError if the data is damaged.
        """

    def close(self) -> None:
        """Stop background work."""


class EvaluationSet(Protocol):
    """This rank's share of the evaluation samples."""

    @property
    def num_examples(self) -> int:
        """Samples over all ranks; may be known only after `open`."""

    @property
    def static_shapes(self) -> Sequence[StaticShape]:
        """Batch shapes to capture a graph for, smallest first. Known before `open`."""

    def open(self) -> None:
        """Open the data, which is not touched before.

        Raises UserError for a damaged file or too few samples.
        """

    def __iter__(self) -> Iterator[HostBatch]:
        """Iterate over this rank's batches, the same ones in each pass."""


class Model(Protocol):
    """An `nn.Module` that manages what it derives from its weights (FP8 copies, scales) itself."""

    dtype: torch.dtype
    # False if the next step must find the FP8 scales.
    # Set by the caller after a replay, which the host cannot see.
    is_calibrated: bool

    def __call__(self, batch: Batch, keys: Keys | None) -> Any:
        """Return the outputs that the objective reads. Without keys there is no dropout."""

    def train(self, mode: bool = True) -> Any:
        """See `nn.Module`."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """See `nn.Module`."""

    def dropout_keys(self, seed: int, step: int) -> Tensor:
        """Return int32 [layers + 1, sites] on the host, the seeds of the step's dropout masks."""

    def training_flops(self, batch: HostBatch) -> int:
        """Return the model FLOPs of forward and backward."""

    def capture_obstacle(self, device: torch.device, max_seqlen: int) -> str | None:
        """Return why sequences of ``max_seqlen`` tokens cannot be trained in a CUDA graph,
        or None if they can.
        """

    def weights_changed(self) -> None:
        """Mark derived state as stale; it is rebuilt when next needed. Touches host state only."""

    def refresh(self) -> None:
        """Rebuild stale derived state now, before a graph that only reads it."""

    def end_step(self, over_ranks: Callable[[Tensor], Any]) -> None:
        """Finish a step after its update, on all ranks together.

        ``over_ranks`` is an in-place max all-reduce.
        """

    def forget_step(self) -> None:
        """Discard the state left by a pass that was not a training step."""

    def recording(self) -> AbstractContextManager[object]:
        """Return a context in which the model counts as calibrated;
        its previous state is restored afterwards.
        """

    def derived_state(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs besides the weights.

        Valid between `end_step` and the next step.
        """

    def load_derived_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore `derived_state`."""


class Objective(Protocol):
    """Training loss and evaluation metrics.

    Attributes:
        scope: "step" if the loss is divided by counts over all ranks and micro-batches, "rank" if
            it is divided by this rank's counts and the ranks' gradients are averaged.
        metric: the entry of `metrics` that is compared with the target.
        sum_names: names of the entries of `sums`.
        num_columns: columns of `rows`; 0 if no metric needs individual samples.
    """

    scope: str
    metric: str
    sum_names: tuple[str, ...]
    num_columns: int

    def counts(self, batch: HostBatch) -> tuple[int, ...]:
        """Return numbers on the host that add up over micro-batches and ranks, for `divisors`."""

    def divisors(self, counts: Sequence[int]) -> tuple[float, ...]:
        """Return the divisor of each part of the loss."""

    def loss(
        self, model: Any, batch: Batch, keys: Keys | None, divisors: Sequence[Tensor]
    ) -> Tensor:
        """Return a float32 scalar; ``divisors`` are float32 scalars on the device."""

    def sums(self, model: Any, batch: Batch) -> Tensor:
        """Return float64 [len(sum_names)] of one evaluation batch."""

    def rows(self, model: Any, batch: Batch) -> Tensor:
        """Return float64 [S, num_columns] of one evaluation batch."""

    def metrics(self, sums: Sequence[float], rows: Tensor | None) -> dict[str, float]:
        """Return metrics, including the mean "loss",
        from the sums and rows of all batches and ranks.
        """


class FlatBuffers(Protocol):
    """Parameters and gradients as one float32 buffer each.

    Attributes:
        layout: name and shape of each parameter, in buffer order; JSON-serializable.
    """

    data: Tensor
    grad: Tensor

    @property
    def layout(self) -> Sequence[tuple[str, Sequence[int]]]: ...

    def zero_grad(self) -> None:
        """Zero the gradients."""

    def begin_gradients(self) -> None:
        """Zero the gradients that the backward passes to come do not overwrite."""

    def finish_gradients(self) -> None:
        """Zero those that a backward pass was expected to overwrite but did not. Call it after each
        pass, before anything reads the gradients.
        """


class GradientSync(Protocol):
    """Reduction of the gradients between backward and update."""

    def warm_up(self) -> None:
        """Run every collective that training needs once.

        All ranks call it together, with zero gradients.
        """

    def prepare(self, last: bool) -> None:
        """Call before each backward pass. With ``last``, reduction may begin during that pass."""

    def finish(self) -> None:
        """Return once every gradient that this rank's update uses is the sum over ranks."""


class LossScale(Protocol):
    """A dynamic loss scale. The `GradientSync` divides the gradients by it.

    Attributes:
        value: float32 scalar on the device.
    """

    value: Tensor

    def update(self, grad_norm: Tensor) -> None:
        """Adjust the scale after each step, on all ranks,
        from the norm that decided if the update was made.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore `state_dict`."""


class Optimizer(Protocol):
    """An optimizer on the flat buffers.

    Attributes:
        implementation: name of the implementation that runs.
        reason: why a slower implementation runs than the device would allow; empty if none.
        can_capture: True if `launch` decides nothing on the host, so that a graph can capture it.
        grad_norm: float64 scalar, the gradient norm of the last `launch`.
    """

    implementation: str
    reason: str
    can_capture: bool
    grad_norm: Tensor

    @property
    def num_updates(self) -> int:
        """Updates made so far; may wait for the device."""

    def hyperparameters(self, event: Event) -> None:
        """Call ``event(key, value)`` for each hyper-parameter, under MLPerf's key."""

    def step(self, lr: float) -> Tensor:
        """Update the weights, unless the gradient is not finite.

        Return the gradient's norm before clipping, a float64 scalar on the device.
        """

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the next `launch`."""

    def launch(self) -> None:
        """Queue one update."""

    def exact_weights(self) -> AbstractContextManager[object]:
        """Make the flat weights exact on all ranks and return a context in which they stay so;
        training may use rounded ones.
        """

    def state_dict(self) -> dict[str, int | Tensor]:
        """Return tensors and plain numbers."""

    def load_state_dict(self, state: Mapping[str, int | Tensor]) -> None:
        """Restore `state_dict`."""


class Schedule(Protocol):
    """A learning-rate schedule."""

    def __call__(self, step: float) -> float:
        """Return the learning rate after ``step`` completed steps, or their worth in tokens."""

    def hyperparameters(self, event: Event) -> None:
        """Call ``event(key, value)`` for each hyper-parameter, under MLPerf's key."""


def _run(work: Callable[[], None]) -> None:
    work()


@dataclass(frozen=True)
class Method:
    """The objects that a recipe builds.

    Attributes:
        flat: the model's parameters and gradients.
        static_shape: upper bound of a micro-batch.
            If it is unknown (None), steps cannot be captured as graphs.
        precision, ops: numeric format and implementation of the operations, for the log.
        identity: what a checkpoint must match to be resumed here, JSON-serializable.
        export: writes weights into a folder, with facts for the model card.
        peak_flops: measures the FLOP/s of matrix products in the model's dtype on this device.
        tune: runs the warm-up of a graph that it is given,
            and picks the kernels to capture from the ones it ran.
        loss_scale: scale of the losses, if any.
    """

    model: Model
    objective: Objective
    source: Source
    evaluation: EvaluationSet
    flat: FlatBuffers
    sync: GradientSync
    optimizer: Optimizer
    schedule: Schedule
    static_shape: StaticShape | None
    precision: str
    ops: str
    identity: Mapping[str, object]
    export: Callable[[Path, Mapping[str, object]], None]
    peak_flops: Callable[[], float]
    tune: Callable[[Callable[[], None]], None] = _run
    loss_scale: LossScale | None = None


class Inputs(Protocol):
    """Facts about a run's inputs that are known before a sample is read.

    Attributes:
        shape: the model's shape.
        train_data, eval_data: identities of the data sets.
        max_sequence_length: longest training sequence, tokens.
        sequences_per_pack: average over the training set's packs;
            None if it is known only after packing.
    """

    shape: BertConfig
    train_data: str
    eval_data: str
    max_sequence_length: int
    sequences_per_pack: float | None


@dataclass(frozen=True)
class BuildContext:
    """The run that a recipe builds its objects for.

    Attributes:
        config: the run's settings.
        world: the ranks; initialized.
        seed: of the initial weights and the order of the data.
        warn: prints a line for the user.
        auto_precision: what PRECISION=auto means, as chosen by
            `mlbert.recipes.auto_precision`; if it is "auto", the device decides.
    """

    config: Configuration
    world: World
    seed: int
    warn: Callable[[str], None]
    auto_precision: str = "auto"

    @property
    def precision(self) -> str:
        """Return PRECISION, or what it means if it is "auto"."""
        given = self.config[ComputeConfig].precision
        return self.auto_precision if given == "auto" else given


class RecipeBuild(Protocol):
    """A module that builds the objects of a `mlbert.config.recipe.Recipe`."""

    def choose_precision(
        self, build: RecipeBuild, context: BuildContext, inputs: Any
    ) -> BuildContext:
        """Return the context with the precision that PRECISION=auto means.

        All ranks call it together, before `prepare`. ``build`` is this module.
        """

    def prepare(self, context: BuildContext, shape: BertConfig) -> None:
        """Get the device's kernels ready for a model of this shape. Called once, before `build`.

        All ranks call it together.
        """

    def build(self, context: BuildContext, inputs: Any) -> Method:
        """Return the method's objects. The data sets are not read before their ``open``.

        Args:
            context: the run.
            inputs: what the recipe's ``inspect`` returned.
        """

    def build_evaluation(self, context: BuildContext) -> tuple[Model, Objective, EvaluationSet]:
        """Return what an evaluation of the starting weights needs. The training set is not read."""
