"""The benchmark's tokenizer: clean-up, CJK spacing, lower-casing with accent stripping, punctuation, greedy WordPiece.

Exact to the published one, also on text where common libraries differ: a special token's name in the text is plain
text, words of up to 200 characters are looked up, private-use and unassigned characters stay. What happens to a
word depends on the word alone, so every distinct word is worked out once and remembered.
"""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from mlbert.data.formats.manifest import MAX_VOCAB_SIZE, reading
from mlbert.host.errors import UserError

UNKNOWN = "[UNK]"
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_CHARS_PER_WORD = 200
MAX_REMEMBERED_WORDS = 2_000_000
_REMEDY = "Give a BERT WordPiece vocab.txt"

# Code point ranges that the benchmark takes as Chinese characters (CJK ideographs; not kana, not hangul).
_CJK_RANGES = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


class _CleanTable(dict[int, str]):
    """Translation of single characters, worked out when first met: dropped, made a space, spaced, or kept."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        if char in "\t\n\r" or unicodedata.category(char) == "Zs":
            result = " "
        elif code in (0, 0xFFFD) or unicodedata.category(char) in ("Cc", "Cf"):
            result = ""
        elif any(low <= code <= high for low, high in _CJK_RANGES):
            result = f" {char} "
        else:
            result = char
        self[code] = result
        return result


_CLEAN = _CleanTable()


def is_punctuation(char: str) -> bool:
    """ASCII that is neither letter, digit, space nor control, and every Unicode punctuation character."""
    return char in string.punctuation or unicodedata.category(char).startswith("P")


def clean_words(text: str) -> list[str]:
    """Words of a text as white space separates them, after clean-up and CJK spacing."""
    return text.translate(_CLEAN).split()


def basic_split(word: str, lower_case: bool = True) -> list[str]:
    """Split one white-space separated word: lower case, no accents, punctuation apart."""
    if lower_case:
        decomposed = unicodedata.normalize("NFD", word.lower())
        word = "".join(char for char in decomposed if unicodedata.category(char) != "Mn")
    spaced = "".join(f" {char} " if is_punctuation(char) else char for char in word)
    return spaced.split()


def load_vocabulary(path: Path) -> dict[str, int]:
    """Read a vocabulary file: one entry a line, its number is its line. Raises UserError: unreadable, not UTF-8,
    doubled entries, a special token missing, or too many entries."""
    try:
        with reading(path, _REMEDY):
            lines = path.read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError("vocabulary.format", path, f"is not UTF-8 (byte {error.start})", _REMEDY) from None
    if lines and lines[-1] == "":
        lines.pop()
    return numbered(lines, path)


def numbered(lines: Sequence[str], path: Path) -> dict[str, int]:
    """A vocabulary of its entries, which come from a file. Raises UserError: doubled entries, a special token missing,
    or too many entries."""
    vocabulary: dict[str, int] = {}
    for number, line in enumerate(lines):
        if vocabulary.setdefault(line.strip(), number) != number:
            raise UserError("vocabulary.format", path, f"line {number + 1} repeats the entry {line.strip()!r}", _REMEDY)
    for token in SPECIAL_TOKENS:
        if token not in vocabulary:
            raise UserError("vocabulary.format", path, f"has no entry {token}", _REMEDY)
    if len(vocabulary) > MAX_VOCAB_SIZE:
        raise UserError(
            "vocabulary.format", path, f"has {len(vocabulary)} entries, at most {MAX_VOCAB_SIZE} fit 16 bits", _REMEDY
        )
    return vocabulary


class WordPieceTokenizer:
    """Text to token ids; with ``lower_case`` in the uncased form (lower case, accents stripped)."""

    def __init__(self, vocabulary: dict[str, int], lower_case: bool = True) -> None:
        self.vocabulary = vocabulary
        self.lower_case = lower_case
        self._unknown = (vocabulary[UNKNOWN],)
        self._longest = max(map(len, vocabulary))
        self._remembered: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        remembered = self._remembered
        ids: list[int] = []
        for word in clean_words(text):
            pieces = remembered.get(word)
            if pieces is None:
                if len(remembered) >= MAX_REMEMBERED_WORDS:
                    remembered.clear()
                parts = basic_split(word, self.lower_case)
                pieces = remembered[word] = tuple(piece for part in parts for piece in self.pieces(part))
            ids += pieces
        return ids

    def pieces(self, word: str) -> tuple[int, ...]:
        """Greedy longest-match-first pieces of one basic word; [UNK] when a rest matches nothing."""
        if len(word) > MAX_CHARS_PER_WORD:
            return self._unknown
        vocabulary, found, start = self.vocabulary, [], 0
        while start < len(word):
            prefix = "##" if start else ""
            for end in range(min(len(word), start + self._longest), start, -1):
                piece = vocabulary.get(prefix + word[start:end])
                if piece is not None:
                    found.append(piece)
                    start = end
                    break
            else:
                return self._unknown
        return tuple(found)
