"""No step reads the gradients of the one before, on two ranks with every reduction: sums may start
while a backward pass still runs, and every product overwrites what is there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from capturable import SETTINGS, SHAPE
from harness import run_ranks
from host_batches import made_up_batches
from mlbert.distributed.bucket_clipping import BucketClippingReducer
from mlbert.distributed.groups import ShardGroups
from mlbert.distributed.reduce import GradientReducer, cut_buckets
from mlbert.distributed.sharding import ShardedReducer, ShardLayout
from mlbert.distributed.world import World
from mlbert.models.bert import BertForPreTraining
from mlbert.models.objectives import PreTraining
from mlbert.ops import api as ops
from mlbert.ops.fp8_scaling import Products
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb
from mlbert.training.step import Step

RANKS = 2
ACCUMULATION = 2
STEPS = 2  # the second clears what the first did not overwrite
BUCKET_ELEMENTS = 500
REDUCTIONS = ("replicated", "clipped before", "clipped by bucket", "sharded", "sharded bf16")


def trained(world: World, reduction: str, before: Callable[[FlatParameters], object]) -> list[Any]:
    """Return norms and final weights of some steps; call `before` before each."""
    ops.select("plain")
    model = BertForPreTraining(SHAPE, torch.bfloat16, fp8_products=Products())
    model.initialize(3)
    objective = PreTraining("rank" if reduction == "clipped by bucket" else "step")
    settings = dict(SETTINGS)
    if reduction.startswith("sharded"):
        groups = ShardGroups.all_ranks(world)
        flat = FlatParameters(model.ordered_parameters(), ShardLayout.multiple(groups))
        layout = ShardLayout(flat.padded_data.numel(), groups, BUCKET_ELEMENTS)
        sync: GradientReducer = ShardedReducer(
            flat.parameters,
            flat.padded_grad,
            flat.offsets,
            world,
            layout,
            None,
            in_bf16=reduction.endswith("bf16"),
        )
    else:
        flat = FlatParameters(model.ordered_parameters())
        layout = ShardLayout.whole(flat.numel)
        buckets = cut_buckets(flat.offsets, flat.numel, BUCKET_ELEMENTS)
        if reduction == "clipped by bucket":
            settings["max_grad_norm"] = None
            sync = BucketClippingReducer(
                flat.parameters,
                flat.grad,
                flat.offsets,
                world,
                buckets,
                max_norm=1.0,
                accumulation=ACCUMULATION,
            )
        else:
            max_norm = 1.0 if reduction == "clipped before" else None
            sync = GradientReducer(
                flat.parameters, flat.grad, flat.offsets, world, buckets, max_norm
            )
    optimizer = Lamb(flat, layout, **settings, implementation="plain")
    step = Step(model, objective, flat, sync, optimizer, over_ranks=world.all_reduce_max, say=print)
    norms = []
    overlapped = 0
    for number in range(STEPS):
        batches = made_up_batches(
            4,
            seed=10 * number + world.rank,
            vocab_size=SHAPE.vocab_size,
            max_tokens=SHAPE.max_position_embeddings,
            accumulation=ACCUMULATION,
        )
        before(flat)
        norms.append(step(batches, 3, number, (8.0, 8.0), 0.01).grad_norm)
        overlapped += sync.num_overlapped
    with optimizer.exact_weights():
        return [norms, flat.data.tolist(), overlapped]


def poison(flat: FlatParameters) -> None:
    flat.padded_grad.fill_(torch.nan)


def clean_and_poisoned(world: World) -> dict[str, list[Any]]:
    """Return both runs for each reduction."""
    return {
        reduction: [trained(world, reduction, before) for before in (lambda flat: None, poison)]
        for reduction in REDUCTIONS
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(clean_and_poisoned, RANKS, tmp_path_factory.mktemp("poison"))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ranks_do_not_read_the_gradients_of_the_step_before(
    runs: list[Any], reduction: str, tmp_path: Path
) -> None:
    for of_rank in runs:
        clean, found = of_rank[reduction]
        norms, weights, overlapped = clean
        assert all(norm > 0 for norm in norms), "finite, and a gradient"
        assert found == clean
        assert weights == runs[0][reduction][0][1]
        assert overlapped or reduction == "clipped before", "sums began during backward"
