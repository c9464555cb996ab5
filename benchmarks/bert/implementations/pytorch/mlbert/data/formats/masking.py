"""Static masking and pair truncation of the benchmark's instance generator, as pure functions of a ``random.Random``.

The order of random draws is part of the definition: the same generator state gives the same instance, draw by draw,
as the benchmark's published generator (``create_pretraining_data``). Tokens are integers here; the published program
works on strings, which draws the same numbers.

Masks drawn when a sequence is used, anew each time: each token by itself, by the rule of BERT.

A token that is not special is chosen with probability p. Of the chosen 80 % become [MASK], 10 % a random id of the
whole vocabulary, 10 % stay; all chosen are to be predicted. So the number of chosen ones varies, down to none.

The draws are counter-based: those of a token are a function of (seed, step, lane, position in the sequence), so they do
not depend on which rank draws them. With M a mix of 64 bits (two rounds of xor-shift and multiplication by an odd
number, the finalizer of SplitMix64 [Steele, Lea, Flood 2014]) and G = 2**64 / golden ratio:

    key  = M(M(M(seed) + step) + lane)
    draw = M(key + G (position + 1)): chosen if its upper 32 bits are below p 2**32
    what = M(draw + G): its upper 32 bits decide between the three, its lower 32 which id

Legend: S sequences, T tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mlbert.data.formats.ragged import Ragged

# Of the benchmark's generator: share of a sequence's tokens that it masks, and most of them.
MASKED_SHARE = 0.15
MAX_PREDICTIONS = 76


@dataclass(frozen=True)
class MaskingRule:
    """What masking needs to know of the vocabulary and of the benchmark's options."""

    masked_lm_prob: float  # share of a sequence's tokens to predict
    max_predictions: int  # upper limit of predictions in one sequence, tokens
    mask_id: int
    cls_id: int  # as [SEP] never masked
    sep_id: int
    vocab_size: int  # random replacements are drawn from ids 0 to vocab_size - 1


def shuffle(items: list[Any], rng: random.Random) -> None:
    """``rng.shuffle(items)`` with the rejection sampling written out: same draws, same result, half the time."""
    getrandbits = rng.getrandbits
    for i in range(len(items) - 1, 0, -1):
        bits = (i + 1).bit_length()
        j = getrandbits(bits)
        while j > i:
            j = getrandbits(bits)
        items[i], items[j] = items[j], items[i]


def num_predictions(length: int, rule: MaskingRule) -> int:
    """How many of ``length`` tokens are predicted; Python's rounding (half to even) is part of the rule."""
    return min(rule.max_predictions, max(1, round(length * rule.masked_lm_prob)))


def mask_tokens(tokens: list[int], rule: MaskingRule, rng: random.Random) -> tuple[list[int], list[int], list[int]]:
    """Mask one sequence: of the chosen tokens 80 % become [MASK], 10 % stay, 10 % become a random word.

    Args:
        tokens: the sequence with [CLS] and [SEP]; not changed.
        rule: the benchmark's options and the special ids.
        rng: source of all draws.

    Returns:
        (tokens after masking, masked positions ascending, original ids at these positions).
    """
    never = (rule.cls_id, rule.sep_id)
    candidates = [position for position, token in enumerate(tokens) if token not in never]
    shuffle(candidates, rng)
    positions = candidates[: num_predictions(len(tokens), rule)]
    draw, masked = rng.random, list(tokens)
    for position in positions:
        if draw() < 0.8:
            masked[position] = rule.mask_id
        elif draw() >= 0.5:
            masked[position] = rng.randint(0, rule.vocab_size - 1)
    positions.sort()
    return masked, positions, [tokens[position] for position in positions]


def truncate_pair(
    first: Sequence[int], second: Sequence[int], max_tokens: int, rng: random.Random
) -> tuple[Sequence[int], Sequence[int]]:
    """Cut two sentences to ``max_tokens`` together: one token at a time from the longer (the second when equal),
    from its front or its back with equal chance.

    Returns:
        (first, second), cut copies.
    """
    starts, ends = [0, 0], [len(first), len(second)]
    excess = len(first) + len(second) - max_tokens
    draw = rng.random
    for _ in range(excess):
        longer = 0 if ends[0] - starts[0] > ends[1] - starts[1] else 1
        if draw() < 0.5:
            starts[longer] += 1
        else:
            ends[longer] -= 1
    return first[starts[0] : ends[0]], second[starts[1] : ends[1]]


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio
_ROUNDS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST, _HALF, _LOW = np.uint64(31), np.uint64(32), np.uint64(2**32 - 1)
_TO_MASK, _TO_MASK_OR_RANDOM = np.uint64(round(0.8 * 2**32)), np.uint64(round(0.9 * 2**32))


@dataclass(frozen=True)
class Masking:
    """The rule for one vocabulary.

    Args:
        special_ids: never chosen.
        mask_id: id of [MASK].
        vocab_size: random ids are below it.
        seed: same seed, same masks; from 0 to 2**64 - 1.
    """

    special_ids: Sequence[int]
    mask_id: int
    vocab_size: int
    seed: int

    def __call__(self, tokens: np.ndarray, offsets: np.ndarray, step: int, lanes: np.ndarray, rate: float) -> Ragged:
        """Mask sequences.

        Args:
            tokens: uint16 [T]; not changed.
            offsets: int64 [S+1], sequence s holds tokens[offsets[s]:offsets[s+1]].
            step: of the draws, 0 or more.
            lanes: int64 [S], names each sequence within the step.
            rate: probability of a token to be chosen.

        Returns sequences of one segment, each its own, with no random next sentence.
        """
        lengths = np.diff(offsets)
        keys = _mixed(_mixed(_mixed(np.asarray([self.seed], np.uint64)) + np.uint64(step)) + lanes.astype(np.uint64))
        draws = np.arange(1, len(tokens) + 1, dtype=np.uint64)
        draws *= _GOLDEN
        draws += np.repeat(keys - offsets[:-1].astype(np.uint64) * _GOLDEN, lengths)
        draws = _mixed(draws)
        chosen = np.flatnonzero((draws >> _HALF < np.uint64(round(rate * 2**32))) & ~self._special[tokens])
        labels, what = tokens[chosen], _mixed(draws[chosen] + _GOLDEN)
        which = what >> _HALF
        ids = ((what & _LOW) * np.uint64(self.vocab_size) >> _HALF).astype(np.uint16)
        new = np.where(which < _TO_MASK_OR_RANDOM, ids, labels)
        masked = tokens.copy()
        masked[chosen] = np.where(which < _TO_MASK, np.uint16(self.mask_id), new)
        masked_offsets = np.searchsorted(chosen, offsets)
        return Ragged(
            tokens=masked,
            offsets=offsets,
            masked_positions=(chosen - np.repeat(offsets[:-1], np.diff(masked_offsets))).astype(np.uint16),
            masked_labels=labels,
            masked_offsets=masked_offsets,
            first_lengths=lengths.astype(np.uint16),
            next_sentence=np.zeros(len(lengths), np.uint8),
        )

    @cached_property
    def _special(self) -> np.ndarray:
        """bool [65536]."""
        special = np.zeros(1 << 16, bool)
        special[list(self.special_ids)] = True
        return special


def _mixed(values: np.ndarray) -> np.ndarray:
    """uint64 to uint64, any shape; one to one."""
    for shift, factor in _ROUNDS:
        values = values ^ (values >> shift)
        values *= factor
    return values ^ (values >> _LAST)
