"""Times a training step on 4 gloo ranks with the gradient clipped after, before, and bucket by bucket, in turn.

    python -m torch.distributed.run --standalone --nproc-per-node=4 clipping.py ROUNDS HIDDEN LAYERS

Every rank holds all three; each round makes one step of each. A JSON line a round: seconds of the slowest rank.
"""

import json
import sys
import time

import torch
from mlbert.core.bert_config import BertConfig
from mlbert.dist.bucket_clipping import BucketClippingReducer
from mlbert.dist.reduce import GradientReducer, cut_buckets
from mlbert.dist.sharding import ShardLayout
from mlbert.dist.world import World
from mlbert.feed.synthetic import SyntheticSource
from mlbert.train.step import Step

from mlbert.models.bert import BertForPreTraining
from mlbert.models.objectives import PreTraining
from mlbert.optim.adamw import AdamW
from mlbert.optim.flat import FlatParameters

WAYS = ("after", "before", "buckets")
BUCKET_ELEMENTS = 25 * 2**20 // 4 // 8  # an eighth of the default, for a model of about a twentieth of BERT-large
SETTINGS = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.01, "max_grad_norm": 1.0}

rounds, hidden, layers = map(int, sys.argv[1:])
shape = BertConfig(
    vocab_size=4096,
    hidden_size=hidden,
    num_hidden_layers=layers,
    num_attention_heads=hidden // 64,
    intermediate_size=4 * hidden,
    max_position_embeddings=128,
)
objective = PreTraining("rank")


def make(way, world):
    """The step with this way of clipping, and what it clips and reduces with."""
    model = BertForPreTraining(shape)
    model.initialize(1)
    flat = FlatParameters(model.ordered_parameters())
    buckets = cut_buckets(flat.offsets, flat.numel, BUCKET_ELEMENTS)
    gradients = (flat.parameters, flat.grad, flat.offsets, world, buckets)
    if way == "buckets":
        sync = BucketClippingReducer(*gradients, max_norm=1.0)
    else:
        sync = GradientReducer(*gradients, 1.0 if way == "before" else None)
    clipped = {"clipped_before": way != "after", "known_norm": sync.grad_norm}
    optimizer = AdamW(flat, ShardLayout.whole(flat.numel), **SETTINGS, **clipped)
    return sync, Step(model, objective, flat, sync, optimizer, world.all_reduce_max, say=print)


world = World.identify()
world.start()
torch.set_num_threads(1)
made = {way: make(way, world) for way in WAYS}
source = SyntheticSource(
    packs_per_step=4, max_sequences_per_pack=1, seed=3, rank=world.rank, world_size=4, vocab_size=4096, max_tokens=128
)
for turn in range(rounds + 1):
    batches = source.batches_of(turn)
    divisors = [4 * d for d in objective.divisors(objective.counts(batches[0]))]
    seconds = {}
    for way in WAYS if turn % 2 else WAYS[::-1]:
        world.barrier()
        started = time.perf_counter()
        assert not made[way][1](batches, 1, turn, divisors, 1e-3).skipped
        seconds[way] = float(world.all_reduce_max(torch.tensor(time.perf_counter() - started)))
    if turn and world.rank == 0:
        begun = {way: f"{made[way][0].num_overlapped} of {made[way][0].num_buckets}" for way in WAYS}
        rounded = {way: round(value, 4) for way, value in seconds.items()}
        print(json.dumps({"round": turn, **rounded, "begun in backward": begun}), flush=True)
world.stop()
