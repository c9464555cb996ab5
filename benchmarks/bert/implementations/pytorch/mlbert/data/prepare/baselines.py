"""The accuracy of guessing masked tokens without a model, which a trained model must clearly beat.

The guesses are counted in the training text: the most frequent token, or the most frequent
neighbor of what the model sees next to the mask.

Legend: T tokens, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlbert.data.formats.ragged import Ragged
from mlbert.data.prepare.generator import FlatDocuments

_TOGETHER = 1 << 21  # pairs counted at a time
Accuracies = dict[str, float | int | str]


class Neighbors:
    """Counts tokens and pairs of neighbors of a training text, which is added in parts.

    Args:
        vocab_size: V.
        most_pairs: stop counting pairs once there are this many different ones (None: no limit).
        never_guessed: ids that are no guess, because they are never masked.
    """

    def __init__(
        self,
        vocab_size: int,
        most_pairs: int | None = None,
        never_guessed: Sequence[int] = (),
    ) -> None:
        self._never_guessed = np.zeros(vocab_size, bool)
        self._never_guessed[list(never_guessed)] = True
        self._size = vocab_size
        self._most_pairs = most_pairs
        self._tokens = np.zeros(vocab_size, np.int64)
        self._pairs = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)
        self._waiting: list[np.ndarray] = []  # pairs not yet counted
        self._num_waiting = 0

    def add(self, tokens: np.ndarray, has_next: np.ndarray) -> None:
        """Count tokens (int [T]); ``has_next`` bool [T] is whether the next token is a neighbor,
        False for the last.
        """
        tokens = tokens.astype(np.int64)
        np.add.at(self._tokens, tokens, 1)
        if self._most_pairs is not None and len(self._pairs) >= self._most_pairs:
            return
        self._waiting.append((tokens[:-1] * self._size + tokens[1:])[has_next[:-1]])
        self._num_waiting += len(self._waiting[-1])
        if self._num_waiting > _TOGETHER:
            self._count()

    def _count(self) -> None:
        found, counts = np.unique(
            np.concatenate([np.empty(0, np.int64), *self._waiting]), return_counts=True
        )
        self._pairs, places = np.unique(np.concatenate([self._pairs, found]), return_inverse=True)
        sums = np.bincount(
            places, np.concatenate([self._counts, counts]), minlength=len(self._pairs)
        )
        self._counts = sums.astype(np.int64)
        self._waiting = []
        self._num_waiting = 0

    def accuracies(self, evaluation: Ragged) -> Accuracies:
        """Return the accuracies that `baselines` describes."""
        self._count()
        most_frequent = int(np.where(self._never_guessed, -1, self._tokens).argmax())
        first, second = np.divmod(self._pairs, self._size)
        after = self._best_guess(first, second, most_frequent)
        before = self._best_guess(second, first, most_frequent)
        starts = np.repeat(evaluation.offsets[:-1], np.diff(evaluation.masked_offsets))
        where = starts + evaluation.masked_positions
        labels = evaluation.masked_labels.astype(np.int64)
        # in range: [CLS], [SEP] stay
        left = evaluation.tokens[where - 1]
        right = evaluation.tokens[where + 1]
        accuracy = {
            "most_frequent_accuracy": float(np.mean(labels == most_frequent)),
            "bigram_left_accuracy": float(np.mean(labels == after[left])),
            "bigram_right_accuracy": float(np.mean(labels == before[right])),
        }
        best = max(accuracy["bigram_left_accuracy"], accuracy["bigram_right_accuracy"])
        return {
            **accuracy,
            "bigram_accuracy": best,
            "most_frequent_id": most_frequent,
            "masked_tokens": len(labels),
        }

    def _best_guess(self, given: np.ndarray, wanted: np.ndarray, otherwise: int) -> np.ndarray:
        """Return int64 [V]: the most frequent neighbor of each token,
        or ``otherwise`` for tokens that were never seen.
        """
        guess = np.full(self._size, otherwise, np.int64)
        # The last write wins: highest count, then lowest id.
        order = np.lexsort((-wanted, self._counts))
        order = order[~self._never_guessed[wanted[order]]]
        guess[given[order]] = wanted[order]
        return guess


def baselines(
    train: Sequence[FlatDocuments],
    evaluation: Ragged,
    vocab_size: int,
    never_guessed: Sequence[int] = (),
) -> Accuracies:
    """Return the masked-token accuracies (0 to 1) of guessers with counts from the training text:
    always the most frequent token; by the left neighbor; by the right neighbor; and the better of
    the last two (bigram_accuracy). A neighbor is what the model sees, so it may be masked itself.
    ``never_guessed``: see `Neighbors`.
    """
    neighbors = Neighbors(vocab_size, never_guessed=never_guessed)
    tokens = np.concatenate([part.tokens for part in train])
    lengths = np.concatenate([np.diff(part.sentences) for part in train])
    inside = np.ones(len(tokens), bool)
    inside[np.cumsum(lengths) - 1] = False  # nothing follows the last token of a sentence
    neighbors.add(tokens, inside)
    return neighbors.accuracies(evaluation)
