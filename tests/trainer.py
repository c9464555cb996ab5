"""Our training step with everything that a measurement may want to change from outside."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import HostBatch
from mlbert.distributed.reduce import GradientReducer
from mlbert.distributed.sharding import ShardLayout
from mlbert.distributed.world import World
from mlbert.models.bert import BertForPreTraining
from mlbert.models.objectives import PreTraining
from mlbert.ops.fp8_scaling import Products
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb
from mlbert.programs.bench.sides import LAMB, LEARNING_RATE
from mlbert.training.step import Graphs, Step, StepResult


class Trainer:
    """Our model with LAMB on flat buffers, on one batch again and again.

    Args:
        config: shape of the model.
        batch: what every step trains on; on the host, or kept by the device.
        device: where to compute.
        dtype: precision of the matrix products.
        seed: of weights and dropout.
        start: a model to take over in place of a new one;
            its parameters are already in flat buffers.
        lamb: implementation of LAMB.
        products: the encoder's products that run in FP8; by default, none does.
        graphs: how steps are captured as graphs and batches padded; by default, neither is done.
    """

    def __init__(
        self,
        config: BertConfig,
        batch: HostBatch,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        start: Trainer | None = None,
        lamb: str = "auto",
        products: Products | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self.batch = batch
        self.device = device
        self.seed = seed
        if start is None:
            model = BertForPreTraining(config, dtype)
            model.initialize(seed)
            self.model = model.to(device)
            self.flat = FlatParameters(self.model.ordered_parameters())
        else:
            self.model = start.model
            self.flat = start.flat
        self.model.bert.use_linears(products)
        self.optimizer = Lamb(
            self.flat, ShardLayout.whole(self.flat.numel), **LAMB, implementation=lamb
        )
        self.objective = PreTraining("step")
        alone = GradientReducer(
            self.flat.parameters, self.flat.grad, self.flat.offsets, World(), [], None
        )
        self.make = Step(
            self.model,
            self.objective,
            self.flat,
            alone,
            self.optimizer,
            over_ranks=lambda amax: amax,
            say=print,
            graphs=graphs,
        )
        self._steps = itertools.count()

    def step(self) -> Tensor:
        """Run the next step and return its loss without waiting for it."""
        return self.steps([self.batch], next(self._steps), LEARNING_RATE).loss_sum

    def steps(self, batches: Sequence[HostBatch], number: int, lr: float) -> StepResult:
        """Run a step, with its number, on other batches."""
        counts = [sum(column) for column in zip(*map(self.objective.counts, batches), strict=True)]
        return self.make(batches, self.seed, number, self.objective.divisors(counts), lr)
