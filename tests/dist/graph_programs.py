"""What the ranks of `test_graphs` run."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from capturable import SHAPE, TensorLamb, select_capturable
from mlbert.feed.budget import Budget
from mlbert.feed.synthetic import SyntheticSource
from mlbert.dist.capture import NoCapture
from mlbert.dist.reduce import GradientReducer
from mlbert.dist.world import World
from mlbert.models import BertForPreTraining, GraphedStep, GraphMode
from mlbert.ops.fp8 import Products
from mlbert.optim.flat import FlatParameters
from recorded_graph import RecordedGraph

SEED, STEPS, BUCKET_BYTES = 4, 3, 8000
MAX_TOKENS = SHAPE.max_position_embeddings


def train(world: World) -> list[dict[str, Any]]:
    """What `train_once` gives for each mode, recorded and not."""
    select_capturable()
    return [train_once(world, mode, recorded) for mode in GraphMode for recorded in (True, False)]


def train_once(world: World, mode: GraphMode, recorded: bool) -> dict[str, Any]:
    """Three steps of two micro-batches on this rank's share; a hash of all that they changed, and the norms."""
    model = BertForPreTraining(SHAPE, torch.bfloat16, fp8_products=Products())
    model.initialize(SEED)
    flat = FlatParameters(model.ordered_parameters())
    optimizer = TensorLamb(flat)
    reducer = GradientReducer(flat.parameters, flat.grad, flat.offsets, world, BUCKET_BYTES)
    budget = Budget.of_packs(2, MAX_TOKENS, 3, MAX_TOKENS, 5)
    capture = RecordedGraph() if recorded else NoCapture()
    step = GraphedStep(
        *(model, flat, optimizer, budget, 2, mode, capture), reducer=reducer, over_ranks=world.all_reduce_max
    )
    step.record()
    source = SyntheticSource(
        packs_per_step=4,
        accumulation=2,
        max_sequences_per_pack=3,
        seed=SEED,
        vocab_size=SHAPE.vocab_size,
        max_tokens=MAX_TOKENS,
        rank=world.rank,
        world_size=world.world_size,
    )
    norms = []
    for i in range(STEPS):
        batches = source.batches_of(i)
        counts = torch.tensor([sum(getattr(b, n) for b in batches) for n in ("num_masked", "num_samples")])
        masked, samples = world.all_reduce_sum(counts).tolist()
        _, result = step(batches, SEED, i, masked, samples, 0.01)
        norms.append(result.grad_norm)
    changed = hashlib.sha256()
    for tensor in (flat.data, optimizer.exp_avg, optimizer.exp_avg_sq, *model.buffers()):
        changed.update(tensor.numpy().tobytes())
    reducer.close()
    return {"mode": mode.value, "hash": changed.hexdigest(), "norms": norms, "overlapped": reducer.num_overlapped}
