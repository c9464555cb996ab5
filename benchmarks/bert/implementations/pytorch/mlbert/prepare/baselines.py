"""What guessing without a model reaches on an evaluation set: the bar that a trained model must clearly beat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlbert.prepare.generator import FlatDocuments
from mlbert.store.ragged import Ragged


def baselines(train: Sequence[FlatDocuments], evaluation: Ragged, vocab_size: int) -> dict[str, float | int | str]:
    """Masked-token accuracy (0 to 1) of two guessers with counts from the training text: of always guessing the most
    frequent token; of guessing from the left neighbour, from the right one, and of the better of both
    (bigram_accuracy). A neighbour is what the model sees: it may be masked itself."""
    tokens = np.concatenate([part.tokens for part in train]).astype(np.int64)
    lengths = np.concatenate([np.diff(part.sentences) for part in train])
    inside = np.ones(len(tokens), bool)
    inside[np.cumsum(lengths) - 1] = False  # nothing follows the last token of a sentence
    followed, following = tokens[:-1][inside[:-1]], tokens[1:][inside[:-1]]
    most_frequent = int(np.bincount(tokens, minlength=vocab_size).argmax())
    after, before = (
        _best_guess(a, b, vocab_size, most_frequent) for a, b in ((followed, following), (following, followed))
    )

    starts = np.repeat(evaluation.offsets[:-1], np.diff(evaluation.masked_offsets))
    where = starts + evaluation.masked_positions
    labels = evaluation.masked_labels.astype(np.int64)
    left, right = evaluation.tokens[where - 1], evaluation.tokens[where + 1]  # never outside: [CLS] and [SEP] stay
    accuracy = {
        "most_frequent_accuracy": float(np.mean(labels == most_frequent)),
        "bigram_left_accuracy": float(np.mean(labels == after[left])),
        "bigram_right_accuracy": float(np.mean(labels == before[right])),
    }
    best = max(accuracy["bigram_left_accuracy"], accuracy["bigram_right_accuracy"])
    return {**accuracy, "bigram_accuracy": best, "most_frequent_id": most_frequent, "masked_tokens": len(labels)}


def _best_guess(given: np.ndarray, wanted: np.ndarray, vocab_size: int, otherwise: int) -> np.ndarray:
    """int64 [V]: for each token the one most often seen beside it; ``otherwise`` where it was never seen."""
    pairs, counts = np.unique(given * vocab_size + wanted, return_counts=True)
    guess = np.full(vocab_size, otherwise, np.int64)
    order = np.lexsort((-pairs, counts))  # the last write wins: highest count, lowest id among equals
    guess[pairs[order] // vocab_size] = pairs[order] % vocab_size
    return guess
