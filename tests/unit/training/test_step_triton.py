"""A whole FP8 step of Triton's kernels, LAMB among them, repeated with every number baked in: the same bits."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from capturable import SETTINGS
from capturable import SHAPE as SMALL
from host_batches import made_up_batches
from mlbert.data.loading.batches import StaticShape
from mlbert.distributed.capture import Capture, NoCapture
from mlbert.ops import api as ops
from mlbert.ops.fp8_scaling import Products
from mlbert.optim.lamb import Lamb
from mlbert.training.step import GraphMode, Graphs
from recorded_graph import RecordedGraph
from unit.training.test_step import SEED, Trainer
from unsharded import unsharded

pytest.importorskip("triton", reason="Triton is not installed")

SHAPE = replace(SMALL, hidden_size=64, num_hidden_layers=1)  # heads of 32: the least that the kernels take
RATES = (0.01, 0.03)
MAX_TOKENS = SHAPE.max_position_embeddings


@pytest.fixture(autouse=True)
def triton_ops(use_triton: None, restore_selection: None) -> None:
    ops.select("triton")


def history(capture: Capture) -> list[list[Tensor]]:
    make_optimizer = functools.partial(unsharded, Lamb, implementation="triton", **SETTINGS)
    trainer = Trainer(torch.bfloat16, Products(), SHAPE, make_optimizer)
    flat, optimizer, objective = trainer.flat, trainer.optimizer, trainer.objective
    static_shape = StaticShape(tokens=MAX_TOKENS, sequences=3, masked=16, max_seqlen=MAX_TOKENS, has_labels=False)
    step = trainer.step(Graphs(GraphMode.FULL_ITERATION, static_shape, 1, lambda: capture))
    start = flat.data.clone()
    step.record()
    assert torch.equal(flat.data, start), "recording changed the weights"
    found = []
    for i, lr in enumerate(RATES):
        (batch,) = made_up_batches(1, SEED, SHAPE.vocab_size, MAX_TOKENS, step=i)
        result = step([batch], SEED, i, objective.divisors(objective.counts(batch)), lr)
        tensors = (result.loss_sum, flat.data, optimizer.exp_avg, optimizer.exp_avg_sq, *trainer.model.buffers())
        found.append([torch.tensor(result.grad_norm), *(x.clone() for x in tensors)])
    assert not torch.equal(flat.data, start)
    return found


@pytest.mark.slow
def test_replayed_kernels_are_the_kernels():
    """The first step finds the scales, by a graph of its own; the second one knows them."""
    graph = RecordedGraph()
    found, expected = history(graph), history(NoCapture())
    assert graph.num_operations > 100
    for values, wanted in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(values, wanted, strict=True))
