"""Batches do not depend on the number of loader threads, also after a resume within an epoch."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from mds_samples import write_samples
from mlbert.config.batch_growth import BatchGrowth, Growth, TokenGrowth
from mlbert.data.batches import HostBatch
from mlbert.data.formats.streams import streams_of
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.loading.masked_text import SPLIT, TextSet, TextSource
from mlbert.data.loading.source import Prefetcher
from mlbert.host.errors import UserError

TOKENIZER = load_tokenizer("bert-base-uncased")
LENGTH = 48
ROWS = 6
STEPS = 14
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draw = np.random.default_rng(2)
    samples = [
        {"input_ids": draw.integers(1000, 30_000, draw.integers(2, 150))} for _ in range(120)
    ]
    columns = {"input_ids": "ndarray:uint16"}
    return write_samples(tmp_path / "set", columns, samples, size_limit=3000)


@contextmanager
def opened(
    folder: Path, threads: int, packed: int, growth: Growth, state: dict | None
) -> Iterator[TextSource]:
    source = TextSource(
        TextSet(streams_of("", None, folder), TOKENIZER, LENGTH, SPLIT),
        sequences_per_step=ROWS,
        growth=growth,
        packed=packed,
        accumulation=2,
        shuffle="py1s",
        shuffle_seed=3,
        canonical_nodes=2,
        rate=lambda step: 0.3,
        seed=5,
        threads=threads,
    )
    if state is not None:
        source.load_state_dict(state)
    source.open()
    yield source
    source.close()


def contents(batches: list[HostBatch]) -> list[dict[str, bytes]]:
    return [{name: part.tobytes() for name, part in batch.arrays().items()} for batch in batches]


@pytest.mark.parametrize(
    ("packed", "growth"),
    [
        (1, BatchGrowth(2, ROWS, 9)),
        (5, BatchGrowth(2, ROWS, 9)),
        (5, TokenGrowth(2, ROWS, 30 * LENGTH)),
    ],
    ids=["not packed", "packed", "in tokens"],
)
def test_another_number_of_threads_continues_in_the_middle_of_an_epoch(folder, packed, growth):
    with opened(folder, 1, packed, growth, None) as source:
        expected = [contents(source.next_step()) for _ in range(STEPS)]
    for threads_before, threads_after in ((1, 3), (4, 1), (2, 7)):
        with opened(folder, threads_before, packed, growth, None) as source:
            found = [contents(source.next_step()) for _ in range(5)]
            state = json.loads(json.dumps(source.state_dict()))
        with opened(folder, threads_after, packed, growth, state) as source:
            found += [contents(source.next_step()) for _ in range(5, STEPS)]
        assert found == expected


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("in_begin", [True, False])
def test_the_steps_before_an_error_arrive_first(threads, in_begin):
    def fail() -> list[HostBatch]:
        raise UserError("data.damaged", "shard", "is damaged", "Restore it")

    def begin(step: int):
        if step == 5:
            return fail() if in_begin else fail
        return lambda: [HostBatch.dummy(step + 2)]

    prefetcher = Prefetcher(begin, 0, threads)
    assert [prefetcher.next()[0].num_tokens for _ in range(5)] == [2, 3, 4, 5, 6]
    with pytest.raises(UserError, match="is damaged"):
        prefetcher.next()
    prefetcher.stop()
