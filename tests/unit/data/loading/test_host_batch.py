"""A batch that went through the host's buffer is the batch by the book, in every element, however it is expanded."""

from __future__ import annotations

import dataclasses
import importlib

import numpy as np
import pytest
import torch

from host_batches import assert_same, made_up_batches, plain_batch, plain_filled
from mlbert.data.formats.ragged import Ragged
from mlbert.data.loading import batches
from mlbert.data.loading.batches import Batch, HostBatch, StaticShape, expand_plain

EXTRAS = [(0, 0, 0), (1, 0, 0), (0, 3, 0), (300, 40, 77)]
UGLY = ("one token", "one sequence", "single tokens", "nothing masked", "512 sequences", "long and short", "nothing")


@pytest.fixture(params=["plain", "triton"])
def expand(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a target is written by."""
    chosen = expand_plain
    if request.param == "triton":
        request.getfixturevalue("use_triton")
        chosen = importlib.import_module("mlbert.data.loading.triton_expand").expand
    monkeypatch.setattr(batches, "expansion", lambda device: chosen)


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


def ugly(name: str, labels: bool = False) -> tuple[HostBatch, Batch]:
    """Both ways; units are numbered as a deal may do it."""
    generator = np.random.default_rng(3)
    lengths, masked, packs = {
        "one token": ([1], [0], [1]),
        "one sequence": ([512], [76], [1]),
        "single tokens": ([1] * 70, [1] * 70, [3, 2] * 14),
        "nothing masked": ([5, 9, 2], [0, 0, 0], [2, 1]),
        "512 sequences": ([int(n) for n in generator.integers(1, 4, 512)], [1] * 512, [2] * 256),
        "long and short": ([256, 1, 255, 512, 1, 1, 257, 3], [40, 0, 12, 76, 1, 0, 9, 3], [3, 1, 4]),
        "nothing": ([], [], []),
    }[name]
    rows = rows_of(lengths, masked, generator)
    if labels:
        rows = dataclasses.replace(rows, labels=generator.normal(size=len(rows)).astype(np.float32))
    units = generator.permutation(300)[: len(packs)]
    batch = HostBatch.of(rows, np.asarray(packs, np.int64), units, 1024)
    return batch, plain_batch(rows, packs, units.tolist(), 1024)


def budget_of(batch: HostBatch, tokens: int, sequences: int, masked: int) -> StaticShape:
    sizes = batch.num_tokens + tokens, batch.num_samples + sequences, batch.num_masked + masked
    return StaticShape(*sizes, 600, batch.has_labels)


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("name", UGLY)
def test_on_the_host_it_is_the_batch_by_the_book(name, labels):
    batch, expected = ugly(name, labels)
    assert_same(batch.to("cpu"), expected)


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("name", UGLY[:-1])
@pytest.mark.parametrize("extra", EXTRAS)
def test_a_target_is_filled_up_by_the_book(expand, name, extra, labels):
    batch, expected = ugly(name, labels)
    static_shape = budget_of(batch, *extra)
    target = static_shape.allocate("cpu")
    for value in dataclasses.asdict(target).values():
        if isinstance(value, torch.Tensor):
            value.fill_(77)  # whatever the last batch left
    static_shape.write(batch, target)
    assert_same(target, plain_filled(expected, static_shape))


def empty_like(batch: HostBatch) -> Batch:
    sizes = (batch.num_tokens, batch.num_samples, batch.num_masked, batch.max_seqlen)
    return Batch.empty(*sizes, batch.has_labels, torch.device("cpu"))


def test_a_token_takes_three_bytes():
    (batch,) = made_up_batches(64, 1, 30522, 512)
    assert batch.data.numel() < 3.2 * batch.num_tokens


def test_a_made_up_batch_is_one_sequence():
    batch = HostBatch.dummy(64).to("cpu")
    zeros = torch.zeros(64, dtype=torch.int64)
    expected = Batch(
        input_ids=zeros,
        segment_ids=zeros,
        position_ids=torch.arange(64),
        cu_seqlens=torch.tensor([0, 64], dtype=torch.int32),
        max_seqlen=64,
        masked_positions=torch.tensor([1]),
        masked_labels=torch.tensor([0]),
        next_sentence_labels=torch.tensor([0]),
        dropout_rows=torch.arange(64, dtype=torch.int32),
        labels=torch.zeros(1),
    )
    assert_same(batch, expected)


def test_labels_and_a_target_without_them_do_not_go_together(expand):
    labelled, _ = ugly("one sequence", labels=True)
    plain, _ = ugly("one sequence")
    for batch, other in ((labelled, plain), (plain, labelled)):
        target = empty_like(other)
        with pytest.raises(AssertionError, match="labels"):
            batch.to("cpu", out=target)


def test_the_triton_kernel_refuses_a_small_target(use_triton):
    expand = importlib.import_module("mlbert.data.loading.triton_expand").expand
    batch, _ = ugly("one sequence")
    with pytest.raises(AssertionError, match="larger than its target"):
        expand(batch.parts(batch.data), ugly("one token")[1])
