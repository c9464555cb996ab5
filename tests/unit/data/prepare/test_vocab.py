"""Vocabularies are the same for the same text, whatever the process."""

from __future__ import annotations

from collections import Counter

import pytest

from mlbert.data.formats.wordpiece import SPECIAL_TOKENS, UNKNOWN, WordPieceTokenizer
from mlbert.data.prepare.pipeline import MAX_ALPHABET, count_words, train_vocabulary
from user_errors import user_error


def test_words_are_those_of_the_tokenizer():
    assert count_words(["Don't stop, don't!", "CAFÉ"]) == Counter(
        {"don": 2, "'": 2, "t": 2, "stop": 1, ",": 1, "!": 1, "cafe": 1}
    )


def test_vocabulary_is_well_formed_and_covers_its_text(assets):
    lines = (assets / "text.txt").read_text().splitlines()
    entries = train_vocabulary(count_words(lines), 400)
    assert len(entries) == len(set(entries)) == 400
    assert tuple(entries[:5]) == SPECIAL_TOKENS
    tokenizer = WordPieceTokenizer({entry: number for number, entry in enumerate(entries)})
    unknown = entries.index(UNKNOWN)
    assert all(unknown not in tokenizer.encode(line) for line in lines)


def test_the_committed_vocabulary_is_this_trainers(assets):
    entries = train_vocabulary(count_words((assets / "text.txt").read_text().splitlines()), 300)
    assert entries == (assets / "vocab.txt").read_text().splitlines()


def test_rare_characters_are_left_out():
    words = Counter({"common": 100, **{chr(0x4E00 + n): 1 for n in range(2 * MAX_ALPHABET)}})
    assert len([entry for entry in train_vocabulary(words, 5000) if len(entry) == 1]) <= MAX_ALPHABET


@pytest.mark.parametrize("size", [0, 100, 70_000])
def test_size_out_of_range(size):
    with user_error("config.range", "--vocab-size"):
        train_vocabulary(Counter("abc"), size)
