"""Choose the words of a text that would save most tokens as entries of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlbert.data.formats.tokenizer import Tokenizer
from mlbert.data.formats.wordpiece import basic_split, clean_words
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.tokenizer_text import TextCounts, TokenizerText
from mlbert.data.prepare.tokenizer_training import count_words
from mlbert.host.files import write_atomically

LEAST_COUNT = 5  # occurrences of a word that is chosen


@dataclass(frozen=True)
class ChosenWord:
    """A word, how often it occurs in the text, and its tokens so far."""

    word: str
    count: int
    num_pieces: int

    @property
    def saved(self) -> int:
        """Tokens that the text has less if the word is one."""
        return self.count * (self.num_pieces - 1)


def choose_words(
    tokenizer: Tokenizer, text: TokenizerText, number: int, executor: Executor = Executor()
) -> list[ChosenWord]:
    """Return at most ``number`` words of letters that are several tokens, those that save most
    first.
    """
    counts = count_words(text.texts(TextCounts(), executor.progress), _words, executor)
    frequent = sorted(word for word, count in counts.items() if count >= LEAST_COUNT)
    _, starts = tokenizer.encode_all([f" {word}" for word in frequent])
    lengths = (starts[1:] - starts[:-1]).tolist()
    found = [
        ChosenWord(word, counts[word], num_pieces)
        for word, num_pieces in zip(frequent, lengths, strict=True)
        if num_pieces > 1
    ]
    return sorted(found, key=lambda chosen: (-chosen.saved, chosen.word))[:number]


def write_words(chosen: Sequence[ChosenWord], file: Path) -> None:
    """Write the words, one a line. Raises UserError if the file cannot be written."""
    write_atomically(file, "".join(f"{one.word}\n" for one in chosen))


def _words(text: str) -> list[str]:
    """Return the words of letters, as they are written."""
    parts = [part for word in clean_words(text) for part in basic_split(word, lower_case=False)]
    return [part for part in parts if part.isalpha()]
