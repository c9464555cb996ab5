"""Ids say whether they were made with a vocabulary; a vocabulary that knows no word of a text is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mlbert.data.formats.checks import another_vocabulary, keeps_case, unknown_share
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.wordpiece import SPECIAL_TOKENS, WordPieceTokenizer
from mlbert.data.prepare.instances import InstanceOptions, create_instances
from user_errors import user_error

WORDS = [f"{start}{end}" for start in "bcdfgklmnprst" for end in ("a", "e", "i")]


def vocabulary(seed: int) -> dict[str, int]:
    """The same kind of entries in another order."""
    pieces = [*WORDS[::2], *(f"##{word}" for word in WORDS), ",", ".", "(", ")"]
    order = np.random.default_rng(seed).permutation(len(pieces))
    return {entry: number for number, entry in enumerate([*SPECIAL_TOKENS, *(pieces[place] for place in order)])}


@pytest.fixture(scope="module")
def rows() -> Ragged:
    rng = np.random.default_rng(0)
    tokenizer = WordPieceTokenizer(vocabulary(0))

    def sentence() -> list[int]:
        words = ["".join(rng.choice(WORDS[::2], rng.integers(1, 4))) for _ in range(9)]
        return tokenizer.encode(f"{' '.join(words[:5])}, {' '.join(words[5:])}.")

    documents = [[sentence() for _ in range(8)] for _ in range(12)]
    options = InstanceOptions(max_seq_length=64, max_predictions_per_seq=9, dupe_factor=2)
    return Ragged.from_rows(create_instances(documents, tokenizer, options))


def test_only_its_own_vocabulary_explains_the_ids(rows):
    assert another_vocabulary(rows, vocabulary(0)) is None
    for seed in range(1, 6):
        assert "after punctuation would continue a word" in (another_vocabulary(rows, vocabulary(seed)) or "")
    moved = {entry: (number + 5) % len(vocabulary(0)) for entry, number in vocabulary(0).items()}
    assert "do not begin with this one's [CLS]" in (another_vocabulary(rows, moved) or "")


def test_a_few_tokens_prove_nothing(rows):
    few = rows.take(np.arange(2))
    assert another_vocabulary(few, vocabulary(1)) is None
    assert another_vocabulary(replace(few.take(np.arange(0))), vocabulary(1)) is None


def test_a_text_of_unknown_words():
    words = vocabulary(0)
    tokens = np.full(1000, words["[UNK]"], np.uint16)
    with user_error("vocabulary.other-language", "part"):
        unknown_share(tokens, words, "part", "vocab.txt")
    tokens[:900] = 7
    assert unknown_share(tokens, words, "part", "vocab.txt") == 0.1
    assert not keeps_case(words)
    assert keeps_case({entry: number for number, entry in enumerate([*(word.title() for word in WORDS), *words])})
