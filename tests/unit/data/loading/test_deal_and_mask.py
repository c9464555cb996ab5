"""Who gets which of a step's units, and masks drawn anew: functions of the method's own, given to the source."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from host_batches import numbers
from mlbert.data.formats.masking import MaskingRule, mask_tokens
from mlbert.data.formats.order import Lengths, RankSlice, contiguous
from mlbert.data.formats.prepared import ShardSet
from mlbert.data.formats.ragged import Ragged
from mlbert.data.loading.batches import Batch
from mlbert.data.loading.packed import PackedSource
from mlbert.data.prepare.shuffle import Packing, shuffle_set
from random_set import VOCAB_SIZE

RULE = MaskingRule(masked_lm_prob=0.3, max_predictions=5, mask_id=4, cls_id=2, sep_id=3, vocab_size=VOCAB_SIZE)


def snake(share: RankSlice, lengths: Lengths) -> list[np.ndarray]:
    """Longest first, to the parts in turn, forth and back: every part has about as many tokens."""
    longest_first = np.argsort(-lengths(np.arange(share.global_units)), kind="stable")
    parts = share.world_size * share.accumulation
    turns = longest_first.reshape(-1, parts)
    turns[1::2] = turns[1::2, ::-1]
    first = share.rank * share.accumulation
    return [turns[:, part] for part in range(first, first + share.accumulation)]


def drawn_anew(rows: Ragged, epoch: int, samples: np.ndarray) -> Ragged:
    """Masked as the benchmark does it, by (epoch, sample) alone."""
    where = rows.masked_positions + np.repeat(rows.offsets[:-1], np.diff(rows.masked_offsets))
    original = rows.tokens.copy()
    original[where] = rows.masked_labels
    masked = []
    for s, sample in enumerate(samples.tolist()):
        tokens = original[rows.offsets[s] : rows.offsets[s + 1]].tolist()
        drawn, positions, labels = mask_tokens(tokens, RULE, random.Random(f"7 {epoch} {sample}"))
        masked.append((drawn, int(rows.first_lengths[s]), bool(rows.next_sentence[s]), positions, labels))
    return Ragged.from_rows(masked)


def opened(folder, **options) -> PackedSource:
    settings = {"packs_per_step": 24, "max_sequences_per_pack": 1, "seed": 3, "partition": contiguous}
    source = PackedSource(folder, **{**settings, **options})
    source.open()
    return source


def split(folder, world_size: int, accumulation: int, step: int, **options) -> list[Batch]:
    """Every micro-batch of every rank."""
    shares = {"packs_per_step": 24 // world_size, "accumulation": accumulation, "world_size": world_size}
    sources = [opened(folder, rank=rank, **shares, **options) for rank in range(world_size)]
    return [batch.to("cpu") for source in sources for batch in source.batches_of(step)]


def by_row(batch: Batch) -> dict[int, tuple[int, ...]]:
    """dropout row -> (token, label or -1)."""
    labels = torch.full_like(batch.input_ids, -1)
    labels[batch.masked_positions] = batch.masked_labels
    pairs = zip(batch.input_ids.tolist(), labels.tolist(), strict=True)
    return dict(zip(batch.dropout_rows.tolist(), pairs, strict=True))


def joined(batches: list[Batch]) -> dict[int, tuple[int, ...]]:
    parts = [by_row(batch) for batch in batches]
    whole = {row: token for part in parts for row, token in part.items()}
    assert len(whole) == sum(map(len, parts))
    return whole


@pytest.mark.parametrize(("stored", "each"), [(False, 1), (False, 3), (True, 3)])
def test_a_deal_by_length_changes_no_token_and_no_dropout_row(make_set, tmp_path, stored, each):
    folder = make_set(300)
    if stored:
        folder = shuffle_set(folder, tmp_path / "packs", num_shards=2, packing=Packing(40, 3)).path.parent
    options = {"max_sequences_per_pack": each}
    expected = joined(split(folder, 1, 1, 2, **options))
    for world_size, accumulation in ((1, 4), (2, 2), (4, 1)):
        dealt = split(folder, world_size, accumulation, 2, partition=snake, **options)
        assert joined(dealt) == expected
        tokens = [batch.num_tokens for batch in dealt]
        assert max(tokens) < 1.15 * min(tokens)


def test_contiguous_reads_no_lengths(make_set, monkeypatch):
    folder = make_set(300)
    expected = numbers(opened(folder).batches_of(0)[0])
    monkeypatch.setattr(ShardSet, "lengths", property(lambda _: pytest.fail("reads every length")))
    assert numbers(opened(folder).batches_of(0)[0]) == expected


@pytest.mark.parametrize("each", [1, 3])
def test_masks_are_drawn_anew_each_epoch_alike_on_all_ranks(make_set, each):
    folder, options = make_set(100), {"max_sequences_per_pack": each, "mask": drawn_anew}
    assert joined(split(folder, 2, 3, 0, **options)) == joined(split(folder, 1, 1, 0, **options))
    stored, drawn = opened(folder, max_sequences_per_pack=each), opened(folder, **options)
    steps = drawn.steps_per_epoch

    def epoch(source: PackedSource, number: int) -> dict[tuple[int, ...], tuple[int, ...]]:
        batches = [source.batches_of(number * steps + step)[0].to("cpu") for step in range(steps)]
        return {text: where for batch in batches for text, where in masks(batch).items()}

    first, second, as_stored = epoch(drawn, 0), epoch(drawn, 1), epoch(stored, 0)
    common = first.keys() & second.keys()
    assert len(common) > 50
    assert sum(first[text] != second[text] for text in common) > 0.9 * len(common)
    assert first.keys() == as_stored.keys(), "the words below the masks are the stored ones"
    assert sum(first[text] != as_stored[text] for text in first) > 0.9 * len(first)


def masks(batch: Batch) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Original tokens of each sequence -> which of them are masked."""
    original = batch.input_ids.clone()
    original[batch.masked_positions] = batch.masked_labels
    found = {}
    for first, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        inside = (batch.masked_positions >= first) & (batch.masked_positions < end)
        found[tuple(original[first:end].tolist())] = tuple((batch.masked_positions[inside] - first).tolist())
    return found
