"""The benchmark's tokenizer: clean-up, CJK spacing, lower-casing with accent stripping,
punctuation, greedy WordPiece.

It matches the published one exactly, also on text where common libraries differ: a special token's
name in the text is plain text, words of up to 200 characters are looked up, private-use and
unassigned characters are kept. The result for a word depends only on the word, so each distinct
word is tokenized once and cached. `WordPieceTokenizer` is the reference in Python;
`NativeWordPiece` binds csrc/cpu/wordpiece.c, which tokenizes lines of text with the same result.

Legend: T tokens, S sentences (lines that are not blank), D documents (what blank lines separate).
"""

from __future__ import annotations

import functools
import string
import unicodedata
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlbert.data.formats.manifest import MAX_VOCAB_BYTES, MAX_VOCAB_SIZE
from mlbert.data.formats.ragged import flattened, offsets_of
from mlbert.host import native
from mlbert.host.errors import UserError
from mlbert.host.files import read_plain

UNKNOWN = "[UNK]"
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_CHARS_PER_WORD = 200  # longer words become [UNK]
MAX_REMEMBERED_WORDS = 2_000_000  # cached by `WordPieceTokenizer`
_WORD_BYTES = 250  # of a cached word, about: its text, its ids, and its place in the dict
_REMEDY = "Give a BERT WordPiece vocab.txt"

# Code point ranges that the benchmark treats as Chinese characters (CJK ideographs; not kana, not
# hangul).
CJK_RANGES = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)
BLOCK_BYTES = 4 << 20  # of text that the compiled tokenizer scans at a time
MAX_REMEMBERED_BYTES = 256 << 20  # of words cached by the compiled tokenizer
_FUNCTIONS = {  # of csrc/cpu/wordpiece.c, see `mlbert.host.native.load`
    "wordpiece_new": "ppplii:p",
    "wordpiece_free": "p:v",
    "wordpiece_forget": "p:v",
    "wordpiece_reset": "p:v",
    "wordpiece_remembered_bytes": "p:l",
    "wordpiece_scan": "ppll:l",
    "wordpiece_pending": "ppp:v",
    "wordpiece_define": "pppp:i",
    "wordpiece_append": "pip:i",
    "wordpiece_take": "pppp:v",
}


@dataclass(frozen=True)
class TextRules:
    """What happens to a text before its words are looked up.

    Attributes:
        lower_case: lowercase it.
        strip_accents: decompose characters and remove their combining marks.
        split_cjk: make each Chinese character a word.
    """

    lower_case: bool
    strip_accents: bool
    split_cjk: bool

    @classmethod
    def plain(cls, lower_case: bool) -> TextRules:
        """Return the rules of Google's models, uncased or cased."""
        return cls(lower_case, lower_case, True)


class _CleanTable(dict[int, str]):
    """Translation of single characters, computed on first use:
    dropped, replaced by a space, spaced, or kept.
    """

    def __init__(self, split_cjk: bool) -> None:
        super().__init__()
        self._split_cjk = split_cjk

    def __missing__(self, code: int) -> str:
        char = chr(code)
        if char in "\t\n\r" or unicodedata.category(char) == "Zs":
            result = " "
        elif code in (0, 0xFFFD) or unicodedata.category(char) in ("Cc", "Cf"):
            result = ""
        elif self._split_cjk and is_cjk(char):
            result = f" {char} "
        else:
            result = char
        self[code] = result
        return result


@functools.cache
def _clean_table(split_cjk: bool) -> _CleanTable:
    return _CleanTable(split_cjk)


def is_cjk(char: str) -> bool:
    """Return True for a character that is a word by itself, as in Chinese."""
    return any(low <= ord(char) <= high for low, high in CJK_RANGES)


def is_punctuation(char: str) -> bool:
    """Return True for ASCII other than letters, digits, spaces and control characters,
    and for Unicode punctuation.
    """
    return char in string.punctuation or unicodedata.category(char).startswith("P")


def clean_words(text: str, split_cjk: bool = True) -> list[str]:
    """Return the whitespace-separated words of a text after clean-up and CJK spacing."""
    return text.translate(_clean_table(split_cjk)).split()


def basic_split(word: str, lower_case: bool = True, strip_accents: bool | None = None) -> list[str]:
    """Split a whitespace-separated word at punctuation; with ``lower_case``, lowercase it first.

    Accents are stripped with the case unless ``strip_accents`` says otherwise.
    """
    if lower_case:
        word = word.lower()
    if strip_accents or (strip_accents is None and lower_case):
        decomposed = unicodedata.normalize("NFD", word)
        word = "".join(char for char in decomposed if unicodedata.category(char) != "Mn")
    return "".join(f" {char} " if is_punctuation(char) else char for char in word).split()


def load_vocabulary(path: Path) -> dict[str, int]:
    """Read a vocabulary file, one entry per line; ids are line numbers from 0.

    Raises UserError if it is unreadable, JSON or not UTF-8, or as `numbered`.
    """
    if path.suffix == ".json":
        reason = "is not a vocab.txt"
        remedy = (
            "Give the vocab.txt, which `mlbert convert hf-to-torch` writes from a tokenizer.json"
        )
        raise UserError("vocabulary.format", path, reason, remedy)
    vocabulary = read_entries(path)
    check_entries(vocabulary, path)
    return vocabulary


def read_entries(path: Path) -> dict[str, int]:
    """Read a vocabulary file of any size and with any special tokens.

    Raises UserError if it is unreadable or not UTF-8, or an entry is repeated.
    """
    try:
        lines = read_plain(path, _REMEDY, MAX_VOCAB_BYTES).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(
            "vocabulary.format", path, f"is not UTF-8 (byte {error.start})", _REMEDY
        ) from None
    if lines and lines[-1] == "":
        lines.pop()
    return _number(lines, path)


def numbered(lines: Sequence[str], path: Path) -> dict[str, int]:
    """Number the entries of a vocabulary; ``path`` is for messages.

    Raises UserError if entries are duplicated, or as `check_entries`.
    """
    vocabulary = _number(lines, path)
    check_entries(vocabulary, path)
    return vocabulary


def check_entries(vocabulary: Mapping[str, int], path: Path) -> None:
    """Raise UserError if a special token of BERT is missing, or there are too many entries for 16
    bits.
    """
    for token in SPECIAL_TOKENS:
        if token not in vocabulary:
            raise UserError("vocabulary.format", path, f"has no entry {token}", _REMEDY)
    if len(vocabulary) > MAX_VOCAB_SIZE:
        reason = f"has {len(vocabulary)} entries, but at most {MAX_VOCAB_SIZE} fit into 16 bits"
        raise UserError("vocabulary.format", path, reason, _REMEDY)


def _number(lines: Sequence[str], path: Path) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for number, line in enumerate(lines):
        if vocabulary.setdefault(line.strip(), number) != number:
            raise UserError(
                "vocabulary.format",
                path,
                f"line {number + 1} repeats the entry {line.strip()!r}",
                _REMEDY,
            )
    return vocabulary


class WordPieceTokenizer:
    """Converts text to token ids.

    Args:
        lower_case: lowercase text and strip accents, unless ``rules`` are given.
        cache_bytes: for words, about, here and as much in a `NativeWordPiece` of this; None for
            `MAX_REMEMBERED_WORDS` and `MAX_REMEMBERED_BYTES`.
    """

    def __init__(
        self,
        vocabulary: dict[str, int],
        lower_case: bool = True,
        rules: TextRules | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        self.vocabulary = vocabulary
        self.cache_bytes = cache_bytes
        self._most_words = (
            MAX_REMEMBERED_WORDS if cache_bytes is None else 1 + cache_bytes // _WORD_BYTES
        )
        self.rules = rules or TextRules.plain(lower_case)
        self._unknown = (vocabulary[UNKNOWN],)
        self._longest = max(map(len, vocabulary))
        self._remembered: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        remembered = self._remembered
        ids: list[int] = []
        for word in clean_words(text, self.rules.split_cjk):
            pieces = remembered.get(word)
            if pieces is None:
                if len(remembered) >= self._most_words:
                    remembered.clear()
                parts = basic_split(word, self.rules.lower_case, self.rules.strip_accents)
                pieces = remembered[word] = tuple(
                    piece for part in parts for piece in self.pieces(part)
                )
            ids += pieces
        return ids

    def pieces(self, word: str) -> tuple[int, ...]:
        """Return the greedy longest-match-first pieces of one basic word,
        or [UNK] if a remainder does not match.
        """
        if len(word) > MAX_CHARS_PER_WORD:
            return self._unknown
        vocabulary = self.vocabulary
        found = []
        start = 0
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


def addresses(*arrays: np.ndarray) -> list[int]:
    """Return the addresses of the arrays' data, for C functions."""
    return [array.ctypes.data for array in arrays]


@dataclass(frozen=True)
class FlatDocuments:
    """Documents as flat arrays; no sentence and no document is empty."""

    tokens: np.ndarray  # uint16 [T]
    sentences: np.ndarray  # int64 [S+1], sentence s holds tokens[sentences[s]:sentences[s+1]]
    # int64 [D+1], document d holds the sentences documents[d] to documents[d+1]-1.
    documents: np.ndarray

    def __len__(self) -> int:
        return len(self.documents) - 1

    @classmethod
    def from_lists(cls, documents: Sequence[Sequence[Sequence[int]]]) -> FlatDocuments:
        """Flatten documents, each a list of sentences."""
        sentences = [sentence for document in documents for sentence in document]
        return cls(*flattened(sentences), offsets_of([*map(len, documents)]))


class NativeWordPiece:
    """A compiled tokenizer, for one thread at a time.

    Raises mlbert.host.native.NativeUnavailable if it cannot be compiled or loaded.
    """

    def __init__(self, tokenizer: WordPieceTokenizer) -> None:
        self._tokenizer = tokenizer
        self._library = native.load("wordpiece", ("wordpiece.c",), _FUNCTIONS, openmp=False)
        # ASCII words can only match ASCII entries; Python handles all other words.
        entries = [
            (entry.encode(), number)
            for entry, number in tokenizer.vocabulary.items()
            if entry.isascii()
        ]
        joined = b"".join(entry for entry, _ in entries)
        offsets = offsets_of([len(entry) for entry, _ in entries])
        ids = np.asarray([number for _, number in entries], np.int32)
        self._handle = self._library.wordpiece_new(
            joined,
            *addresses(offsets, ids),
            len(entries),
            tokenizer.vocabulary[UNKNOWN],
            int(tokenizer.rules.lower_case),
        )
        if not self._handle:
            raise no_memory("the vocabulary")
        weakref.finalize(self, self._library.wordpiece_free, self._handle)

    def parse(self, data: bytes, name: str) -> FlatDocuments:
        """Tokenize a UTF-8 text without carriage returns, in blocks of complete lines; ``name`` is
        for messages. Raises UnicodeDecodeError if it is not UTF-8.
        """
        library = self._library
        handle = self._handle
        limit = self._tokenizer.cache_bytes
        cache_bytes = MAX_REMEMBERED_BYTES if limit is None else limit
        library.wordpiece_reset(handle)
        counts = np.zeros(3, np.int64)
        begin = 0
        while begin < len(data) or begin == 0:  # an empty text has one empty block, its last
            end = data.find(b"\n", begin + BLOCK_BYTES) + 1 or len(data)
            pending = library.wordpiece_scan(handle, data, begin, end)
            # ``pending`` chunks are not ASCII: Python tokenizes them before the block is appended.
            if pending < 0 or (pending and self._define(data, pending)):
                raise no_memory(f"the text of {name}")
            if library.wordpiece_append(handle, int(end == len(data)), counts.ctypes.data):
                raise no_memory(f"the text of {name}")
            if library.wordpiece_remembered_bytes(handle) > cache_bytes:
                library.wordpiece_forget(handle)
            begin = max(end, 1)
        num_tokens, num_sentences, num_documents = counts.tolist()
        tokens = np.empty(num_tokens, np.uint16)
        sentences = np.empty(num_sentences + 1, np.int64)
        documents = np.empty(num_documents + 1, np.int64)
        library.wordpiece_take(handle, *addresses(tokens, sentences, documents))
        library.wordpiece_reset(handle)  # its chunks point into ``data``
        return FlatDocuments(tokens, sentences, documents)

    def _define(self, data: bytes, pending: int) -> int:
        """Tokenize the chunks that are not ASCII individually."""
        begins = np.empty(pending, np.int64)
        lengths = np.empty(pending, np.int64)
        self._library.wordpiece_pending(self._handle, *addresses(begins, lengths))
        places = zip(begins.tolist(), lengths.tolist(), strict=True)
        chunks = [data[begin : begin + length].decode("utf-8") for begin, length in places]
        ids, offsets = flattened([self._tokenizer.encode(chunk) for chunk in chunks])
        blank = np.asarray([not chunk.strip() for chunk in chunks], np.uint8)
        return int(self._library.wordpiece_define(self._handle, *addresses(ids, offsets, blank)))


def no_memory(what: str) -> UserError:
    """Return the error for insufficient memory."""
    reason = f"there is not enough for {what}"
    return UserError(
        "machine.memory", "memory", reason, "Use fewer --workers or smaller text parts"
    )
