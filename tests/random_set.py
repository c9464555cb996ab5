"""Random sequences for tests of data formats and sources."""

import numpy as np

from mlbert.data.formats.ragged import Ragged

VOCAB_SIZE = 500
MAX_SEQ_LENGTH = 32


def random_rows(count: int, seed: int = 0, max_length: int = MAX_SEQ_LENGTH) -> Ragged:
    """Return random sequences; token 1 is the sequence number modulo the vocabulary size, to tell them apart."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        length = int(rng.integers(5, max_length + 1))
        tokens = rng.integers(5, VOCAB_SIZE, length).tolist()
        positions = sorted(rng.choice(np.arange(1, length), min(5, max(1, length // 6)), replace=False).tolist())
        labels = rng.integers(5, VOCAB_SIZE, len(positions)).tolist()
        tokens[1] = number % VOCAB_SIZE
        rows.append((tokens, int(rng.integers(3, length)), bool(rng.integers(2)), positions, labels))
    return Ragged.from_rows(rows)
