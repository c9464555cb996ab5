"""A whole FP8 step of Triton's kernels, LAMB among them, repeated with every number baked in: the same bits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from capturable import SETTINGS
from capturable import SHAPE as SMALL
from host_batches import made_up_batches
from mlbert.data.loading.batches import StaticShape
from mlbert.distributed.capture import Capture, NoCapture
from mlbert.distributed.reduce import GradientReducer, cut_buckets
from mlbert.distributed.sharding import ShardLayout
from mlbert.distributed.world import World
from mlbert.models.bert import BertForPreTraining
from mlbert.models.objectives import PreTraining
from mlbert.ops import api as ops
from mlbert.ops.fp8_scaling import Products
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb
from mlbert.training.step import GraphMode, Graphs, Step
from recorded_graph import RecordedGraph

pytest.importorskip("triton", reason="Triton is not installed")

SHAPE = replace(SMALL, hidden_size=64, num_hidden_layers=1)  # heads of 32: the least that the kernels take
SEED = 3
RATES = (0.01, 0.03)
MAX_TOKENS = SHAPE.max_position_embeddings


@pytest.fixture(autouse=True)
def triton_ops(use_triton: None, restore_selection: None) -> None:
    ops.select("triton")


def history(capture: Capture) -> list[list[Tensor]]:
    """Loss, norm, weights and moments after each step."""
    model = BertForPreTraining(SHAPE, torch.bfloat16, fp8_products=Products())
    model.initialize(SEED)
    objective = PreTraining(scope="step")
    flat = FlatParameters(model.ordered_parameters())
    optimizer = Lamb(flat, ShardLayout.whole(flat.padded_data.numel()), implementation="triton", **SETTINGS)
    buckets = cut_buckets(flat.offsets, flat.numel, flat.numel)
    sync = GradientReducer(flat.parameters, flat.grad, flat.offsets, World(), buckets, None)
    static_shape = StaticShape(tokens=MAX_TOKENS, sequences=3, masked=16, max_seqlen=MAX_TOKENS, has_labels=False)
    graphs = Graphs(GraphMode.FULL_ITERATION, static_shape, 1, lambda: capture)
    step = Step(model, objective, flat, sync, optimizer, over_ranks=lambda amax: amax, say=print, graphs=graphs)
    start = flat.data.clone()
    step.record()
    assert torch.equal(flat.data, start), "recording changed the weights"
    found = []
    for i, lr in enumerate(RATES):
        (batch,) = made_up_batches(1, SEED, SHAPE.vocab_size, MAX_TOKENS, step=i)
        result = step([batch], SEED, i, objective.divisors(objective.counts(batch)), lr)
        tensors = (result.loss_sum, flat.data, optimizer.exp_avg, optimizer.exp_avg_sq, *model.buffers())
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
