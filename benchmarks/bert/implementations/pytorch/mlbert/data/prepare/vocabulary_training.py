"""Train a WordPiece vocabulary on the words of a text, with the ``tokenizers`` library.

The same text produces the same vocabulary.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from mlbert.data.formats.manifest import (
    MAX_VOCAB_SIZE,
)
from mlbert.data.formats.wordpiece import (
    SPECIAL_TOKENS,
    UNKNOWN,
    basic_split,
    clean_words,
)
from mlbert.host.errors import UserError

MIN_VOCAB_SIZE = 200
MAX_ALPHABET = 500
_LEAST_SHARE = 2e-6  # of all characters, for one in the alphabet
# Shares of the letters, see `choose_case`.
_PLAIN_CASED = 0.5  # with case; if there are fewer, a vocabulary keeps case
_MOST_ACCENTS = 0.003  # with accents; if there are more, it keeps case and accents


def count_words(sentences: Iterable[str], lower_case: bool = True) -> Counter[str]:
    """Count the basic words of sentences, split like the benchmark's tokenizer does."""
    return split_words(
        Counter(word for sentence in sentences for word in clean_words(sentence)), lower_case
    )


def split_words(raw: Counter[str], lower_case: bool = True) -> Counter[str]:
    """Split words that are separated by white space into basic words, and add up their counts."""
    words: Counter[str] = Counter()
    for word, count in raw.items():
        for part in basic_split(word, lower_case):
            words[part] += count
    return words


def choose_case(words: Counter[str]) -> tuple[bool, str]:
    """Return whether a vocabulary for these words should ignore case and accents, and the reason.

    A small vocabulary of a language such as English gains: a word has one entry, also at the start
    of a sentence. Where letters have accents, the words lose their meaning with them, and scripts
    without case gain nothing.
    """
    letters = 0
    cased = 0
    accented = 0
    for char, count in count_characters(words).items():
        if char.isalpha() or unicodedata.category(char) == "Mn":
            letters += count
            if char.lower() != char.upper():
                cased += count
            if basic_split(char) != [char.lower()]:
                accented += count
    if not letters:
        return False, "there are no letters"
    if cased < _PLAIN_CASED * letters:
        return False, f"only {cased / letters:.0%} of the letters have case"
    is_plain = accented < _MOST_ACCENTS * letters
    return is_plain, f"{accented / letters:.2%} of the letters have accents"


def least_count(words: Counter[str]) -> int:
    """Return how often a character must occur in the words to be in their alphabet."""
    return max(1, round(_LEAST_SHARE * count_characters(words).total()))


def check_vocab_size(vocab_size: int) -> None:
    """Raise UserError for a size that is too small to be useful or too large for 16 bits."""
    if not MIN_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE:
        remedy = f"Use {MIN_VOCAB_SIZE} to {MAX_VOCAB_SIZE}"
        raise UserError("config.range", "--vocab-size", f"{vocab_size} is out of range", remedy)


def train_vocabulary(
    words: Counter[str], vocab_size: int, least_count: int | None = None
) -> list[str]:
    """Return ``vocab_size`` entries of a WordPiece vocabulary, special tokens first; fewer if the
    words (with their counts) do not have enough different pieces. Raises UserError: the size is out
    of range.

    Words with characters outside the alphabet become [UNK]: WordPiece cannot spell them in bytes.
    The alphabet is the `MAX_ALPHABET` most frequent characters or, with ``least_count``, all that
    occur so often; the vocabulary then grows until it takes up at most three quarters of the
    entries.
    """
    check_vocab_size(vocab_size)
    alphabet = choose_alphabet(words, least_count)
    known = {word: count for word, count in sorted(words.items()) if alphabet.issuperset(word)}
    # The trainer numbers pieces inside words in no fixed order and breaks ties by number, so two
    # runs would produce different vocabularies. Declared as special tokens, they are numbered first
    # and in this order.
    inside = sorted({char for word in known for char in word[1:]})
    if least_count is not None:
        vocab_size = min(max(vocab_size, 4 * (len(alphabet) + len(inside)) // 3), MAX_VOCAB_SIZE)
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *(f"##{char}" for char in inside)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (" ".join([word] * count) for word, count in known.items()), trainer
    )
    numbers = tokenizer.get_vocab()
    return sorted(numbers, key=numbers.__getitem__)


def choose_alphabet(words: Counter[str], least_count: int | None) -> set[str]:
    """Return the alphabet of a vocabulary; ``least_count`` as in `train_vocabulary`."""
    characters = count_characters(words)
    if least_count is not None:
        return {char for char, count in characters.items() if count >= least_count}
    return set(sorted(characters, key=lambda char: (-characters[char], char))[:MAX_ALPHABET])


def count_characters(words: Counter[str]) -> Counter[str]:
    """Count the characters of words with their counts."""
    characters: Counter[str] = Counter()
    for word, count in words.items():
        for char in word:
            characters[char] += count
    return characters
