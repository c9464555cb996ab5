"""Masking and truncation draw the benchmark's random numbers in the benchmark's order."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlbert.data.formats.masking import Masking, MaskingRule, mask_tokens, truncate_pair
from mlbert.data.formats.ragged import offsets_of

_, UNK, CLS, SEP, MASK = range(5)
RULE = MaskingRule(0.15, 76, mask_id=MASK, cls_id=CLS, sep_id=SEP, vocab_size=1000)
SPECIAL = (0, 100, 101, 102, 103)
TEXT_MASK = 103
VOCAB = 30_522
GOLDEN = 0x9E3779B97F4A7C15


def plain_mask(tokens, rule, rng):
    """Mask one draw after the other, with the standard library's shuffle and randint."""
    places = [i for i, token in enumerate(tokens) if token != rule.cls_id and token != rule.sep_id]
    rng.shuffle(places)
    result = list(tokens)
    wanted = min(rule.max_predictions, max(1, round(len(tokens) * rule.masked_lm_prob)))
    chosen = []
    for place in places:
        if len(chosen) >= wanted:
            break
        if rng.random() < 0.8:
            result[place] = rule.mask_id
        elif rng.random() >= 0.5:
            result[place] = rng.randint(0, rule.vocab_size - 1)
        chosen.append(place)
    chosen.sort()
    return result, chosen, [tokens[place] for place in chosen]


def plain_truncate(first, second, limit, rng):
    first = list(first)
    second = list(second)
    while len(first) + len(second) > limit:
        longer = first if len(first) > len(second) else second
        if rng.random() < 0.5:
            del longer[0]
        else:
            longer.pop()
    return first, second


@given(
    words=st.lists(st.just(UNK) | st.integers(5, 999), min_size=2, max_size=520),
    cut=st.integers(1, 519),
    seed=st.integers(0, 10**9),
    vocab_size=st.sampled_from([2, 1000]),
)
@example(words=[*range(5, 505)], cut=200, seed=1, vocab_size=2)
@settings(max_examples=100)
def test_mask_equals_its_definition(words, cut, seed, vocab_size):
    rule = dataclasses.replace(RULE, vocab_size=vocab_size)
    cut = min(cut, len(words) - 1)
    tokens = [CLS, *words[:cut], SEP, *words[cut:], SEP]
    ours = random.Random(seed)
    theirs = random.Random(seed)
    assert mask_tokens(tokens, rule, ours) == plain_mask(tokens, rule, theirs)
    assert ours.getstate() == theirs.getstate()


@given(
    *[st.lists(st.integers(0, 99), min_size=1, max_size=60)] * 2,
    st.integers(2, 80),
    st.integers(0, 10**9),
)
@settings(max_examples=100)
def test_truncate_equals_its_definition(first, second, limit, seed):
    ours = random.Random(seed)
    theirs = random.Random(seed)
    assert truncate_pair(first, second, limit, ours) == plain_truncate(first, second, limit, theirs)
    assert ours.getstate() == theirs.getstate()


def test_draws_on_the_limit() -> None:
    class Limits(random.Random):
        def __init__(self) -> None:
            super().__init__(1)
            self.random = itertools.cycle([0.8, 0.5]).__next__

    tokens = [CLS, *range(5, 505), SEP]
    assert mask_tokens(tokens, RULE, Limits()) == plain_mask(tokens, RULE, Limits())
    assert truncate_pair(tokens, tokens, 99, Limits()) == plain_truncate(
        tokens, tokens, 99, Limits()
    )


def mixed(value: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> shift)) * factor % 2**64
    return value ^ (value >> 31)


def by_the_definition(
    sequence: list[int], rule: Masking, step: int, lane: int, rate: float
) -> list[tuple]:
    """Return (position, new id, original id) of each chosen token,
    computed with Python's integers.
    """
    key = mixed((mixed((mixed(rule.seed) + step) % 2**64) + lane) % 2**64)
    found = []
    for position, token in enumerate(sequence):
        draw = mixed((key + GOLDEN * (position + 1)) % 2**64)
        what = mixed((draw + GOLDEN) % 2**64)
        if token in rule.special_ids or draw >> 32 >= round(rate * 2**32):
            continue
        share = (what >> 32) / 2**32
        new = token
        if share < 0.8:
            new = rule.mask_id
        elif share < 0.9:
            new = (what % 2**32) * rule.vocab_size >> 32
        found.append((position, new, token))
    return found


def test_with_always_mask_the_same_tokens_are_chosen_and_none_is_seen() -> None:
    tokens = np.random.default_rng(3).integers(999, VOCAB, 4000).astype(np.uint16)
    offsets = np.arange(0, 4001, 40)
    mixed_masks, only_mask = (
        Masking(SPECIAL, TEXT_MASK, VOCAB, 3, always_mask)(tokens, offsets, 2, np.arange(100), 0.15)
        for always_mask in (False, True)
    )
    assert np.array_equal(only_mask.masked_positions, mixed_masks.masked_positions)
    assert np.array_equal(only_mask.masked_labels, mixed_masks.masked_labels)
    is_masked = only_mask.tokens == TEXT_MASK
    assert is_masked.sum() == len(only_mask.masked_labels)
    assert np.array_equal(only_mask.tokens[~is_masked], tokens[~is_masked])


@pytest.mark.parametrize(
    ("seed", "step", "rate"), [(0, 0, 0.15), (7, 3, 0.3), (2**64 - 1, 2**40, 0.5), (5, 1, 0.0)]
)
def test_masks_equal_their_definition(seed, step, rate):
    """They depend on the sequence's own tokens and its lane, not on what is masked with it."""
    # The first outputs of the published SplitMix64 for the seed 0.
    assert [mixed(n * GOLDEN % 2**64) for n in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    lengths = np.arange(2, 80)
    rng = np.random.default_rng(2)
    tokens = rng.integers(999, VOCAB, lengths.sum()).astype(np.uint16)
    offsets = offsets_of(lengths)
    tokens[rng.random(len(tokens)) < 0.1] = 100  # [UNK]
    tokens[offsets[:-1]] = 101
    tokens[offsets[1:] - 1] = 102
    lanes = np.arange(len(lengths)) * 7919 + 5
    rule = Masking(SPECIAL, TEXT_MASK, VOCAB, seed)
    rows = rule(tokens, offsets, step, lanes, rate)
    assert rows.first_lengths.tolist() == lengths.tolist()
    for number, lane in enumerate(lanes.tolist()):
        one = rows.take(np.array([number]))
        mine = tokens[offsets[number] : offsets[number + 1]].tolist()
        expected = by_the_definition(mine, rule, step, lane, rate)
        masked = zip(
            one.masked_positions, one.tokens[one.masked_positions], one.masked_labels, strict=True
        )
        assert [tuple(map(int, token)) for token in masked] == expected
