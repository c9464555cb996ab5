"""What guessing without a model reaches on an evaluation set: the bar that a trained model must clearly beat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlbert.data.formats.ragged import Ragged
from mlbert.data.prepare.generator import FlatDocuments

_TOGETHER = 1 << 21  # pairs that are counted at a time
Accuracies = dict[str, float | int | str]


class Neighbours:
    """Counts tokens and pairs of neighbours of a training text, which comes in parts.

    Args:
        vocab_size: V.
        most_pairs: once there are so many different ones, no more pairs are counted.
    """

    def __init__(self, vocab_size: int, most_pairs: int | None = None) -> None:
        self._size, self._most_pairs = vocab_size, most_pairs
        self._tokens = np.zeros(vocab_size, np.int64)
        self._pairs, self._counts = np.empty(0, np.int64), np.empty(0, np.int64)
        self._waiting: list[np.ndarray] = []  # pairs that are not counted in yet

    def add(self, tokens: np.ndarray, has_next: np.ndarray) -> None:
        """Counts in tokens (int [T]); bool [T]: whether the next one is a neighbour, False for the last."""
        tokens = tokens.astype(np.int64)
        np.add.at(self._tokens, tokens, 1)
        if self._most_pairs is not None and len(self._pairs) >= self._most_pairs:
            return
        self._waiting.append((tokens[:-1] * self._size + tokens[1:])[has_next[:-1]])
        if sum(map(len, self._waiting)) > _TOGETHER:
            self._count()

    def _count(self) -> None:
        found, counts = np.unique(np.concatenate([np.empty(0, np.int64), *self._waiting]), return_counts=True)
        self._pairs, places = np.unique(np.concatenate([self._pairs, found]), return_inverse=True)
        sums = np.bincount(places, np.concatenate([self._counts, counts]), minlength=len(self._pairs))
        self._counts, self._waiting = sums.astype(np.int64), []

    def accuracies(self, evaluation: Ragged) -> Accuracies:
        """See `baselines`."""
        self._count()
        most_frequent = int(self._tokens.argmax())
        first, second = np.divmod(self._pairs, self._size)
        after = self._best_guess(first, second, most_frequent)
        before = self._best_guess(second, first, most_frequent)
        starts = np.repeat(evaluation.offsets[:-1], np.diff(evaluation.masked_offsets))
        where = starts + evaluation.masked_positions
        labels = evaluation.masked_labels.astype(np.int64)
        left, right = evaluation.tokens[where - 1], evaluation.tokens[where + 1]  # not outside: [CLS] and [SEP] stay
        accuracy = {
            "most_frequent_accuracy": float(np.mean(labels == most_frequent)),
            "bigram_left_accuracy": float(np.mean(labels == after[left])),
            "bigram_right_accuracy": float(np.mean(labels == before[right])),
        }
        best = max(accuracy["bigram_left_accuracy"], accuracy["bigram_right_accuracy"])
        return {**accuracy, "bigram_accuracy": best, "most_frequent_id": most_frequent, "masked_tokens": len(labels)}

    def _best_guess(self, given: np.ndarray, wanted: np.ndarray, otherwise: int) -> np.ndarray:
        """int64 [V]: for each token the one most often seen beside it; ``otherwise`` where it was never seen."""
        guess = np.full(self._size, otherwise, np.int64)
        order = np.lexsort((-wanted, self._counts))  # the last write wins: highest count, lowest id among equals
        guess[given[order]] = wanted[order]
        return guess


def baselines(train: Sequence[FlatDocuments], evaluation: Ragged, vocab_size: int) -> Accuracies:
    """Masked-token accuracy (0 to 1) of two guessers with counts from the training text: of always guessing the most
    frequent token; of guessing from the left neighbour, from the right one, and of the better of both
    (bigram_accuracy). A neighbour is what the model sees: it may be masked itself."""
    neighbours = Neighbours(vocab_size)
    tokens = np.concatenate([part.tokens for part in train])
    lengths = np.concatenate([np.diff(part.sentences) for part in train])
    inside = np.ones(len(tokens), bool)
    inside[np.cumsum(lengths) - 1] = False  # nothing follows the last token of a sentence
    neighbours.add(tokens, inside)
    return neighbours.accuracies(evaluation)
