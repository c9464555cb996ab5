"""Prepare the text of a race: the vocabulary, training rows
and masked evaluation set of both sides.

Documents are concatenated with [SEP] after each, and cut into full rows of [CLS], L - 2 tokens,
[SEP]. Every 50th document is held out. All sides train on BERT's mix of masks (80 % [MASK], 10 %
another token, 10 % unchanged) and are scored, like the guesses without a model, on held-out rows
where every token to predict is [MASK].

Legend: N rows, L tokens per row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mlbert.data.batches import HostBatch
from mlbert.data.formats.dynamic_masking import Masking
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.prepare.baselines import baselines
from mlbert.data.prepare.generator import FlatDocuments
from mlbert.data.prepare.vocabulary_training import count_words, train_vocabulary
from mlbert.host.errors import UserError

HELD_OUT = 50  # hold out every n-th document
EVAL_ROWS = 1024
EVAL_RATE = 0.15
EVAL_SEED = 7
EVALUATION = "every token to predict is [MASK]"
MIN_ROWS = 32
EVAL_BATCH = 128


@dataclass(frozen=True)
class RaceText:
    """Rows of tokens and their masking.

    Attributes:
        train: uint16 [N, L].
        held_out: masked rows of L tokens.
        masking: BERT's masking rule for the vocabulary, for training.
        unigrams: float64 [V], frequency of each token in the training text.
    """

    train: np.ndarray
    held_out: Ragged
    masking: Masking
    unigrams: np.ndarray

    def batches(self, rows: int, rate: float, seed: int) -> Iterator[Ragged]:
        """Yield batches endlessly, reshuffled and masked again each epoch."""
        order = np.random.default_rng(seed)
        step = 0
        masking = self._masking(seed)
        offsets = np.arange(rows + 1) * self.train.shape[1]
        while True:
            places = order.permutation(len(self.train))
            for first in range(0, len(places) - rows + 1, rows):
                tokens = self.train[places[first : first + rows]].ravel()
                yield masking(tokens, offsets, step, np.arange(rows), rate)
                step += 1

    def evaluation(self) -> Iterator[Ragged]:
        """Yield the held-out rows in batches."""
        for first in range(0, len(self.held_out), EVAL_BATCH):
            yield self.held_out.slice(first, first + EVAL_BATCH)

    def guesses(self) -> dict[str, float | int | str]:
        """Return the accuracy of guessing without a model (`mlbert.data.prepare.baselines`)."""
        count, length = self.train.shape
        numbers = np.arange(count + 1)
        plain = FlatDocuments(self.train[:, 1:-1].ravel(), numbers * (length - 2), numbers)
        special_ids = self.masking.special_ids
        return baselines([plain], self.held_out, len(self.unigrams), special_ids)

    def _masking(self, seed: int) -> Masking:
        return replace(self.masking, seed=seed)


def host_batch(rows: Ragged) -> HostBatch:
    """Return the rows as a batch of our model."""
    return HostBatch.of_sequences(rows, np.arange(len(rows)), int(rows.lengths.max()))


def read_race(text: Path, folder: Path, vocab_size: int, length: int) -> RaceText:
    """Read a text with one sentence per line and a blank line after each document.

    Caches vocabulary and tokens in ``folder``. Raises UserError if the text cannot be read
    or is too small.
    """
    vocabulary = folder / "vocab.txt"
    store = folder / "tokens.npz"
    if not store.exists():
        _tokenize(text, vocabulary, store, vocab_size)
    tokenizer = load_tokenizer(vocabulary)
    with np.load(store) as kept:
        tokens = kept["tokens"]
        offsets = kept["offsets"]
    is_held = np.arange(len(offsets) - 1) % HELD_OUT == HELD_OUT - 1
    train = _rows(tokens, offsets, ~is_held, length, tokenizer.cls_id, tokenizer.sep_id)
    held_out = _rows(tokens, offsets, is_held, length, tokenizer.cls_id, tokenizer.sep_id)
    if len(held_out) < MIN_ROWS:
        problem = f"gives {len(held_out)} held-out rows, fewer than {MIN_ROWS}"
        raise UserError("data.too-small", text, problem, "Give more text")
    count = min(EVAL_ROWS, len(held_out))
    held_out = held_out[np.linspace(0, len(held_out) - 1, count).astype(int)]
    evaluation = Masking.of(tokenizer, EVAL_SEED, always_mask=True)
    masked = evaluation(
        held_out.ravel(), np.arange(count + 1) * length, 0, np.arange(count), EVAL_RATE
    )
    counts = np.bincount(train[:, 1:-1].ravel(), minlength=len(tokenizer.vocabulary)).astype(float)
    return RaceText(train, masked, Masking.of(tokenizer, EVAL_SEED), counts)


def _tokenize(text: Path, vocabulary: Path, store: Path, vocab_size: int) -> None:
    try:
        documents = [
            " ".join(part.split("\n"))
            for part in text.read_text(encoding="utf-8").split("\n\n")
            if part
        ]
    except OSError as error:
        raise UserError(
            "file.unreadable", text, f"cannot be read ({error.strerror})", "Name a text file"
        ) from None
    vocabulary.parent.mkdir(parents=True, exist_ok=True)
    train = (part for number, part in enumerate(documents) if number % HELD_OUT != HELD_OUT - 1)
    entries = train_vocabulary(count_words(train), vocab_size)
    vocabulary.write_text("\n".join(entries) + "\n", encoding="utf-8")
    tokens, offsets = load_tokenizer(vocabulary).encode_all(documents)
    np.savez(store, tokens=tokens, offsets=offsets)


def _rows(
    tokens: np.ndarray,
    offsets: np.ndarray,
    chosen: np.ndarray,
    length: int,
    cls_id: int,
    sep_id: int,
) -> np.ndarray:
    """Return the rows of the chosen documents, uint16 [N, L]."""
    lengths = np.diff(offsets)
    inside = np.repeat(chosen, lengths)
    ends = np.cumsum(lengths[chosen])
    stream = np.insert(tokens[inside], ends, np.uint16(sep_id))
    count = len(stream) // (length - 2)
    rows = np.empty((count, length), np.uint16)
    rows[:, 0] = cls_id
    rows[:, -1] = sep_id
    rows[:, 1:-1] = stream[: count * (length - 2)].reshape(count, length - 2)
    return rows
