"""Recorded steps on two ranks, including collectives, are bit-equal to steps without recording."""

import hashlib
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from capturable import SHAPE, TensorLamb, select_capturable
from harness import run_ranks
from host_batches import made_up_batches
from mlbert.data.batches import StaticShape
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

SEED = 4
STEPS = 3
BUCKET_ELEMENTS = 2000
MAX_TOKENS = SHAPE.max_position_embeddings


def train(world: World) -> list[dict[str, Any]]:
    select_capturable()
    ways = [(mode, way) for way in ("whole", "buckets", "rounded") for mode in GraphMode]
    return [train_once(world, *way, recorded) for way in ways for recorded in (True, False)]


def train_once(world: World, mode: GraphMode, way: str, recorded: bool) -> dict[str, Any]:
    """Run three steps of two micro-batches; return the norms
    and a hash of everything that changed.
    """
    model = BertForPreTraining(SHAPE, torch.bfloat16, fp8_products=Products())
    model.initialize(SEED)
    flat = FlatParameters(model.ordered_parameters())
    optimizer = TensorLamb(flat)
    buckets = cut_buckets(flat.offsets, flat.numel, BUCKET_ELEMENTS)
    if way == "buckets":
        reducer = BucketClippingReducer(
            flat.parameters,
            flat.grad,
            flat.offsets,
            world,
            buckets,
            max_norm=0.1,
            accumulation=2,
        )
    else:
        reducer = GradientReducer(
            flat.parameters,
            flat.grad,
            flat.offsets,
            world,
            buckets,
            None,
            in_bf16=way == "rounded",
        )
    static_shape = StaticShape.of_packs(2, MAX_TOKENS, 3, MAX_TOKENS, 5)
    capture = RecordedGraph() if recorded else NoCapture()
    objective = PreTraining(scope="step")
    graphs = Graphs(mode, static_shape, 2, lambda: capture)
    step = Step(
        model, objective, flat, reducer, optimizer, world.all_reduce_max, say=print, graphs=graphs
    )
    step.record()
    norms = []
    for i in range(STEPS):
        batches = made_up_batches(
            4,
            SEED,
            SHAPE.vocab_size,
            MAX_TOKENS,
            i,
            accumulation=2,
            rank=world.rank,
            world_size=world.world_size,
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


@pytest.mark.slow
def test_replayed_steps_are_bit_equal(tmp_path: Path) -> None:
    first, second = run_ranks(train, 2, tmp_path)
    assert [(run["way"], run["mode"]) for run in first[::2]] == [
        (way, mode)
        for way in ("whole", "buckets", "rounded")
        for mode in ("segmented", "full_iteration")
    ]
    for recorded, eager, other_rank in zip(first[::2], first[1::2], second[::2], strict=True):
        assert recorded["hash"] == eager["hash"] == other_rank["hash"]
        assert recorded["norms"] == eager["norms"]
        if eager["mode"] == "full_iteration":
            assert eager["overlapped"] > 1, "in a full graph, reductions must start during backward"
        else:
            assert recorded["overlapped"] == 0, "a replayed graph must not call gradient hooks"


def divisors(world: World) -> dict[str, Any]:
    """Return the loss divisors of a step on this rank for both scopes,
    and the counts of its batches.
    """
    model = BertForPreTraining(SHAPE)
    found: dict[str, Any] = {}
    sizes = {
        "packs_per_step": 4,
        "accumulation": 2,
        "max_sequences_per_pack": 3,
        "max_tokens": MAX_TOKENS,
    }
    sizes |= {"vocab_size": SHAPE.vocab_size, "rank": world.rank, "world_size": world.world_size}
    for scope in ("step", "rank"):
        source = SyntheticSource(seed=SEED, **sizes)
        lifecycle = Lifecycle(world, lambda status, reason: None)
        reader = BatchReader(
            source, PreTraining(scope), model, world, lifecycle.watch, lambda: world.rank == 1
        )
        upcoming = reader.take(0)
        source.close()
        found[scope] = upcoming.divisors
        found["warned"] = upcoming.warned
        found["samples"] = upcoming.counts.samples
        found["own"] = [
            sum(getattr(b, n) for b in upcoming.batches) for n in ("num_masked", "num_samples")
        ]
    return found


def test_loss_divisors(tmp_path: Path) -> None:
    """Divisors are the counts of all ranks, or the rank's own counts times the number of ranks,
    since gradients are summed. A warning on one rank reaches all ranks.
    """
    ranks = run_ranks(divisors, 2, tmp_path)
    masked, samples = (sum(rank["own"][i] for rank in ranks) for i in (0, 1))
    assert ranks[0]["own"] != ranks[1]["own"]
    for rank in ranks:
        assert rank["step"] == pytest.approx([masked + 1e-5, samples])
        assert rank["rank"] == pytest.approx([2 * (rank["own"][0] + 1e-5), 2 * rank["own"][1]])
        assert rank["samples"] == samples
        assert rank["warned"]
