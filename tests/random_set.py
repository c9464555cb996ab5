"""Random sequences for tests of data formats and sources."""

import numpy as np
from hypothesis import strategies as st

from mlbert.data.formats.ragged import Ragged

VOCAB_SIZE = 500
MAX_SEQ_LENGTH = 32


def random_rows(count: int, seed: int = 0, max_length: int = MAX_SEQ_LENGTH) -> Ragged:
    """Return random sequences; token 1 is the sequence number modulo the vocabulary size,
    to tell them apart.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        length = int(rng.integers(5, max_length + 1))
        tokens = rng.integers(5, VOCAB_SIZE, length).tolist()
        positions = sorted(
            rng.choice(np.arange(1, length), min(5, max(1, length // 6)), replace=False).tolist()
        )
        labels = rng.integers(5, VOCAB_SIZE, len(positions)).tolist()
        tokens[1] = number % VOCAB_SIZE
        rows.append(
            (tokens, int(rng.integers(3, length)), bool(rng.integers(2)), positions, labels)
        )
    return Ragged.from_rows(rows)


@st.composite
def any_row(draw: st.DrawFn) -> tuple[list[int], int, bool, list[int], list[int]]:
    """Draw a sequence of at most 12 tokens as `Ragged.from_rows` takes it;
    masked positions may repeat.
    """
    ids = st.integers(0, 65_535)
    tokens = draw(st.lists(ids, min_size=1, max_size=12))
    positions = draw(st.lists(st.integers(0, len(tokens) - 1), max_size=4))
    labels = draw(st.lists(ids, min_size=len(positions), max_size=len(positions)))
    return tokens, draw(st.integers(0, len(tokens))), draw(st.booleans()), positions, labels
