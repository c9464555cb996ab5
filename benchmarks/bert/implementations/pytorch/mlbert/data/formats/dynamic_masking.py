"""Masking that is drawn each time a sequence is used.

Each token is treated independently, by BERT's rule. A token that is not special is chosen with
probability p and must be predicted. Of the chosen tokens 80 % become [MASK], 10 % a random id of
the vocabulary, and 10 % stay. Their number varies and may be zero. Evaluations on one's own text
hide all of them (`Masking.always_mask`): a token that stays can be copied, and a baseline that does
not copy cannot be compared with a model that does.

The draws are counter-based: a token's draws are a function of (seed, step, lane, position in the
sequence), independent of the rank. With M a 64-bit mix (two rounds of xor-shift and multiplication
by an odd number, the finalizer of SplitMix64 [Steele, Lea, Flood 2014]) and G = 2**64 / golden
ratio:

    key  = M(M(M(seed) + step) + lane)
    draw = M(key + G (position + 1)): chosen if its upper 32 bits are below p 2**32
    what = M(draw + G): its upper 32 bits select the replacement, its lower 32 bits the random id

Legend: S sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.tokenizer import Tokenizer

# All uint64, because NumPy would convert mixed types to float64.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio
_ROUNDS = (  # shift and factor of each round of the mix
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
_LAST = np.uint64(31)  # shift after the rounds
_HALF = np.uint64(32)  # shift to the upper half of a draw
_LOW = np.uint64(2**32 - 1)  # mask of the lower half
_TO_MASK = np.uint64(round(0.8 * 2**32))  # below it, a chosen token becomes [MASK]
_TO_MASK_OR_RANDOM = np.uint64(round(0.9 * 2**32))  # below it, a random id


@dataclass(frozen=True)
class Masking:
    """Dynamic masking for one vocabulary.

    Args:
        special_ids: never chosen.
        mask_id: id of [MASK].
        vocab_size: exclusive upper bound of ids.
        seed: from 0 to 2**64 - 1; the same seed gives the same masks.
        always_mask: make every chosen token [MASK], in place of 80 % of them.
            The same tokens are chosen.
        replacement_ids: int [R], what a random id is drawn from; None for the whole vocabulary.
    """

    special_ids: Sequence[int]
    mask_id: int
    vocab_size: int
    seed: int
    always_mask: bool = False
    replacement_ids: np.ndarray | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, seed: int, always_mask: bool = False) -> Masking:
        """Return the masking of texts in a tokenizer's vocabulary."""
        return cls(
            tokenizer.special_ids,
            tokenizer.mask_id,
            tokenizer.vocab_size,
            seed,
            always_mask,
            tokenizer.replacement_ids,
        )

    def __call__(
        self, tokens: np.ndarray, offsets: np.ndarray, step: int, lanes: np.ndarray, rate: float
    ) -> Ragged:
        """Mask sequences.

        Args:
            tokens: uint16 or uint32 [T]; not changed.
            offsets: int64 [S+1], sequence s holds tokens[offsets[s]:offsets[s+1]].
            step: for the draws, 0 or more.
            lanes: int64 [S], identifies each sequence within the step.
            rate: probability that a token is chosen.

        Returns single-segment sequences without random next sentences.
        """
        lengths = np.diff(offsets)
        keys = _mixed(
            _mixed(_mixed(np.asarray([self.seed], np.uint64)) + np.uint64(step))
            + lanes.astype(np.uint64)
        )
        draws = np.arange(1, len(tokens) + 1, dtype=np.uint64)
        draws *= _GOLDEN
        draws += np.repeat(keys - offsets[:-1].astype(np.uint64) * _GOLDEN, lengths)
        draws = _mixed(draws)
        chosen = np.flatnonzero(
            (draws >> _HALF < np.uint64(round(rate * 2**32))) & ~self._special[tokens]
        )
        labels = tokens[chosen]
        masked = tokens.copy()
        masked[chosen] = self.mask_id
        if not self.always_mask:
            what = _mixed(draws[chosen] + _GOLDEN)
            which = what >> _HALF
            new = np.where(which < _TO_MASK_OR_RANDOM, self._random_ids(what, tokens.dtype), labels)
            masked[chosen] = np.where(which < _TO_MASK, tokens.dtype.type(self.mask_id), new)
        masked_offsets = np.searchsorted(chosen, offsets)
        return Ragged(
            tokens=masked,
            offsets=offsets,
            masked_positions=(chosen - np.repeat(offsets[:-1], np.diff(masked_offsets))).astype(
                np.uint16
            ),
            masked_labels=labels,
            masked_offsets=masked_offsets,
            first_lengths=lengths.astype(np.uint16),
            next_sentence=np.zeros(len(lengths), np.uint8),
        )

    def _random_ids(self, what: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return an id for each draw (uint64 [n]) by its lower half."""
        among = self.replacement_ids
        count = self.vocab_size if among is None else len(among)
        numbers = (what & _LOW) * np.uint64(count) >> _HALF
        return (numbers if among is None else among[numbers]).astype(dtype)

    @cached_property
    def _special(self) -> np.ndarray:
        """bool [vocab_size], at least 65,536."""
        special = np.zeros(max(self.vocab_size, 1 << 16), bool)
        special[list(self.special_ids)] = True
        return special


def _mixed(values: np.ndarray) -> np.ndarray:
    """Mix uint64 values of any shape, bijectively."""
    for shift, factor in _ROUNDS:
        values = values ^ (values >> shift)
        values *= factor
    return values ^ (values >> _LAST)
