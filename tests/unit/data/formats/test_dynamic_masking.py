"""Dynamic masks equal their definition, computed with Python's integers."""

import numpy as np
import pytest

from mlbert.data.formats.dynamic_masking import Masking
from mlbert.data.formats.ragged import offsets_of

SPECIAL = (0, 100, 101, 102, 103)
TEXT_MASK = 103
VOCAB = 30_522
GOLDEN = 0x9E3779B97F4A7C15


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
