"""Batches on the GPU: same elements, copies on a separate stream, no synchronization;
evaluations on the GPU.
"""

import contextlib
import dataclasses

import numpy as np
import pytest
import torch

from host_batches import assert_same, made_up_batches, plain_filled
from mlbert.data import batches
from mlbert.data.batches import HostBatch, StaticShape
from mlbert.data.loading.synthetic import SyntheticSource, sequences
from mlbert.distributed.capture import CudaCapture
from mlbert.distributed.world import World
from mlbert.models.bert import BertForPreTraining
from mlbert.models.objectives import PreTraining
from mlbert.training.evaluate import Evaluator, evaluate
from same_weights import initialized

LENGTHS = ([1], [512], [1] * 70, [256, 1, 255, 512, 1, 1, 257, 3] * 20, [3] * 512)


def batch_of(lengths: list[int], masked: bool) -> HostBatch:
    rows = sequences(np.maximum(np.asarray(lengths), 5), 30522, np.random.default_rng(1))
    if not masked:
        nothing = rows.masked_labels[:0]
        none = np.zeros(len(rows) + 1, np.int64)
        rows = dataclasses.replace(
            rows, masked_labels=nothing, masked_positions=nothing, masked_offsets=none
        )
    labeled = dataclasses.replace(
        rows, labels=np.arange(len(rows), dtype=np.float32) if masked else None
    )
    return HostBatch.of(
        labeled, np.ones(len(rows), np.int64), 3 + np.arange(len(rows)), 512, page_locked=True
    )


@pytest.mark.parametrize("form", ["plain", "best"])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_transferred_batch_equals_the_host_batch(device, monkeypatch, lengths, masked, form):
    if form == "plain":
        monkeypatch.setattr(batches, "expansion", lambda _: batches.expand_plain)
    batch = batch_of(lengths, masked)
    arrived = batch.to(device)
    assert all(value.is_cuda for value in vars(arrived).values() if isinstance(value, torch.Tensor))
    assert_same(arrived, batch.to("cpu"))
    static_shape = StaticShape(
        tokens=batch.num_tokens + 300,
        sequences=batch.num_samples + 40,
        masked=batch.num_masked + 17,
        max_seqlen=512,
        has_labels=batch.has_labels,
    )
    target = static_shape.allocate(device)
    static_shape.write(batch, target)
    assert_same(target, plain_filled(batch.to("cpu"), static_shape))


def test_batches_in_flight_do_not_mix(device, allow_sync_afterwards):
    """The host runs ahead of a busy device and releases every buffer immediately."""
    batches = [made_up_batches(8, seed, 30522, 512)[0] for seed in range(12)]
    weights = torch.randn(4096, 4096, device=device)
    static_shape = StaticShape.over(batches)
    target = static_shape.allocate(device)
    static_shape.write(batches[0], target)  # compiles the kernel
    torch.cuda.synchronize()
    seen = []
    torch.cuda.set_sync_debug_mode("error")
    for batch in batches * 3:
        fresh = dataclasses.replace(batch, data=batch.data.clone().pin_memory())
        static_shape.write(fresh, target)
        for _ in range(4):
            weights @ weights
        seen.append(
            (target.input_ids.clone(), target.dropout_rows.clone(), target.masked_labels.clone())
        )
    torch.cuda.set_sync_debug_mode("default")
    for batch, found in zip(batches * 3, seen, strict=True):
        filled = plain_filled(batch.to("cpu"), static_shape)
        for one, other in zip(
            found, (filled.input_ids, filled.dropout_rows, filled.masked_labels), strict=True
        ):
            assert torch.equal(one.cpu(), other)


def test_copy_overlaps_computation(device):
    """A copy queued after long work on the current stream finishes before that work."""
    (sent,) = made_up_batches(64, 1, 30522, 512)
    weights = torch.randn(8192, 8192, device=device)
    sent.to(device)
    torch.cuda.synchronize()
    for _ in range(50):
        weights @ weights
    working = torch.cuda.Event()
    working.record()
    sent.to(device)
    batches._copy_stream(torch.device(device)).synchronize()
    assert not working.query()


def test_source_uses_page_locked_memory():
    numbers = {
        "packs_per_step": 2,
        "max_sequences_per_pack": 3,
        "seed": 1,
        "vocab_size": 30522,
        "max_tokens": 512,
    }
    with contextlib.closing(SyntheticSource(**numbers)) as source:
        (batch,) = source.next_step()
    assert batch.data.is_pinned()


@pytest.mark.parametrize("graph", [False, True])
def test_evaluations_agree_and_do_not_synchronize(large, device, allow_sync_afterwards, graph):
    batches = [made_up_batches(n, n, 30522, 512)[0] for n in (4, 4, 3)]
    objective = PreTraining(scope="step")
    shapes = [StaticShape.over(batches)]
    model, other = (initialized(BertForPreTraining(large, torch.bfloat16), seed) for seed in (1, 2))
    model = model.to(device)
    evaluator = Evaluator(
        model, objective, batches, World(), CudaCapture(device) if graph else None, shapes
    )
    evaluator.record()
    first = evaluator.begin().result()  # copies the batches to the device
    torch.cuda.set_sync_debug_mode("error")
    second = evaluator.begin()
    torch.cuda.set_sync_debug_mode("default")
    assert second.result() == first
    exact = evaluate(model, objective, batches, World())
    assert first == pytest.approx(exact, rel=1e-3)
    evaluator.begin()
    model.load_state_dict(other.state_dict())
    assert evaluator.begin().result() != first
