"""Random tokens in the form of a stored set, for smoke tests and benchmarks without files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mlbert.data.formats.base import Store, StoreInfo
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.static_masking import MASKED_SHARE, MAX_PREDICTIONS
from mlbert.host.errors import UserError

NUM_SEQUENCES = 1 << 20
DIFFERENT = 1024  # distinct sequences; all others repeat them
FIRST_WORD = 5  # ids below are special tokens


class SyntheticStore(Store):
    """A set of equally long sequences, identical in every run.

    Args:
        tokens: token slots per pack, filled as far as possible.
        sequences: sequences per pack.
        max_predictions: maximum per sequence; the default is derived from ``tokens``,
            at most the benchmark's 76.
        vocab_size: token ids are smaller than this.

    Raises UserError: vocabulary or sequences are too small.
    """

    def __init__(
        self, tokens: int, sequences: int, max_predictions: int | None, vocab_size: int
    ) -> None:
        length = tokens // sequences
        if vocab_size <= FIRST_WORD or length < FIRST_WORD:
            raise UserError(
                "config.range",
                "SYNTH_DATA",
                f"a vocabulary of {vocab_size} or sequences of {length} tokens are too small",
            )
        most = max_predictions or min(MAX_PREDICTIONS, max(1, round(MASKED_SHARE * tokens)))
        masked = max(1, min(round(MASKED_SHARE * length), most))
        self.num_packs = NUM_SEQUENCES if sequences > 1 else 0
        self._length = length
        self._sequences = sequences
        self._pool = _random_sequences(length, masked, vocab_size)
        self.info = StoreInfo(
            folder=Path("SYNTH_DATA"),
            kind="synthetic",
            identity="",
            max_seq_length=tokens,
            max_predictions=most,
            num_sequences=NUM_SEQUENCES,
            vocab_size=vocab_size,
            vocabulary_sha256=None,
            max_pack_tokens=tokens if sequences > 1 else None,
        )

    def __len__(self) -> int:
        return NUM_SEQUENCES

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every sequence, int32 [N]."""
        return np.full(NUM_SEQUENCES, self._length, np.int32)

    def lengths_of(self, indices: np.ndarray) -> np.ndarray:
        """Return the token counts (int64) of the sequences ``indices`` (int64)."""
        return np.full(len(indices), self._length, np.int64)

    def gather(self, indices: np.ndarray) -> Ragged:
        """Return the sequences ``indices`` (int64), in that order."""
        return self._pool.take(indices % DIFFERENT)

    def gather_packs(self, indices: np.ndarray) -> tuple[Ragged, np.ndarray]:
        """Return the sequences of the packs ``indices`` (int64), pack by pack,
        and the int64 count of each.
        """
        members = (indices[:, None] + np.arange(self._sequences)).reshape(-1)
        return self.gather(members), np.full(len(indices), self._sequences)


def _random_sequences(length: int, masked: int, vocab_size: int) -> Ragged:
    draws = np.random.default_rng(0)
    # The first token is never masked.
    places = np.argsort(draws.random((DIFFERENT, length - 1)), axis=1)[:, :masked] + 1
    return Ragged(
        tokens=draws.integers(FIRST_WORD, vocab_size, DIFFERENT * length).astype(np.uint16),
        offsets=np.arange(DIFFERENT + 1) * length,
        masked_positions=np.sort(places).reshape(-1).astype(np.uint16),
        masked_labels=draws.integers(FIRST_WORD, vocab_size, DIFFERENT * masked).astype(np.uint16),
        masked_offsets=np.arange(DIFFERENT + 1) * masked,
        first_lengths=draws.integers(3, length, DIFFERENT).astype(np.uint16),
        next_sentence=draws.integers(0, 2, DIFFERENT).astype(np.uint8),
    )
