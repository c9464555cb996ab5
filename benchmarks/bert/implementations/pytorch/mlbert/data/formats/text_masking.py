"""Masks drawn when a sequence is used, anew each time: each token by itself, by the rule of BERT.

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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mlbert.data.formats.ragged import Ragged

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
