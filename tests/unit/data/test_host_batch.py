"""A batch that went through the host's buffer is the batch by the book, in every element,
however it is expanded.
"""

import dataclasses
import importlib

import numpy as np
import pytest
import torch
from hypothesis import given as over
from hypothesis import strategies as st

from host_batches import assert_same, filled, made_up_batches, plain_batch, plain_filled
from mlbert.config.bert_config import BertConfig
from mlbert.data import batches
from mlbert.data.batches import IGNORED_LABEL, Batch, HostBatch, StaticShape, expand_plain
from mlbert.data.formats.ragged import WIDE, Ragged
from mlbert.models.bert import BertForPreTraining
from model_loss import loss_of, masked_sums

UGLY = (
    "one token",
    "one sequence",
    "single tokens",
    "nothing masked",
    "512 sequences",
    "long and short",
    "nothing",
)


@pytest.fixture(params=["plain", "triton"])
def expand(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = expand_plain
    if request.param == "triton":
        request.getfixturevalue("use_triton")
        chosen = importlib.import_module("mlbert.ops.triton.expand_batch").expand
    monkeypatch.setattr(batches, "expansion", lambda device: chosen)


def rows_of(lengths: list[int], masked: list[int], generator: np.random.Generator) -> Ragged:
    """Return sequences of these lengths and numbers of masked tokens;
    ids and labels use all 16 bits.
    """
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
    """Return the batch and its reference; units are numbered as a partition may do it."""
    generator = np.random.default_rng(3)
    lengths, masked, packs = {
        "one token": ([1], [0], [1]),
        "one sequence": ([512], [76], [1]),
        "single tokens": ([1] * 70, [1] * 70, [3, 2] * 14),
        "nothing masked": ([5, 9, 2], [0, 0, 0], [2, 1]),
        "512 sequences": ([int(n) for n in generator.integers(1, 4, 512)], [1] * 512, [2] * 256),
        "long and short": (
            [256, 1, 255, 512, 1, 1, 257, 3],
            [40, 0, 12, 76, 1, 0, 9, 3],
            [3, 1, 4],
        ),
        "nothing": ([], [], []),
    }[name]
    rows = rows_of(lengths, masked, generator)
    if labels:
        rows = dataclasses.replace(rows, labels=generator.normal(size=len(rows)).astype(np.float32))
    units = generator.permutation(300)[: len(packs)]
    batch = HostBatch.of(rows, np.asarray(packs, np.int64), units, 1024)
    return batch, plain_batch(rows, packs, units.tolist(), 1024)


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("name", UGLY)
def test_on_the_host_it_is_the_batch_by_the_book(name, labels):
    batch, expected = ugly(name, labels)
    assert_same(batch.to("cpu"), expected)


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("name", UGLY[:-1])
@pytest.mark.parametrize("extra", [(0, 0, 0), (1, 0, 0), (0, 3, 0), (300, 40, 77)])
def test_a_target_is_filled_up_by_the_book(expand, name, extra, labels):
    batch, expected = ugly(name, labels)
    sizes = np.add((batch.num_tokens, batch.num_samples, batch.num_masked), extra).tolist()
    static_shape = StaticShape(*sizes, 600, batch.has_labels)
    target = static_shape.allocate("cpu")
    for value in dataclasses.asdict(target).values():
        if isinstance(value, torch.Tensor):
            value.fill_(77)  # whatever the last batch left
    static_shape.write(batch, target)
    assert_same(target, plain_filled(expected, static_shape))


def test_ids_of_large_vocabularies_are_whole(expand):
    generator = np.random.default_rng(3)
    rows = rows_of([256, 1, 255, 3], [40, 0, 12, 3], generator)
    wide = dataclasses.replace(
        rows,
        tokens=generator.integers(1 << 16, 1 << 18, len(rows.tokens)).astype(WIDE),
        masked_labels=generator.integers(1 << 16, 1 << 18, len(rows.masked_labels)).astype(WIDE),
    )
    batch = HostBatch.of(wide, np.asarray([3, 1], np.int64), np.arange(2), 1024)
    expected = plain_batch(wide, [3, 1], [0, 1], 1024)
    assert_same(batch.to("cpu"), expected)
    static_shape = StaticShape(batch.num_tokens + 9, 5, batch.num_masked + 2, 600)
    target = static_shape.allocate("cpu")
    static_shape.write(batch, target)
    assert_same(target, plain_filled(expected, static_shape))


def test_a_token_takes_three_bytes():
    (batch,) = made_up_batches(64, 1, 30522, 512)
    assert batch.data.numel() < 3.2 * batch.num_tokens


def test_a_made_up_batch_is_one_sequence():
    rows = Ragged.from_rows([([0] * 64, 64, False, [1], [0])])
    rows = dataclasses.replace(rows, labels=np.zeros(1, np.float32))
    assert_same(HostBatch.dummy(64).to("cpu"), plain_batch(rows, [1], [0], 64))


def test_labels_and_a_target_without_them_do_not_go_together(expand):
    labeled, _ = ugly("one sequence", labels=True)
    plain, _ = ugly("one sequence")
    for batch, other in ((labeled, plain), (plain, labeled)):
        target = Batch.empty(
            other.num_tokens,
            other.num_samples,
            other.num_masked,
            other.max_seqlen,
            other.has_labels,
            torch.device("cpu"),
        )
        with pytest.raises(AssertionError, match="labels"):
            batch.to("cpu", out=target)


def test_the_triton_kernel_refuses_a_small_target(use_triton):
    expand = importlib.import_module("mlbert.ops.triton.expand_batch").expand
    batch, _ = ugly("one sequence")
    with pytest.raises(AssertionError, match="larger than its target"):
        expand(batch.parts(batch.data), ugly("one token")[1].tensors())


@pytest.fixture
def batch():
    (batch,) = made_up_batches(3, seed=2, vocab_size=163, max_tokens=64)
    return batch


def exact(batch) -> StaticShape:
    return StaticShape(batch.num_tokens, batch.num_samples, batch.num_masked, batch.max_seqlen)


def larger(batch, tokens: int, sequences: int, masked: int) -> StaticShape:
    return StaticShape(
        batch.num_tokens + tokens, batch.num_samples + sequences, batch.num_masked + masked, 64
    )


def test_a_dense_last_layer_has_the_same_loss_and_gradients():
    """A sparse one is in models/test_heads.py."""
    (batch,) = made_up_batches(3, seed=2, vocab_size=163, max_tokens=64)
    model = BertForPreTraining(
        BertConfig(163, 48, 2, 4, 96, max_position_embeddings=64), sparse_last_layer=False
    )
    model.initialize(4)
    results = []
    for given in (batch.to("cpu"), filled(batch, larger(batch, 37, 5, 12))):
        model.zero_grad()
        loss = loss_of(model, given, (1, 2), (batch.num_masked, batch.num_samples))
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        results.append((loss.detach(), torch.tensor(masked_sums(model, given)), *gradients))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("field", ["tokens", "sequences", "masked", "max_seqlen"])
def test_a_batch_that_does_not_fit_is_refused(batch, field):
    smaller = {field: getattr(exact(batch), field) - 1}
    static_shape = dataclasses.replace(exact(batch), **smaller)
    assert exact(batch).holds(batch)
    assert not static_shape.holds(batch)
    with pytest.raises(AssertionError, match="does not fit the static shape"):
        static_shape.write(batch, exact(batch).allocate("cpu"))


def test_only_a_shape_with_labels_holds_a_batch_with_labels():
    batch = HostBatch.dummy(5)
    without = StaticShape(8, 3, 2, 5, has_labels=False)
    assert StaticShape.over([batch]).has_labels
    assert not without.holds(batch)
    assert without.allocate("cpu").labels is None


def test_packs_are_within_their_budget():
    """The bound that follows from the masking rule holds,
    and wastes little on full packs of the benchmark's length.
    """
    for max_tokens, predictions in ((512, 76), (64, 10)):
        static_shape = StaticShape.of_packs(6, max_tokens, 3, max_tokens, predictions)
        for step in range(20):
            assert all(map(static_shape.holds, made_up_batches(6, 3, 500, max_tokens, step)))
    assert StaticShape.of_packs(48, 512, 3, 512, 76) == StaticShape(24576, 144, 3792, 512)
    assert StaticShape.of_packs(1, 512, 1, 512, 20).masked == 32, (
        "never more than each sequence's limit"
    )


def test_sizes_of_one_batch(batch):
    static_shape = StaticShape.over([batch])
    assert static_shape.holds(batch)
    assert static_shape.tokens % 128 == static_shape.masked % 16 == 0
    assert static_shape.tokens - batch.num_tokens < 128


def test_allocated_memory_is_a_batch(batch):
    """A model accepts it: one sequence of one token,
    and only its next-sentence label to predict.
    """
    empty = larger(batch, 9, 4, 7).allocate("cpu")
    assert empty.cu_seqlens[:2].tolist() == [0, 1]
    assert exact(empty) == larger(batch, 9, 4, 7)
    assert (empty.masked_labels == IGNORED_LABEL).all()
    assert empty.next_sentence_labels[0] == 0


@over(st.integers(1, 64), st.sampled_from([32, 128, 512]), st.floats(0.05, 0.3))
def test_smaller_budgets_are_for_sequences_of_their_own(
    packs: int, longest: int, share: float
) -> None:
    """They ascend in whole tiles; a batch whose masked tokens follow the rule fits
    if its tokens fit.
    """
    predictions = max(1, round(share * longest))
    whole = StaticShape.of_packs(packs, longest, 1, longest, predictions)
    smaller = whole.smaller_ones()
    tokens = [static_shape.tokens for static_shape in smaller]
    assert tokens == sorted(set(tokens))
    assert all(number < whole.tokens and number % 128 == 0 for number in tokens)
    for static_shape in smaller:
        assert (static_shape.sequences, static_shape.max_seqlen) == (
            whole.sequences,
            whole.max_seqlen,
        )
        each, rest = divmod(static_shape.tokens, packs)
        lengths = [min(longest, each + (i < rest)) for i in range(packs)]
        most_masked = sum(min(predictions, round(share * length) or 1) for length in lengths)
        assert most_masked <= static_shape.masked <= whole.masked
    assert StaticShape.of_packs(packs, longest, 3, longest, predictions).smaller_ones() == (), (
        "packs are full"
    )


def test_the_fullest_batch_has_no_position_beyond_the_longest_sequence():
    shape = StaticShape.of_sequences(2, 65, 0.15)
    assert shape.tokens > 2 * 65
    batch = shape.fullest_batch()
    assert (batch.num_samples, batch.num_tokens) == (2, 2 * 65)
    assert batch.max_seqlen == 65
