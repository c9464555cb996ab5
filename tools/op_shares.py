"""Time the parts of a training step on a CPU with PyTorch's profiler.

A part's time is that of the main thread in the part's own operators, without those that they call.
What is left of a step is "Python": autograd, the dispatcher and the interpreter.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from mlbert.config.bert_config import BertConfig
from mlbert.config.flops import BACKWARD_FACTOR, BatchWork, training_flops
from mlbert.data.batches import HostBatch
from mlbert.distributed.sharding import ShardLayout
from mlbert.models.bert import BertForPreTraining
from mlbert.models.objectives import PreTraining
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb
from mlbert.programs.bench.sides import LAMB, Side, trained_side

PRODUCTS = "products"
ATTENTION = "attention"
NORMS = "norms, GELU and casts"
LOSS = "loss"
EMBEDDING = "embedding"
OPTIMIZER = "optimizer"
PYTHON = "Python"
PARTS = (PRODUCTS, ATTENTION, NORMS, LOSS, EMBEDDING, OPTIMIZER, PYTHON)
STEPS = 5  # profiled ones
FEWEST_STEPS = 2
LONG_STEP = 2.0  # seconds, from which on `FEWEST_STEPS` are profiled
# Words of operators' names, by part; an operator is of the first part that has a word of its name.
_WORDS = (
    (OPTIMIZER, (OPTIMIZER,)),
    (PRODUCTS, ("::mm", "::addmm", "::bmm", "::baddbmm", "mkldnn_linear")),
    (ATTENTION, ("Attention",)),
    (LOSS, ("CrossEntropy", "cross_entropy", "log_softmax", "nll_loss")),
    (EMBEDDING, ("EmbeddingSum", "embedding")),
)
# These call no kernel themselves.
_DISPATCHERS = (
    "aten::linear",
    "aten::matmul",
    "aten::t",
    "aten::transpose",
    "aten::to",
    "aten::_to",
)


@dataclass(frozen=True)
class OpShares:
    """The parts of a step.

    Attributes:
        step_seconds: median step without the profiler.
        profiled_seconds: mean step with it.
        part_seconds: mean seconds of each of `PARTS` in a profiled step.
        flops: of the model's step, by part; other parts have none.
        waiting: share of the threads' time in which they do not run, without the profiler. A thread
            that spins while it waits counts as running.
    """

    step_seconds: float
    profiled_seconds: float
    part_seconds: dict[str, float]
    flops: dict[str, int]
    waiting: float


def part_of(operator: str) -> str:
    """Return the part of a step to which an operator of the profiler belongs."""
    for part, words in _WORDS:
        if any(word in operator for word in words):
            return part
    return PYTHON if operator.startswith(_DISPATCHERS) else NORMS


def op_shares(config: BertConfig, batch: HostBatch, dtype: torch.dtype, seed: int) -> OpShares:
    """Time the parts of our step with the current number of threads.

    Args:
        config: model shape.
        batch: its sequences.
        dtype: of the products.
        seed: of weights and dropout.
    """
    side = _side_with_marked_optimizer(config, batch, dtype, seed)
    side.step()
    started = time.perf_counter()
    side.step()
    steps = FEWEST_STEPS if time.perf_counter() - started > LONG_STEP else STEPS
    taken = []
    cpu_before = time.process_time()
    for _ in range(steps):
        started = time.perf_counter()
        side.step()
        taken.append(time.perf_counter() - started)
    cpu_seconds = time.process_time() - cpu_before
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        started = time.perf_counter()
        for _ in range(steps):
            side.step()
        profiled = (time.perf_counter() - started) / steps
    work = BatchWork.of(batch)
    layers = config.num_hidden_layers
    in_attention = BACKWARD_FACTOR * 4 * layers * work.squared_lengths * config.hidden_size
    return OpShares(
        step_seconds=statistics.median(taken),
        profiled_seconds=profiled,
        part_seconds=_by_part(profiler, profiled, steps),
        flops={
            PRODUCTS: training_flops(config, work) - in_attention,
            ATTENTION: in_attention,
        },
        waiting=max(0.0, 1 - cpu_seconds / (sum(taken) * torch.get_num_threads())),
    )


def _by_part(profiler: Any, step_seconds: float, steps: int) -> dict[str, float]:
    """Return the mean seconds of each part; `PYTHON` has what is left of the step."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        seconds[part_of(event.key)] += event.self_cpu_time_total / 1e6 / steps
    others = [part for part in PARTS if part != PYTHON]
    seconds[PYTHON] = max(0.0, step_seconds - sum(seconds[part] for part in others))
    return {part: seconds[part] for part in PARTS}


def _side_with_marked_optimizer(
    config: BertConfig, batch: HostBatch, dtype: torch.dtype, seed: int
) -> Side:
    """Return our step, in which the optimizer is one operator for the profiler."""
    model = BertForPreTraining(config, dtype)
    model.initialize(seed)
    flat = FlatParameters(model.ordered_parameters())

    class MarkedLamb(Lamb):
        def step(self, lr: float) -> torch.Tensor:
            with record_function(OPTIMIZER):
                return super().step(lr)

    optimizer = MarkedLamb(flat, ShardLayout.whole(flat.numel), **LAMB)
    return trained_side(batch, model, seed, optimizer, PreTraining("step"))
