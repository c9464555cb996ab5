"""Masking and truncation draw the benchmark's random numbers in the benchmark's order."""

import dataclasses
import itertools
import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlbert.data.formats.static_masking import MaskingRule, mask_tokens, truncate_pair

_, UNK, CLS, SEP, MASK = range(5)
RULE = MaskingRule(0.15, 76, mask_id=MASK, cls_id=CLS, sep_id=SEP, vocab_size=1000)


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
