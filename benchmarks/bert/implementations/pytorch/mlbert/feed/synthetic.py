"""Batches of random tokens with a real length distribution: for smoke tests and speed, no files needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from mlbert.core.errors import UserError
from mlbert.feed.batch import Batch
from mlbert.feed.packed import HostBatches, Prefetcher, StepShape, make_batch
from mlbert.store.ragged import Ragged, offsets_of

# Quantiles of the sequence lengths of the benchmark's training set, 512 tokens at most (public length histogram).
LENGTH_QUANTILES = ((0.0, 5), (0.01, 22), (0.05, 36), (0.10, 48), (0.25, 84), (0.50, 204), (0.75, 484), (0.766, 512))
CLS, SEP, MASK, FIRST_WORD = 2, 3, 4, 5


def lengths_at(shares: np.ndarray, max_tokens: int) -> np.ndarray:
    """Sequence lengths, int64, at these shares (0 to 1) of Wikipedia's distribution, scaled to ``max_tokens``."""
    share, length = zip(*LENGTH_QUANTILES, strict=True)
    return np.clip((np.interp(shares, share, length) * (max_tokens / 512)).astype(np.int64), 5, max_tokens)


class SyntheticSource:
    """The interface of `mlbert.feed.packed.PackedSource` over random tokens.

    Args:
        packs_per_step, accumulation, rank, world_size: see `mlbert.feed.packed.StepShape`.
        max_sequences_per_pack: sequences are put into a pack in the order they are drawn, at most so many.
        seed: same seed, same tokens.
        vocab_size: token ids are below it.
        max_tokens: slots of a pack and longest sequence.
        masked_lm_prob, max_predictions: as in the benchmark's masking.
        num_samples: what the source pretends to hold, sequences.
    """

    def __init__(
        self,
        *,
        packs_per_step: int,
        accumulation: int = 1,
        max_sequences_per_pack: int = 3,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        vocab_size: int = 30_522,
        max_tokens: int = 512,
        masked_lm_prob: float = 0.15,
        max_predictions: int = 76,
        num_samples: int = 156_726_829,
    ) -> None:
        if vocab_size <= FIRST_WORD or max_tokens < 5:
            raise UserError("SYNTH_DATA", f"vocabulary {vocab_size} or pack length {max_tokens} is too small")
        self.shape = StepShape(packs_per_step, accumulation, rank, world_size)
        self.num_samples, self.vocab_size, self.max_tokens = num_samples, vocab_size, max_tokens
        self.manifest_sha256 = "synthetic"
        self._max_sequences, self._seed = max_sequences_per_pack, seed
        self._masked_lm_prob, self._max_predictions = masked_lm_prob, max_predictions
        self._step = 0
        self._prefetcher: Prefetcher | None = None

    def open(self) -> None:
        """Nothing to open."""

    def next_step(self) -> HostBatches:
        """This rank's micro-batches of the next optimizer step."""
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self.batches_of, self._step)
        batches = self._prefetcher.next()
        self._step += 1
        return batches

    def batches_of(self, step: int) -> list[Batch]:
        """This rank's micro-batches of step ``step``; each pack depends on (seed, step, pack) only."""
        batches = []
        for first, end in self.shape.micro_batches():
            packs = [self._pack(step, pack) for pack in range(first, end)]
            counts = np.asarray([len(pack) for pack in packs])
            batches.append(make_batch(Ragged.concatenate(packs), counts, first, self.max_tokens))
        return batches

    def _pack(self, step: int, pack: int) -> Ragged:
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, step, pack])))
        lengths = lengths_at(generator.random(self._max_sequences), self.max_tokens)
        lengths = lengths[: max(1, int(np.searchsorted(np.cumsum(lengths), self.max_tokens, side="right")))]
        return self.sequences(lengths, generator)

    def sequences(self, lengths: np.ndarray, generator: np.random.Generator) -> Ragged:
        """Made-up sequences of these lengths (int64 [S], each at least 5)."""
        offsets = offsets_of(lengths)
        tokens = generator.integers(FIRST_WORD, self.vocab_size, offsets[-1]).astype(np.uint16)
        first_lengths = generator.integers(3, lengths - 1)
        tokens[offsets[:-1]] = CLS
        tokens[offsets[:-1] + first_lengths - 1] = SEP
        tokens[offsets[1:] - 1] = SEP
        masked = np.clip(np.rint(lengths * self._masked_lm_prob).astype(np.int64), 1, self._max_predictions)
        words = [np.setdiff1d(np.arange(1, n - 1), [f - 1]) for n, f in zip(lengths, first_lengths, strict=True)]
        masked = np.minimum(masked, [len(positions) for positions in words])
        chosen = [np.sort(generator.choice(w, n, replace=False)) for w, n in zip(words, masked, strict=True)]
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

    def state_dict(self) -> dict[str, Any]:
        """Position, JSON-able."""
        return {"step": self._step, "seed": self._seed, "global_packs": self.shape.global_packs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            UserError: the position belongs to another seed or global batch.
        """
        if {**state, "step": 0} != {**self.state_dict(), "step": 0}:
            raise UserError("SYNTH_DATA", f"the saved position {json.dumps(state)} belongs to other settings")
        self.close()
        self._step = int(state["step"])

    def close(self) -> None:
        """Stop the background thread; `next_step` starts it again."""
        if self._prefetcher is not None:
            self._prefetcher.stop()
            self._prefetcher = None


class SyntheticEvalSet:
    """The interface of `mlbert.feed.evaluation.EvalSet` over one step's batches of a synthetic source.

    Args:
        source: where the batches come from; its rank and world size apply.
    """

    def __init__(self, source: SyntheticSource) -> None:
        self._batches = source.batches_of(0)
        self.num_examples = sum(batch.num_samples for batch in self._batches) * source.shape.world_size

    def open(self) -> None:
        """Nothing to open."""

    def __iter__(self) -> Iterator[Batch]:
        """The same batches at every pass."""
        return iter(self._batches)
