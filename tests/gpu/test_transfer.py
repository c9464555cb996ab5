"""The way of a batch to the GPU: the same elements, its own stream, no wait; and evaluations that stay there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from mlbert.dist.capture import CudaCapture
from mlbert.dist.world import World
from mlbert.feed import compact
from mlbert.feed.batch import Batch
from mlbert.feed.budget import Budget
from mlbert.feed.compact import CompactBatch
from mlbert.feed.packed import make_batch
from mlbert.feed.synthetic import SyntheticSource
from mlbert.models import BertConfig, BertForPreTraining
from mlbert.train.evaluate import Evaluator, evaluate

LENGTHS = ([1], [512], [1] * 70, [256, 1, 255, 512, 1, 1, 257, 3] * 20, [3] * 512)


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Resets what makes a wait for the device an error."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def batch_of(lengths: list[int], masked: bool) -> Batch:
    source = SyntheticSource(packs_per_step=1, seed=1)
    rows = source.sequences(np.maximum(np.asarray(lengths), 5), np.random.default_rng(1))
    batch = make_batch(rows, np.ones(len(lengths), np.int64), 3, 512)
    if not masked:
        nothing = batch.masked_labels[:0]
        batch = dataclasses.replace(batch, masked_labels=nothing, masked_positions=nothing)
    return batch


def assert_same(found: Batch, expected: Batch) -> None:
    for field in dataclasses.fields(Batch):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(other, torch.Tensor):
            assert one.is_cuda
            assert one.dtype == other.dtype, field.name
            assert torch.equal(one.cpu(), other), field.name
        else:
            assert one == other, field.name


@pytest.mark.parametrize("form", ["plain", "best"])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_what_arrives_is_what_was_sent(device, monkeypatch, lengths, masked, form):
    if form == "plain":
        monkeypatch.setattr(compact, "expansion", lambda _: compact.expand_plain)
    batch = batch_of(lengths, masked)
    sent = CompactBatch.of(batch, page_locked=True)
    assert_same(sent.to(device), batch)
    budget = Budget(batch.num_tokens + 300, batch.num_samples + 40, batch.num_masked + 17, 512)
    target = budget.allocate(device)
    budget.write(sent, target)
    assert_same(target, budget.fill(batch))


def test_many_batches_in_flight_do_not_mix(device, no_waiting):
    """The host runs ahead, every buffer is given up at once, and the device is kept busy in between."""
    batches = [SyntheticSource(packs_per_step=8, seed=seed).batches_of(0)[0] for seed in range(12)]
    weights = torch.randn(4096, 4096, device=device)
    budget = Budget.over(batches)
    target = budget.allocate(device)
    budget.write(CompactBatch.of(batches[0], page_locked=True), target)  # builds the kernel
    torch.cuda.synchronize()
    seen = []
    torch.cuda.set_sync_debug_mode("error")
    for batch in batches * 3:
        budget.write(CompactBatch.of(batch, page_locked=True), target)
        for _ in range(4):
            weights @ weights
        seen.append((target.input_ids.clone(), target.dropout_rows.clone(), target.masked_labels.clone()))
    torch.cuda.set_sync_debug_mode("default")
    for batch, found in zip(batches * 3, seen, strict=True):
        filled = budget.fill(batch)
        for one, other in zip(found, (filled.input_ids, filled.dropout_rows, filled.masked_labels), strict=True):
            assert torch.equal(one.cpu(), other)


def test_a_copy_runs_beside_the_computation(device):
    """A copy that is queued behind long work on the current stream is over before that work is."""
    (batch,) = SyntheticSource(packs_per_step=64, seed=1).batches_of(0)
    sent = CompactBatch.of(batch, page_locked=True)
    weights = torch.randn(8192, 8192, device=device)
    sent.to(device)
    torch.cuda.synchronize()
    for _ in range(50):
        weights @ weights
    working = torch.cuda.Event()
    working.record()
    sent.to(device)
    compact._copy_stream(torch.device(device)).synchronize()
    assert not working.query()


def test_a_source_sends_page_locked_memory():
    source = SyntheticSource(packs_per_step=2, seed=1)
    try:
        (batch,) = source.next_step()
    finally:
        source.close()
    assert isinstance(batch, CompactBatch)
    assert batch.data.is_pinned()


@pytest.mark.parametrize("graph", [False, True])
def test_evaluations_agree_and_queue_without_waiting(
    large: BertConfig, device: torch.device, no_waiting: None, graph: bool
) -> None:
    batches = [SyntheticSource(packs_per_step=n, seed=n).batches_of(0)[0] for n in (4, 4, 3)]
    model = BertForPreTraining(large, torch.bfloat16)
    model.initialize(seed=1)
    model = model.to(device)
    evaluator = Evaluator(model, batches, World(), CudaCapture(device) if graph else None)
    first = evaluator.begin().result()  # brings the batches here, and captures
    torch.cuda.set_sync_debug_mode("error")
    second = evaluator.begin()
    torch.cuda.set_sync_debug_mode("default")
    assert second.result() == first
    exact = evaluate(model, batches, World())
    assert first == pytest.approx(exact, rel=1e-3)
    evaluator.begin()
    model.initialize(seed=2)
    assert evaluator.begin().result() != first
