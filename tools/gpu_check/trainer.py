"""Our training step with everything that a measurement may want to change from outside."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.profiler import record_function

from mlbert.bench.step import LAMB, LEARNING_RATE
from mlbert.dist.sharding import ShardLayout
from mlbert.feed.batch import Batch
from mlbert.models import BertConfig, BertForPreTraining, DropoutState
from mlbert.ops.fp8 import Products, Scaling
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb

OPTIMIZER_RANGE = "mlbert::optimizer"
LINEARS_PER_LAYER = 4


class Trainer:
    """Our model with LAMB on flat buffers, on one batch that lies on the device.

    Args:
        config: shape of the model.
        batch: what every step trains on.
        dtype: precision of the matrix products.
        seed: of weights and dropout.
        start: a model to take over in place of a new one; its parameters already lie in flat buffers.
        lamb: implementation of LAMB.
        products: the encoder's products that run in FP8; None: none.
        counts: masked tokens and sequences that the loss divides by; None: all that the batch holds.
    """

    def __init__(
        self,
        config: BertConfig,
        batch: Batch,
        dtype: torch.dtype,
        seed: int,
        start: Trainer | None = None,
        lamb: str = "auto",
        products: Products | None = None,
        counts: tuple[int, int] | None = None,
    ) -> None:
        self.batch, self.seed = batch, seed
        self._counts = counts or (batch.num_masked, batch.num_samples)
        if start is None:
            model = BertForPreTraining(config, dtype)
            model.initialize(seed)
            self.model = model.to(batch.input_ids.device)
            self.flat = FlatParameters(self.model.ordered_parameters())
        else:
            self.model, self.flat = start.model, start.flat
        scaling = Scaling(LINEARS_PER_LAYER * config.num_hidden_layers, products) if products else None
        self.model.bert.scaling = scaling.to(self.flat.data.device) if scaling else None
        self.optimizer = Lamb(self.flat, ShardLayout.whole(self.flat.numel), **LAMB, implementation=lamb)
        self._steps = iter(range(10**9))

    def step(self) -> Tensor:
        """One step; returns its loss without waiting for it."""
        batch = self.batch
        with record_function(OPTIMIZER_RANGE):
            self.flat.zero_grad()
        loss = self.model(batch, DropoutState(self.seed, next(self._steps))).loss(*self._counts)
        loss.backward()
        with record_function(OPTIMIZER_RANGE):
            self.optimizer.step(LEARNING_RATE)
            if scaling := self.model.bert.scaling:
                scaling.update(lambda magnitudes: magnitudes)
        return loss.detach()
