"""Count one optimizer step and one evaluation of BERT pre-training on a simulated GPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

from counted.gpus import Gpu
from counted.pretend import DEVICE
from counted.recorder import Memory, Operation, RecordedCapture, Recorder, recording
from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import HostBatch, StaticShape
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.static_masking import MASKED_SHARE, MAX_PREDICTIONS
from mlbert.distributed.reduce import GradientReducer
from mlbert.distributed.sharding import ShardLayout
from mlbert.distributed.world import World
from mlbert.models.bert import BertBase, BertForPreTraining
from mlbert.models.objectives import MaskedLM, PreTraining
from mlbert.ops.precision import compute_dtype, fp8_products
from mlbert.optim import optimizers as methods
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb
from mlbert.optim.loss_scale import LossScale
from mlbert.optim.optimizer import FlatOptimizer
from mlbert.training.evaluate import Evaluator
from mlbert.training.step import GraphMode, Graphs, Step

SEQUENCES_PER_PACK = 3
LAMB: dict[str, Any] = {
    "betas": (0.9, 0.999),
    "eps": 1e-6,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
}


@dataclass(frozen=True)
class Counted:
    """The recorded operations and memory.

    Attributes:
        step: launches of a step in order, including those of its graphs.
        evaluation: launches of an evaluation of one batch.
        memory: memory over start-up, two steps and the evaluation.
        static_shape: static shape of the micro-batch.
        parameters: number of parameters.
    """

    step: list[Operation]
    evaluation: list[Operation]
    memory: Memory
    static_shape: StaticShape
    parameters: int


@contextlib.contextmanager
def models_on_the_device() -> Iterator[None]:
    """Create models on the simulated device in the block, without initializing weights."""
    make = BertBase.__init__

    def on_device(self: BertBase, *args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            make(self, *args, **kwargs)

    with (
        mock.patch.object(BertBase, "__init__", on_device),
        mock.patch.object(BertBase, "initialize"),
    ):
        yield


def filled(static_shape: StaticShape) -> HostBatch:
    """Return a batch with all tokens of the static shape and two thirds of its sequences,
    as packs have.
    """
    number = max(
        -(-static_shape.tokens // static_shape.max_seqlen),
        static_shape.sequences * 2 // SEQUENCES_PER_PACK,
    )
    lengths = [len(part) for part in np.array_split(np.arange(static_shape.tokens), number)]
    masked = [max(1, round(MASKED_SHARE * length)) for length in lengths]
    rows = [
        ([0] * n, n, False, range(1, m + 1), [0] * m) for n, m in zip(lengths, masked, strict=True)
    ]
    return HostBatch.of_sequences(
        Ragged.from_rows(rows), np.arange(number), static_shape.max_seqlen
    )


@dataclass(frozen=True)
class Trained:
    """The objects and options of a `mlbert.training.step.Step`."""

    model: BertBase
    objective: MaskedLM
    flat: FlatParameters
    sync: GradientReducer
    optimizer: FlatOptimizer
    static_shape: StaticShape
    graphs: Graphs | None = None
    micro_batches: int = 1
    evaluated: StaticShape | None = None
    loss_scale: LossScale | None = None


def count(
    config: BertConfig,
    packs: int,
    precision: str,
    gpu: Gpu,
    mode: str = "full_iteration",
    choice: str = "auto",
) -> Counted:
    """Count a step of a model of this shape with LAMB on one GPU.

    Args:
        packs: number of full packs in the step's only micro-batch.
        precision, mode, choice: PRECISION, CUDA_GRAPH_MODE and OPS.
    """
    with recording(gpu, choice) as recorder, models_on_the_device():
        products = fp8_products(precision, DEVICE)
        model = BertForPreTraining(config, compute_dtype(precision, DEVICE), fp8_products=products)
        flat = FlatParameters(model.ordered_parameters())
        copy = methods.copy_dtype(precision, DEVICE)
        optimizer = Lamb(flat, ShardLayout.whole(flat.numel), copy_dtype=copy, **LAMB)
        sync = GradientReducer(flat.parameters, flat.grad, flat.offsets, World(), [], None)
        length = config.max_position_embeddings
        static_shape = StaticShape.of_packs(
            packs, length, SEQUENCES_PER_PACK, length, MAX_PREDICTIONS
        )
        capture = functools.partial(RecordedCapture, recorder)
        graphs = None if mode == "none" else Graphs(GraphMode(mode), static_shape, 1, capture)
        return run(
            recorder,
            Trained(model, PreTraining("step"), flat, sync, optimizer, static_shape, graphs),
        )


def run(recorder: Recorder, trained: Trained) -> Counted:
    """Run start-up, two steps (in FP8 the first finds the scales) and two evaluations;
    return the second ones.
    """
    recorder.name(trained.flat.padded_data, "weights")
    recorder.name(trained.flat.padded_grad, "gradients")
    for key in trained.optimizer.STATE:
        recorder.name(getattr(trained.optimizer, key), "moments")
    warnings: list[str] = []
    step = Step(
        trained.model,
        trained.objective,
        trained.flat,
        trained.sync,
        trained.optimizer,
        lambda tensor: tensor,
        warnings.append,
        trained.graphs,
        trained.loss_scale,
    )
    with recorder.start_up():
        step.warm_up()
        if trained.graphs:
            step.record()
    batch = filled(trained.static_shape)
    objective = trained.objective
    divisors = objective.divisors(objective.counts(batch))
    capture = trained.graphs.capture() if trained.graphs else None
    samples = [filled(trained.evaluated or trained.static_shape)]
    evaluator = Evaluator(trained.model, objective, samples, World(), capture)
    operations: list[Operation] = []
    evaluation: list[Operation] = []
    for number in range(2):
        recorder.operations = operations = []
        step([batch] * trained.micro_batches, 1, number, divisors, 1e-4)
        recorder.operations = evaluation = []
        evaluator.begin()  # the first one records its graph
    assert not warnings, warnings
    return Counted(
        operations, evaluation, recorder.memory, trained.static_shape, trained.flat.numel
    )
