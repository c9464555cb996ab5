"""Random tokens with a realistic length distribution,
for smoke tests and benchmarks without data files.
"""

from __future__ import annotations

import numpy as np

from mlbert.data.batches import HostBatch, StaticShape
from mlbert.data.formats.order import Partition, RankSlice, contiguous
from mlbert.data.formats.ragged import Ragged, ids_dtype, offsets_of
from mlbert.data.formats.static_masking import MASKED_SHARE, MAX_PREDICTIONS
from mlbert.data.loading.source import EvaluationBatches, StepSource
from mlbert.host.errors import UserError

# Quantiles of the sequence lengths of the benchmark's training set,
# 512 tokens at most (public length histogram).
LENGTH_QUANTILES = (
    (0.0, 5),
    (0.01, 22),
    (0.05, 36),
    (0.10, 48),
    (0.25, 84),
    (0.50, 204),
    (0.75, 484),
    (0.766, 512),
    (1.0, 512),
)
# Between two quantiles, the length grows as this power of the share. It gives the mean of NVIDIA's
# packs, 254.43 tokens; with straight lines it would be 262.7. The mean square is 98,500 then, that
# of the histogram 98,800.
POWER = 1.365
CLS = 2
SEP = 3
MASK = 4
FIRST_WORD = 5


def lengths_at(shares: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return sequence lengths (int64) at these quantiles (0 to 1) of Wikipedia's distribution,
    scaled to ``max_tokens``.
    """
    quantiles = np.array(LENGTH_QUANTILES)
    at = quantiles[:, 0]
    length = quantiles[:, 1]
    below = np.clip(np.searchsorted(at, shares, side="right") - 1, 0, len(at) - 2)
    way = (shares - at[below]) / (at[below + 1] - at[below])
    lengths = length[below] + (length[below + 1] - length[below]) * way**POWER
    return np.clip((lengths * (max_tokens / 512)).astype(np.int64), 5, max_tokens)


def sequences(lengths: np.ndarray, vocab_size: int, generator: np.random.Generator) -> Ragged:
    """Return random sequences of these lengths (int64 [S], each at least 5) with token ids below
    ``vocab_size``.
    """
    offsets = offsets_of(lengths)
    tokens = generator.integers(FIRST_WORD, vocab_size, offsets[-1])
    tokens = tokens.astype(ids_dtype(vocab_size))
    first_lengths = generator.integers(3, lengths - 1)
    tokens[offsets[:-1]] = CLS
    tokens[offsets[:-1] + first_lengths - 1] = SEP
    tokens[offsets[1:] - 1] = SEP
    masked = np.clip(np.rint(lengths * MASKED_SHARE).astype(np.int64), 1, MAX_PREDICTIONS)
    words = [
        np.setdiff1d(np.arange(1, n - 1), [f - 1])
        for n, f in zip(lengths, first_lengths, strict=True)
    ]
    masked = np.minimum(masked, [len(positions) for positions in words])
    chosen = [
        np.sort(generator.choice(w, n, replace=False)) for w, n in zip(words, masked, strict=True)
    ]
    positions = np.concatenate(chosen)
    where = positions + np.repeat(offsets[:-1], masked)
    labels = tokens[where].copy()
    tokens[where] = MASK
    return Ragged(
        tokens=tokens,
        offsets=offsets,
        masked_positions=positions.astype(np.uint16),
        masked_labels=labels,
        masked_offsets=offsets_of(masked),
        first_lengths=first_lengths.astype(np.uint16),
        next_sentence=generator.integers(0, 2, len(lengths)).astype(np.uint8),
    )


class SyntheticSource(StepSource):
    """Endless steps of random tokens; a pack depends only on the seed,
    the step and its number in the step.

    Args:
        packs_per_step, accumulation, rank, world_size, partition: see
            `mlbert.data.loading.packed.PackedSource`.
        max_sequences_per_pack: maximum number of sequences in a pack,
            which is filled in the order they are drawn.
        vocab_size: exclusive upper bound of token ids.
        max_tokens: slots of a pack, and the longest sequence.
    """

    def __init__(
        self,
        *,
        packs_per_step: int,
        accumulation: int = 1,
        max_sequences_per_pack: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        partition: Partition = contiguous,
        vocab_size: int,
        max_tokens: int,
    ) -> None:
        if vocab_size <= FIRST_WORD or max_tokens < 5:
            reason = f"vocabulary {vocab_size} or pack length {max_tokens} is too small"
            raise UserError("config.range", "SYNTH_DATA", reason)
        self.share = RankSlice(packs_per_step, accumulation, rank, world_size)
        self.max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._max_sequences = max_sequences_per_pack
        self._seed = seed
        self._partition = partition
        super().__init__("SYNTH_DATA", {"seed": seed, "global_packs": self.share.global_units})

    def batches_of(self, step: int) -> list[HostBatch]:
        """See `StepSource.batches_of`."""

        def lengths(units: np.ndarray) -> np.ndarray:
            return np.asarray(
                [self._lengths(self._generator(step, unit)).sum() for unit in units.tolist()],
                np.int64,
            )

        batches = []
        for units in self._partition(self.share, lengths):
            packs = [self._pack(step, pack) for pack in units.tolist()]
            rows = Ragged.concatenate(packs)
            counts = np.asarray([len(pack) for pack in packs])
            batches.append(HostBatch.of(rows, counts, units, self.max_tokens, self.locks_pages))
        return batches

    def _generator(self, step: int, pack: int) -> np.random.Generator:
        return np.random.Generator(
            np.random.PCG64(np.random.SeedSequence([self._seed, step, pack]))
        )

    def _lengths(self, generator: np.random.Generator) -> np.ndarray:
        """Return the lengths of a pack's sequences; must be the first draw from its generator."""
        lengths = lengths_at(generator.random(self._max_sequences), self.max_tokens)
        return lengths[
            : max(1, int(np.searchsorted(np.cumsum(lengths), self.max_tokens, side="right")))
        ]

    def _pack(self, step: int, pack: int) -> Ragged:
        generator = self._generator(step, pack)
        return sequences(self._lengths(generator), self._vocab_size, generator)


class SyntheticEvalSet(EvaluationBatches):
    """The interface of `mlbert.data.loading.pretraining.EvalSet` over one step's batches of a
    synthetic source.
    """

    def __init__(self, source: SyntheticSource) -> None:
        self._batches = made = source.batches_of(0)
        self.static_shapes = (StaticShape.over(made),)
        self.num_examples = sum(batch.num_samples for batch in made) * source.share.world_size

    def open(self) -> None:
        """Do nothing: there is nothing to open."""
