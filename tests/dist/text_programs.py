"""Rank program for `test_long_reads`: monitored ranks that read two epochs of texts."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

from mlbert.data.formats.streams import Stream
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.loading import text_lanes
from mlbert.data.loading.masked_text import TextSet, TextSource
from mlbert.distributed.health import Stage
from mlbert.distributed.lifecycle import Lifecycle
from mlbert.distributed.world import World
from mlbert.training.reader import BatchReader

HANG_SECONDS = 3.0
ORDER_SECONDS = 10.0
STEPS_PER_EPOCH = 15
SEQUENCES_PER_RANK = 4


def read_texts(world: World, folder: str, what: str, victim: int) -> int:
    """Read two epochs of the texts in ``folder/set``; return the number of steps.

    On the victim, computing the second epoch's order takes longer than the hang timeout ("order"), or reading that
    epoch's first step never returns ("hang"). The rank that ends the run writes ``story_<rank>.txt``.
    """
    texts = TextSet([Stream(local=f"{folder}/set")], load_tokenizer("bert-base-uncased"), 32, "truncate")
    source = TextSource(
        texts,
        sequences_per_step=SEQUENCES_PER_RANK,
        shuffle="py1s",
        shuffle_seed=1,
        canonical_nodes=1,
        rate=lambda step: 0.15,
        seed=1,
        rank=world.rank,
        world_size=world.world_size,
    )
    if world.rank == victim:
        slow_down(what, source)
    story = Path(folder, f"story_{world.rank}.txt")
    lifecycle = Lifecycle(world, lambda status, reason: story.write_text(f"{status}: {reason}"), HANG_SECONDS)
    objective = SimpleNamespace(scope="step", counts=lambda batch: (batch.num_masked,), divisors=lambda counts: counts)
    model = SimpleNamespace(training_flops=lambda batch: 1)
    reader = BatchReader(source, objective, model, world, lifecycle.watch, lambda: False)
    source.open()
    with lifecycle.guard():
        for step in range(2 * STEPS_PER_EPOCH):
            reader.take(step)
            lifecycle.watch.mark(step, Stage.COMPUTE)
        lifecycle.finish("success")
    source.close()
    return 2 * STEPS_PER_EPOCH


def slow_down(what: str, source: TextSource) -> None:
    """Delay the start of this rank's second epoch, or block it forever."""
    shuffle_into, batches_of = text_lanes.shuffle_into, source.batches_of

    def slow_order(samples, sizes, *, epoch, **options):
        time.sleep(ORDER_SECONDS if epoch == 1 else 0)
        shuffle_into(samples, sizes, epoch=epoch, **options)

    def hanging_batches(step):
        time.sleep(1000 if step == STEPS_PER_EPOCH else 0)
        return batches_of(step)

    if what == "order":
        text_lanes.shuffle_into = slow_order
    if what == "hang":
        source.batches_of = hanging_batches
