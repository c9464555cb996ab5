"""Fills a batch up to fixed sizes, so that every step has the same shapes: what a CUDA graph needs.

What is added takes no part in loss, gradient and accuracy: tokens behind the last sequence, sequences of no token
(`cu_seqlens` repeats its last value; a task's label is 0) and masked positions whose label is ignored.

Legend as in `mlbert.data.loading.batch`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from mlbert.data.formats.masking import MASKED_SHARE
from mlbert.data.loading.batch import IGNORED_LABEL, Batch
from mlbert.data.loading.host_batch import HostBatch

TOKEN_MULTIPLE = 128  # tiles of a GPU's matrix products
MASKED_MULTIPLE = 16  # inner dimension of an FP8 product
DEVIATIONS = 6.0  # of the number of masked tokens, which is binomial
PARTS = (0.6, 0.8)  # of the most tokens, for batches that vary


@dataclass(frozen=True)
class Budget:
    """The sizes of a filled batch."""

    tokens: int  # T; a multiple of 16 suits FP8, one of 128 the tiles of a GPU's matrix products
    sequences: int  # S
    masked: int  # M
    max_seqlen: int  # longest sequence that may occur
    has_labels: bool = False  # whether batches carry a task's labels

    @classmethod
    def of_packs(cls, packs: int, max_tokens: int, max_sequences: int, max_seqlen: int, max_predictions: int) -> Budget:
        """What so many packs hold at most: of ``max_tokens`` slots and ``max_sequences`` each, with sequences of at
        most ``max_seqlen`` tokens and ``max_predictions`` masked ones.

        The bound of masked tokens follows from the rule that data is made by: a sequence of L tokens has
        min(max_predictions, max(1, round(share L))), so less than share L + 1, and `max_predictions` tells the share
        where it is above the benchmark's. Data that was masked otherwise can exceed it: see `holds`.
        """
        share = max(MASKED_SHARE, max_predictions / max_seqlen)
        masked = min(math.floor(share * max_tokens) + max_sequences, max_sequences * max_predictions)
        return cls.rounded(packs * max_tokens, packs * max_sequences, packs * masked, max_seqlen)

    @classmethod
    def of_sequences(cls, sequences: int, length: int, rate: float) -> Budget:
        """What so many sequences of at most that length hold, each token masked with a chance of `rate`; one time in a
        billion they have more masked ones."""
        tokens = sequences * length
        masked = rate * tokens + DEVIATIONS * math.sqrt(rate * (1 - rate) * tokens)
        return cls.rounded(tokens, sequences, math.ceil(masked), length)

    @classmethod
    def rounded(cls, tokens: int, sequences: int, masked: int, max_seqlen: int) -> Budget:
        """At least so many, with tokens and masked tokens rounded up to what kernels want."""
        return cls(_rounded_up(tokens, TOKEN_MULTIPLE), sequences, _rounded_up(masked, MASKED_MULTIPLE), max_seqlen)

    @classmethod
    def over(cls, batches: Iterable[HostBatch]) -> Budget:
        """The least that holds each of some batches, with tokens and masked tokens rounded up as `of_packs` does."""
        tokens, sequences, masked, max_seqlen, labels = zip(*(_sizes(batch) for batch in batches), strict=True)
        return cls(
            tokens=_rounded_up(max(tokens), TOKEN_MULTIPLE),
            sequences=max(sequences),
            masked=_rounded_up(max(masked), MASKED_MULTIPLE),
            max_seqlen=max(max_seqlen),
            has_labels=any(labels),
        )

    def smaller_ones(self) -> tuple[Budget, ...]:
        """Budgets for batches that vary, the smallest first: parts of this one's tokens, as many sequences.

        None where sequences are packed: batches are full then.
        """
        longest = self.sequences * self.max_seqlen  # `tokens` before it was rounded up
        if longest > self.tokens:
            return ()
        smaller = []
        for part in PARTS:
            tokens = _rounded_up(math.ceil(part * self.tokens), TOKEN_MULTIPLE)
            # Rounding gives a sequence one masked token more than its share at most, see `of_packs`.
            masked = math.ceil(self.masked * tokens / longest) + self.sequences
            smaller.append(replace(self, tokens=tokens, masked=min(self.masked, _rounded_up(masked, MASKED_MULTIPLE))))
        return tuple(dict.fromkeys(budget for budget in smaller if budget.tokens < self.tokens))

    def holds(self, batch: HostBatch) -> bool:
        """Whether the batch is within all four sizes, and has labels where the budget has them."""
        *sizes, has_labels = _sizes(batch)
        limits = (self.tokens, self.sequences, self.masked, self.max_seqlen)
        fits = all(size <= limit for size, limit in zip(sizes, limits, strict=True))
        return fits and has_labels == self.has_labels

    def allocate(self, device: torch.device | str) -> Batch:
        """A batch of these sizes with one sequence of one token, in memory of its own: what `write` fills."""
        batch = Batch.empty(self.tokens, self.sequences, self.masked, self.max_seqlen, self.has_labels, device)
        for tensor in batch.tensors().values():
            tensor.zero_()
        batch.cu_seqlens[1:] = 1
        batch.masked_labels.fill_(IGNORED_LABEL)
        batch.next_sentence_labels[1:] = IGNORED_LABEL
        return batch

    def write(self, batch: HostBatch, target: Batch) -> None:
        """Makes `target`, which `allocate` gave on any device, hold the batch, which must be held. Ignored labels look
        at a real token: position 0 exists in every batch. The loss still divides by the numbers of masked tokens and
        sequences of the batch that was given."""
        assert self.holds(batch), "the batch is larger than the budget"
        batch.to(target.input_ids.device, out=target)


def _sizes(batch: HostBatch) -> tuple[int, int, int, int, bool]:
    return batch.num_tokens, batch.num_samples, batch.num_masked, batch.max_seqlen, batch.has_labels


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
