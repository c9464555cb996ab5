"""Rank programs for `test_graphs`."""

import hashlib
import weakref
from typing import Any

import torch

from capturable import SHAPE, TensorLamb, select_capturable
from host_batches import made_up_batches
from mlbert.data.loading.batches import StaticShape
from mlbert.data.loading.synthetic import SyntheticSource
from mlbert.distributed.bucket_clipping import BucketClippingReducer
from mlbert.distributed.capture import NoCapture
from mlbert.distributed.lifecycle import Lifecycle
from mlbert.distributed.reduce import GradientReducer, cut_buckets
from mlbert.distributed.world import World
from mlbert.models.bert import BertForPreTraining
from mlbert.models.objectives import PreTraining
from mlbert.ops.fp8_scaling import Products
from mlbert.optim.flat import FlatParameters
from mlbert.training.reader import BatchReader
from mlbert.training.step import GraphMode, Graphs, Step
from recorded_graph import RecordedGraph

SEED, STEPS, BUCKET_ELEMENTS = 4, 3, 2000
MAX_TOKENS = SHAPE.max_position_embeddings


def train(world: World) -> list[dict[str, Any]]:
    select_capturable()
    ways = [(mode, way) for way in ("whole", "buckets", "rounded") for mode in GraphMode]
    return [train_once(world, *way, recorded) for way in ways for recorded in (True, False)]


def train_once(world: World, mode: GraphMode, way: str, recorded: bool) -> dict[str, Any]:
    """Run three steps of two micro-batches; return the norms and a hash of everything that changed."""
    model = BertForPreTraining(SHAPE, torch.bfloat16, fp8_products=Products())
    model.initialize(SEED)
    flat = FlatParameters(model.ordered_parameters())
    optimizer = TensorLamb(flat)
    buckets = cut_buckets(flat.offsets, flat.numel, BUCKET_ELEMENTS)
    gradients = (flat.parameters, flat.grad, flat.offsets, world, buckets)
    reducer = (
        BucketClippingReducer(*gradients, max_norm=0.1, accumulation=2)
        if way == "buckets"
        else GradientReducer(*gradients, None, in_bf16=way == "rounded")
    )
    static_shape = StaticShape.of_packs(2, MAX_TOKENS, 3, MAX_TOKENS, 5)
    capture = RecordedGraph() if recorded else NoCapture()
    objective, graphs = PreTraining(scope="step"), Graphs(mode, static_shape, 2, lambda: capture)
    step = Step(model, objective, flat, reducer, optimizer, world.all_reduce_max, say=print, graphs=graphs)
    step.record()
    norms = []
    for i in range(STEPS):
        batches = made_up_batches(
            *(4, SEED, SHAPE.vocab_size, MAX_TOKENS, i), accumulation=2, rank=world.rank, world_size=world.world_size
        )
        own = [sum(column) for column in zip(*map(objective.counts, batches), strict=True)]
        counts = world.all_reduce_sum(torch.tensor(own)).tolist()
        norms.append(step(batches, SEED, i, objective.divisors(counts), 0.01).grad_norm)
    changed = hashlib.sha256()
    scales = [buffer for name, buffer in model.named_buffers() if not name.endswith("unread")]
    for tensor in (flat.data, optimizer.exp_avg, optimizer.exp_avg_sq, *scales):
        changed.update(tensor.numpy().tobytes())
    reducer.close()
    graph = weakref.ref(step._graphs[0].replay) if recorded else None
    step.release()
    assert graph is None or graph() is None, "the graph must be released"
    found = {"hash": changed.hexdigest(), "norms": norms, "overlapped": reducer.num_overlapped}
    return {"mode": mode.value, "way": way, **found}


def divisors(world: World) -> dict[str, Any]:
    """Return the loss divisors of a step on this rank for both scopes, and the counts of its own batches."""
    model = BertForPreTraining(SHAPE)
    found: dict[str, Any] = {}
    sizes = {"packs_per_step": 4, "accumulation": 2, "max_sequences_per_pack": 3, "max_tokens": MAX_TOKENS}
    sizes |= {"vocab_size": SHAPE.vocab_size, "rank": world.rank, "world_size": world.world_size}
    for scope in ("step", "rank"):
        source = SyntheticSource(seed=SEED, **sizes)
        lifecycle = Lifecycle(world, lambda status, reason: None)
        reader = BatchReader(source, PreTraining(scope), model, world, lifecycle.watch, lambda: world.rank == 1)
        upcoming = reader.take(0)
        source.close()
        found[scope] = upcoming.divisors
        found["warned"], found["samples"] = upcoming.warned, upcoming.counts.samples
        found["own"] = [sum(getattr(b, n) for b in upcoming.batches) for n in ("num_masked", "num_samples")]
    return found
