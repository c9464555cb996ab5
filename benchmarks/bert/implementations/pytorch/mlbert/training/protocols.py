"""What the loop is handed: each object a small protocol, the implementations elsewhere, the choice a recipe's.

    Source          this rank's batches of each step        mlbert.data.loading
    EvaluationSet   this rank's evaluation batches           mlbert.data.loading
    Model           logits of a batch                        mlbert.models
    Objective       loss and metrics made of them            mlbert.models.objectives
    GradientSync    gradients between backward and update    mlbert.distributed.reduce, mlbert.distributed.sharding
    Optimizer       the update                               mlbert.optim
    LossScale       what float16 losses are multiplied by    mlbert.optim.loss_scale
    Schedule        the learning rate of a step              mlbert.optim.schedules
    Events          what is told, to whom                    mlbert.runs.events, mlbert.training.loggers

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
from mlbert.config.sections import Configuration
from mlbert.data.loading.batches import Batch, HostBatch, StaticShape
from mlbert.distributed.world import World

# Dropout keys as keys[layer][site]: a table on the device, or 32-bit numbers on the host.
Keys = Tensor | Sequence[Sequence[int]]
Event = Callable[[str, int | float | str], None]


class Source(Protocol):
    """A stream of optimizer steps."""

    @property
    def is_preparing(self) -> bool:
        """Whether an epoch is being prepared, so that `next_step` may wait for minutes; read by another thread."""

    def open(self) -> None:
        """First touch of the data. Raises UserError for a damaged file or too little data."""

    def next_step(self) -> Sequence[HostBatch]:
        """This rank's micro-batches of the next step."""

    def state_dict(self) -> dict[str, Any]:
        """The position, JSON-able."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at a position. Raises UserError where it belongs to other data or settings."""

    def finish(self) -> None:
        """The run has come to its end: waits for checks of the data that are under way. Raises UserError: it was
        damaged."""

    def close(self) -> None:
        """Ends background work."""


class EvaluationSet(Protocol):
    """This rank's share of the evaluation samples."""

    @property
    def num_examples(self) -> int:
        """Over all ranks; may be known after `open` only."""

    @property
    def static_shapes(self) -> Sequence[StaticShape]:
        """What a batch holds at most, the smallest first, for a graph of each; known before `open`."""

    def open(self) -> None:
        """First touch of the data. Raises UserError for a damaged file or too few samples."""

    def __iter__(self) -> Iterator[HostBatch]:
        """This rank's batches, the same at each pass."""


class Model(Protocol):
    """An `nn.Module`; what it derives from its weights (FP8 copies, scales) is its own affair."""

    dtype: torch.dtype
    # False: the next step finds the scales of FP8; set where a replay did what the host could not see.
    is_calibrated: bool

    def __call__(self, batch: Batch, keys: Keys | None) -> Any:
        """What the objective reads; without keys there is no dropout."""

    def train(self, mode: bool = True) -> Any:
        """As of `nn.Module`."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """As of `nn.Module`."""

    def dropout_keys(self, seed: int, step: int) -> Tensor:
        """int32 [layers + 1, sites] on the host: names the step's masks."""

    def training_flops(self, batch: HostBatch) -> int:
        """Model FLOPs of forward and backward."""

    def capture_obstacle(self, device: torch.device, max_seqlen: int) -> str | None:
        """Why forward and backward of sequences of so many tokens cannot be a CUDA graph, in words; None: they can."""

    def weights_changed(self) -> None:
        """What is derived from the weights is made anew when it is next needed; touches the host's notes only."""

    def refresh(self) -> None:
        """Makes it now, before a graph that only reads it."""

    def end_step(self, over_ranks: Callable[[Tensor], Any]) -> None:
        """After each update, on all ranks together; ``over_ranks`` raises a tensor to the ranks' largest values."""

    def forget_step(self) -> None:
        """Drops what a pass that was no step left behind."""

    def recording(self) -> AbstractContextManager[object]:
        """Within it the model counts as calibrated; afterwards it is as before."""

    def derived_state(self) -> dict[str, Tensor]:
        """What a checkpoint needs besides the weights; valid between `end_step` and the next step."""

    def load_derived_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes over `derived_state`."""


class Objective(Protocol):
    """What a model is trained for.

    Attributes:
        scope: "step": the loss divides by counts of all ranks and micro-batches; "rank": by this rank's own, and the
            ranks' gradients are averaged.
        metric: the entry of `metrics` that the target is compared with.
        sum_names: names of what `sums` adds up.
        num_columns: columns of `rows`; 0: no metric needs single samples.
    """

    scope: str
    metric: str
    sum_names: tuple[str, ...]
    num_columns: int

    def counts(self, batch: HostBatch) -> tuple[int, ...]:
        """Host numbers that add up over micro-batches and ranks, for `divisors`."""

    def divisors(self, counts: Sequence[int]) -> tuple[float, ...]:
        """What the parts of the loss are divided by."""

    def loss(self, model: Any, batch: Batch, keys: Keys | None, divisors: Sequence[Tensor]) -> Tensor:
        """float32 scalar; ``divisors`` are float32 scalars on the device."""

    def sums(self, model: Any, batch: Batch) -> Tensor:
        """float64 [len(sum_names)] of one evaluation batch."""

    def rows(self, model: Any, batch: Batch) -> Tensor:
        """float64 [S, num_columns] of one evaluation batch."""

    def metrics(self, sums: Sequence[float], rows: Tensor | None) -> dict[str, float]:
        """Metrics, the mean "loss" among them, from sums over all batches and ranks, and everybody's rows."""


class FlatBuffers(Protocol):
    """Parameters and gradients as one float32 buffer each.

    Attributes:
        layout: name and shape of each parameter, back to back; JSON-able.
    """

    data: Tensor
    grad: Tensor

    @property
    def layout(self) -> Sequence[tuple[str, Sequence[int]]]: ...

    def zero_grad(self) -> None:
        """Clears the gradients."""


class GradientSync(Protocol):
    """What happens to gradients between backward and update."""

    def warm_up(self) -> None:
        """Runs every collective that training needs, once; all ranks call it together, with gradients of zero."""

    def prepare(self, last: bool) -> None:
        """Announces a backward pass, or its replay; the last one of a step may start reducing."""

    def finish(self) -> None:
        """Returns when every gradient that this rank updates with is the sum over ranks."""


class LossScale(Protocol):
    """A scale that follows the gradients; the `GradientSync` takes it out of them again.

    Attributes:
        value: float32 scalar on the device.
    """

    value: Tensor

    def update(self, grad_norm: Tensor) -> None:
        """After each step, on all ranks, with the norm that decided whether its update was made."""

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint needs."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes over `state_dict`."""


class Optimizer(Protocol):
    """An update of the flat buffers.

    Attributes:
        implementation: which form of it runs.
        can_capture: `launch` decides nothing on the host, so a graph can hold it.
        grad_norm: float64 scalar, of the last `launch`.
    """

    implementation: str
    can_capture: bool
    grad_norm: Tensor

    @property
    def num_updates(self) -> int:
        """Updates made so far; may wait for the device."""

    def hyperparameters(self, event: Event) -> None:
        """Calls ``event(key, value)`` for each, in MLPerf's words."""

    def step(self, lr: float) -> Tensor:
        """One update. Returns the gradient's norm before clipping, a float64 scalar on the device; where it is not
        finite, nothing has changed."""

    def set_learning_rate(self, lr: float) -> None:
        """The rate of the next `launch`."""

    def launch(self) -> None:
        """Queues one update."""

    def exact_weights(self) -> AbstractContextManager[object]:
        """Makes the flat weights exact on all ranks, within a context; training may use rounded ones."""

    def state_dict(self) -> dict[str, int | Tensor]:
        """Tensors and plain numbers."""

    def load_state_dict(self, state: Mapping[str, int | Tensor]) -> None:
        """Takes over `state_dict`."""


class Schedule(Protocol):
    """Learning rates."""

    def __call__(self, step: int) -> float:
        """Of the step that follows ``step`` done ones."""

    def hyperparameters(self, event: Event) -> None:
        """Calls ``event(key, value)`` for each, in MLPerf's words."""


@dataclass(frozen=True)
class Method:
    """What a recipe builds.

    Attributes:
        flat: the model's parameters and gradients.
        static_shape: what a micro-batch holds at most; None: unknown, so no step can be a graph.
        precision, ops: what computes, for the log.
        identity: what a checkpoint must agree on to be continued here, JSON-able.
        export: writes weights into a folder, with facts for the model card.
        loss_scale: what losses are multiplied by; None: nothing.
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
    loss_scale: LossScale | None = None


class Inputs(Protocol):
    """What is known of a run's inputs before a sample is read.

    Attributes:
        shape: of the model.
        train_data, eval_data: identities of the data sets.
        max_sequence_length: of the training set, tokens.
        sequences_per_pack: of the training set's packs; None: it takes packing to know.
    """

    shape: BertConfig
    train_data: str
    eval_data: str
    max_sequence_length: int
    sequences_per_pack: float | None


class RecipeBuild(Protocol):
    """The module that a `mlbert.config.recipe.Recipe` names."""

    def build(self, config: Configuration, inputs: Any, world: World, seed: int, warn: Callable[[str], None]) -> Method:
        """The method's objects; nothing of the data sets is touched before their ``open``."""

    def build_evaluation(
        self, config: Configuration, world: World, seed: int, warn: Callable[[str], None]
    ) -> tuple[Model, Objective, EvaluationSet]:
        """What evaluating the starting weights needs; the training set is not looked at."""
