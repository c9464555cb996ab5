"""A batch that went to a device in the compact form is the batch that was made on the host, in every element."""

from __future__ import annotations

import dataclasses
import importlib

import numpy as np
import pytest
import torch

from mlbert.feed import compact
from mlbert.feed.batch import Batch
from mlbert.feed.budget import Budget
from mlbert.feed.compact import CompactBatch, expand_plain
from mlbert.feed.packed import Prefetcher, make_batch
from mlbert.feed.synthetic import SyntheticSource
from mlbert.store.ragged import Ragged

EXTRAS = [(0, 0, 0), (1, 0, 0), (0, 3, 0), (300, 40, 77)]


@pytest.fixture(params=["plain", "triton"])
def expand(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the batch is made by."""
    chosen = expand_plain
    if request.param == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
        request.getfixturevalue("use_triton")
        chosen = importlib.import_module("mlbert.feed.triton_expand").expand
    monkeypatch.setattr(compact, "expansion", lambda device: chosen)


def rows_of(lengths: list[int], masked: list[int], generator: np.random.Generator) -> Ragged:
    """Sequences of these lengths with so many masked tokens; ids and labels use all 16 bits."""
    return Ragged.from_rows(
        (
            generator.integers(0, 1 << 16, length).tolist(),
            int(generator.integers(0, length + 1)),
            bool(generator.integers(2)),
            sorted(generator.choice(length, count, replace=False).tolist()),
            generator.integers(0, 1 << 16, count).tolist(),
        )
        for length, count in zip(lengths, masked, strict=True)
    )


def ugly(name: str) -> Batch:
    generator = np.random.default_rng(3)
    lengths, masked, packs = {
        "one token": ([1], [0], [1]),
        "one sequence": ([512], [76], [1]),
        "single tokens": ([1] * 70, [1] * 70, [3, 2] * 14),
        "nothing masked": ([5, 9, 2], [0, 0, 0], [2, 1]),
        "512 sequences": ([int(n) for n in generator.integers(1, 4, 512)], [1] * 512, [2] * 256),
        "long and short": ([256, 1, 255, 512, 1, 1, 257, 3], [40, 0, 12, 76, 1, 0, 9, 3], [3, 1, 4]),
    }[name]
    return make_batch(rows_of(lengths, masked, generator), np.asarray(packs), 7, 1024)


UGLY = ("one token", "one sequence", "single tokens", "nothing masked", "512 sequences", "long and short")


def assert_same(found: Batch, expected: Batch) -> None:
    for field in dataclasses.fields(Batch):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype, field.name
            assert one.tolist() == other.tolist(), field.name
        else:
            assert one == other, field.name


@pytest.mark.parametrize("name", UGLY)
@pytest.mark.parametrize("extra", EXTRAS)
def test_ugly_batches_come_back_filled(expand, name, extra):
    batch = ugly(name)
    tokens, sequences, masked = extra
    budget = Budget(batch.num_tokens + tokens, batch.num_samples + sequences, batch.num_masked + masked, 600)
    target = budget.allocate("cpu")
    for value in dataclasses.asdict(target).values():
        if isinstance(value, torch.Tensor):
            value.fill_(77)  # whatever the last batch left
    budget.write(CompactBatch.of(batch), target)
    assert_same(target, budget.fill(batch))


@pytest.mark.parametrize("name", UGLY)
def test_ugly_batches_come_back(expand, name):
    batch = ugly(name)
    assert_same(CompactBatch.of(batch).to("cpu"), batch)


@pytest.mark.parametrize("seed", range(2))
def test_random_batches_come_back(expand, seed):
    source = SyntheticSource(packs_per_step=4, accumulation=2, seed=seed, vocab_size=30522, rank=1, world_size=3)
    for batch in source.batches_of(seed):
        assert_same(CompactBatch.of(batch).to("cpu"), batch)


def test_a_batch_without_sequences_comes_back(expand):
    batch = make_batch(Ragged.from_rows([]), np.asarray([], np.int64), 0, 512)
    assert_same(CompactBatch.of(batch).to("cpu"), batch)


def test_the_host_sees_what_it_counts():
    batch = ugly("long and short")
    packed = CompactBatch.of(batch)
    counts = (batch.num_tokens, batch.num_samples, batch.num_masked, batch.max_seqlen)
    assert (packed.num_tokens, packed.num_samples, packed.num_masked, packed.max_seqlen) == counts
    assert torch.equal(packed.cu_seqlens, batch.cu_seqlens)


def test_a_token_takes_three_bytes():
    (batch,) = SyntheticSource(packs_per_step=64, seed=1).batches_of(0)
    assert CompactBatch.of(batch).data.numel() < 3.2 * batch.num_tokens


def test_ids_beyond_16_bits_are_refused():
    batch = ugly("one sequence")
    batch.input_ids[3] = 1 << 16
    with pytest.raises(AssertionError, match="16 bits"):
        CompactBatch.of(batch)


def test_the_triton_kernel_refuses_a_small_target(request):
    pytest.importorskip("triton", reason="Triton is not installed")
    request.getfixturevalue("use_triton")
    expand = importlib.import_module("mlbert.feed.triton_expand").expand
    packed = CompactBatch.of(ugly("one sequence"))
    with pytest.raises(AssertionError, match="larger than its target"):
        expand(packed.parts(packed.data), CompactBatch.of(ugly("one token")).to("cpu"))


def test_on_a_cpu_sources_give_batches():
    source = SyntheticSource(packs_per_step=2, seed=1)
    expected = source.batches_of(0)
    fetch = Prefetcher(source.batches_of, 0)
    try:
        found = fetch.next()
    finally:
        fetch.stop()
    kind = CompactBatch if torch.cuda.is_available() else Batch
    assert [type(batch) for batch in found] == [kind]
    assert_same(found[0].to("cpu"), expected[0])
