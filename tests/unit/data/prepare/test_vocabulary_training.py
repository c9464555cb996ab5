"""Training a vocabulary: well-formed, of its size, and with an entry for every word of its text."""

from collections import Counter

from mlbert.data.formats.wordpiece import SPECIAL_TOKENS, UNKNOWN, WordPieceTokenizer
from mlbert.data.prepare import vocabulary_training
from mlbert.data.prepare.vocabulary_training import count_words, train_vocabulary
from user_errors import user_error


def test_vocabulary_is_well_formed_and_covers_its_text(assets):
    expected = {"don": 2, "'": 2, "t": 2, "stop": 1, ",": 1, "!": 1, "cafe": 1}
    assert count_words(["Don't stop, don't!", "CAFÉ"]) == Counter(expected)
    lines = (assets / "text.txt").read_text().splitlines()
    entries = train_vocabulary(count_words(lines), 400)
    assert len(entries) == len(set(entries)) == 400
    assert tuple(entries[:5]) == SPECIAL_TOKENS
    tokenizer = WordPieceTokenizer({entry: number for number, entry in enumerate(entries)})
    unknown = entries.index(UNKNOWN)
    assert all(unknown not in tokenizer.encode(line) for line in lines)
    assert (
        train_vocabulary(count_words(lines), 300) == (assets / "vocab.txt").read_text().splitlines()
    )


def test_rare_characters_are_left_out():
    words = Counter(
        {"common": 100, **{chr(0x4E00 + n): 1 for n in range(2 * vocabulary_training.MAX_ALPHABET)}}
    )
    assert (
        len([entry for entry in train_vocabulary(words, 5000) if len(entry) == 1])
        <= vocabulary_training.MAX_ALPHABET
    )
    for size in (0, 100, 70_000):
        with user_error("config.range", "--vocab-size"):
            train_vocabulary(words, size)
