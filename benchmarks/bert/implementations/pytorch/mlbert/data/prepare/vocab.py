"""A WordPiece vocabulary from text, trained with the ``tokenizers`` library; the same text gives the same file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from mlbert.data.formats.manifest import MAX_VOCAB_SIZE
from mlbert.data.formats.wordpiece import SPECIAL_TOKENS, UNKNOWN, basic_split, clean_words
from mlbert.host.errors import UserError

MIN_VOCAB_SIZE = 200
MAX_ALPHABET = 500


def count_words(sentences: Iterable[str], lower_case: bool = True) -> Counter[str]:
    """How often each basic word occurs, as the benchmark's tokenizer splits text."""
    raw: Counter[str] = Counter()
    for sentence in sentences:
        raw.update(clean_words(sentence))
    return split_words(raw, lower_case)


def split_words(raw: Counter[str], lower_case: bool = True) -> Counter[str]:
    """The basic words of what white space separates, with their counts."""
    words: Counter[str] = Counter()
    for word, count in raw.items():
        for part in basic_split(word, lower_case):
            words[part] += count
    return words


def check_vocab_size(vocab_size: int) -> None:
    """Raises UserError for a size that is too small to be useful or too large for 16 bits."""
    if not MIN_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE:
        remedy = f"Use {MIN_VOCAB_SIZE} to {MAX_VOCAB_SIZE}"
        raise UserError("config.range", "--vocab-size", f"{vocab_size} is out of range", remedy)


def train_vocabulary(words: Counter[str], vocab_size: int, most_characters: int = MAX_ALPHABET) -> list[str]:
    """``vocab_size`` entries of a WordPiece vocabulary, special tokens first; fewer when the words (with their counts)
    have not enough different pieces. Words with others than the ``most_characters`` most frequent characters become
    [UNK]. Raises UserError: the size is out of range."""
    check_vocab_size(vocab_size)
    alphabet = _alphabet(words, most_characters)
    known = {word: count for word, count in sorted(words.items()) if alphabet.issuperset(word)}
    # The trainer numbers pieces inside words in no fixed order and decides equal counts by number, so two runs would
    # give different vocabularies: named as special tokens, they are numbered first and in this order.
    inside = sorted({char for word in known for char in word[1:]})
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=[*SPECIAL_TOKENS, *(f"##{char}" for char in inside)], show_progress=False
    )
    tokenizer.train_from_iterator((" ".join([word] * count) for word, count in known.items()), trainer)
    numbers = tokenizer.get_vocab()
    return sorted(numbers, key=numbers.__getitem__)


def _alphabet(words: Counter[str], most: int) -> set[str]:
    """The most frequent characters."""
    characters: Counter[str] = Counter()
    for word, count in words.items():
        for char in word:
            characters[char] += count
    return set(sorted(characters, key=lambda char: (-characters[char], char))[:most])
