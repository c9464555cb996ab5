"""A batch that is filled up to a budget gives the same losses and gradients."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mlbert import ops
from mlbert.feed.batch import IGNORED_LABEL
from mlbert.feed.budget import Budget
from mlbert.feed.compact import CompactBatch
from mlbert.feed.synthetic import SyntheticSource
from mlbert.models import BertConfig, BertForPreTraining
from model_loss import loss_of, masked_sums

SHAPE = BertConfig(
    vocab_size=163,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    max_position_embeddings=64,
)


@pytest.fixture
def batch():
    (batch,) = SyntheticSource(packs_per_step=3, seed=2, vocab_size=163, max_tokens=64).batches_of(0)
    return batch


def exact(batch) -> Budget:
    return Budget(batch.num_tokens, batch.num_samples, batch.num_masked, batch.max_seqlen)


def larger(batch, tokens: int, sequences: int, masked: int) -> Budget:
    sizes = exact(batch)
    return Budget(sizes.tokens + tokens, sizes.sequences + sequences, sizes.masked + masked, 64)


@pytest.mark.parametrize("choice", ["plain", "auto"])
@pytest.mark.parametrize("extra", [(0, 0, 0), (0, 2, 0), (1, 0, 1), (37, 5, 12)])
@pytest.mark.parametrize("sparse", [True, False])
def test_loss_and_gradients_are_the_same(batch, choice, extra, sparse):
    ops.select(choice)
    model = BertForPreTraining(SHAPE, sparse_last_layer=sparse)
    model.initialize(4)
    results = []
    for given in (batch, larger(batch, *extra).fill(batch)):
        model.zero_grad()
        loss = loss_of(model, given, (1, 2), (batch.num_masked, batch.num_samples))
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        results.append((loss.detach(), masked_sums(model, given)[::2], gradients))
    ops.select("auto")
    (loss, hits, gradients), (filled_loss, filled_hits, filled_gradients) = results
    torch.testing.assert_close(filled_loss, loss, rtol=1e-6, atol=1e-6)
    assert filled_hits == hits
    for name, gradient in gradients.items():
        torch.testing.assert_close(filled_gradients[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_sizes_are_the_budgets(batch):
    budget = larger(batch, 9, 4, 7)
    filled = budget.fill(batch)
    assert exact(filled) == budget
    assert filled.cu_seqlens.tolist() == batch.cu_seqlens.tolist() + [batch.num_tokens] * 4
    assert filled.masked_labels.tolist() == batch.masked_labels.tolist() + [IGNORED_LABEL] * 7
    for field in dataclasses.fields(batch):
        before, after = getattr(batch, field.name), getattr(filled, field.name)
        if isinstance(before, torch.Tensor):
            assert after.dtype == before.dtype


@pytest.mark.parametrize("field", ["tokens", "sequences", "masked", "max_seqlen"])
def test_a_batch_that_does_not_fit_is_refused(batch, field):
    budget = dataclasses.replace(exact(batch), **{field: getattr(exact(batch), field) - 1})
    assert exact(batch).holds(batch)
    assert not budget.holds(batch)
    with pytest.raises(AssertionError, match="larger than the budget"):
        budget.fill(batch)


def test_a_compact_batch_is_written_alike(batch):
    """And a batch that is written over a larger one leaves nothing of it."""
    budget = larger(batch, 9, 4, 7)
    expected, target = budget.fill(batch), budget.allocate("cpu")
    (before,) = SyntheticSource(packs_per_step=1, seed=9, vocab_size=163, max_tokens=64).batches_of(1)
    for given in (batch, before, CompactBatch.of(batch)):
        budget.write(given, target)
    for field in dataclasses.fields(batch):
        found, wanted = getattr(target, field.name), getattr(expected, field.name)
        assert torch.equal(found, wanted) if isinstance(found, torch.Tensor) else found == wanted


def test_packs_are_within_their_budget():
    """The bound that follows from the masking rule holds, and wastes little on full packs of the benchmark's length."""
    for max_tokens, predictions in ((512, 76), (64, 10)):
        budget = Budget.of_packs(6, max_tokens, 3, max_tokens, predictions)
        source = SyntheticSource(packs_per_step=6, seed=3, vocab_size=500, max_tokens=max_tokens)
        assert all(budget.holds(batch) for step in range(20) for batch in source.batches_of(step))
    assert Budget.of_packs(48, 512, 3, 512, 76) == Budget(24576, 144, 3792, 512)
    assert Budget.of_packs(1, 512, 1, 512, 20).masked == 32, "never more than each sequence's limit"


def test_sizes_of_one_batch(batch):
    budget = Budget.of_batch(batch)
    assert budget.holds(batch)
    assert budget.tokens % 128 == budget.masked % 16 == 0
    assert budget.tokens - batch.num_tokens < 128


def test_allocated_memory_is_a_batch(batch):
    """One that a model takes: a sequence of one token, and nothing to predict but whether it follows."""
    empty = larger(batch, 9, 4, 7).allocate("cpu")
    assert empty.cu_seqlens[:2].tolist() == [0, 1]
    assert exact(empty) == larger(batch, 9, 4, 7)
    assert (empty.masked_labels == IGNORED_LABEL).all()
    assert empty.next_sentence_labels[0] == 0
