"""Convert documents to sequences of tokens without near repeats;
choose sentences with a masked word as examples.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from mlbert.data.formats.ragged import offsets_of
from mlbert.data.formats.tokenizer import Tokenizer
from mlbert.data.formats.wordpiece import CJK_RANGES, is_cjk
from mlbert.data.prepare.sentences import split_sentences

RUN = 8  # tokens of a run that is compared
NEAR_DUPLICATE = 0.5  # fraction of a line's tokens in known runs from which it is dropped
_MARKED_BITS = 20  # first bits of a hash, enough to reject most unknown ones
_PRIME = np.uint64(0x9E3779B97F4A7C15)


# Tokens (uint16 or uint32) of some documents, with [SEP] after each; see `encode_texts`.
Encoded = tuple[np.ndarray, Counter[str]]
# Example sentences.
COUNT = 10  # chosen, at most
_TOKENS = range(8, 41)  # allowed numbers of tokens in a sentence
_LONGEST = 400  # characters of a sentence, exclusive
_LEAST_LETTERS = 3  # of the masked word, if its script has blanks
_LOOKED_AT = 20_000  # sentences examined
# Ends of sentences that `split_sentences` does not know.
_SENTENCE_END = re.compile(r"(?<=[。！？؟।])\s*|(?<=[.!?])\s+(?=[^\W\d_A-Za-z])")
_CJK = "".join(f"{chr(low)}-{chr(high)}" for low, high in CJK_RANGES)
_WORD = re.compile(rf"[{_CJK}]|[^\W\d_{_CJK}]+")


def encode_texts(tokenizer: Tokenizer, known: np.ndarray | None, texts: Sequence[str]) -> Encoded:
    """Convert documents to tokens and count them without [SEP]: kept ones, those of them that are
    unknown, and left out ones. Lines mostly of runs whose hashes are ``known`` (uint64, sorted) are
    dropped.
    """
    tokens, starts, counts_of_lines = tokenizer.encode_lines(texts)
    is_kept = (
        np.ones(len(tokens), bool) if known is None else ~nearly_repeated(tokens, starts, known)
    )
    ends = starts[offsets_of(counts_of_lines)[1:]]  # of the documents
    kept = tokens[is_kept]
    places = offsets_of(is_kept)[ends]
    found = np.insert(kept, places, tokenizer.sep_id)
    is_end = np.zeros(len(found), bool)
    is_end[places + np.arange(len(places))] = True
    again = np.concatenate([[False], is_end[1:] & is_end[:-1]]) if len(found) else is_end
    unknown_id = tokenizer.unknown_id
    unknown = 0 if unknown_id is None else int(np.count_nonzero(kept == unknown_id))
    counts = Counter(kept=len(kept), left_out=len(tokens) - len(kept), unknown=unknown)
    return found[~again], counts  # a document without remaining tokens leaves no [SEP]


class SequenceStream:
    """Joins encoded documents to sequences and counts their tokens."""

    def __init__(self, tokenizer: Tokenizer, length: int) -> None:
        self._tokenizer = tokenizer
        self._room = length - 2
        self._end = np.asarray([tokenizer.sep_id], tokenizer.dtype)
        self._waiting = np.empty(0, tokenizer.dtype)
        self.counts: Counter[str] = Counter()

    def samples(self, several: Iterable[Encoded]) -> Iterator[np.ndarray]:
        """Yield the full sequences of texts, uint16 or uint32 [length]."""
        for tokens, counts in several:
            self.counts += counts
            self._waiting = np.concatenate([self._waiting, tokens])
            full = len(self._waiting) // self._room * self._room
            for part in self._waiting[:full].reshape(-1, self._room):
                yield self._sequence(part)
            self._waiting = self._waiting[full:]

    def rest(self) -> Iterator[np.ndarray]:
        """Yield the last, shorter sequence if anything is left."""
        if len(self._waiting) > 1:
            yield self._sequence(self._waiting)

    def _sequence(self, part: np.ndarray) -> np.ndarray:
        inner = part[:-1] if part[-1] == self._end[0] and len(part) < self._room else part
        start = np.asarray([self._tokenizer.cls_id], self._tokenizer.dtype)
        return np.concatenate([start, inner, self._end])


class DocumentFrame:
    """Cuts documents into pieces with special tokens around each.

    Args:
        length: most tokens of a piece, with special ones.

    Attributes:
        most_inside: most tokens of the document in a piece.
    """

    def __init__(self, tokenizer: Tokenizer, length: int) -> None:
        self.most_inside = length - 2
        self._first = np.asarray([tokenizer.cls_id], tokenizer.dtype)
        self._last = np.asarray([tokenizer.sep_id], tokenizer.dtype)

    def pieces(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the pieces of a document, none if it is empty."""
        for start in range(0, len(ids), self.most_inside):
            yield np.concatenate([self._first, ids[start : start + self.most_inside], self._last])


class PieceStream:
    """Cuts encoded documents into pieces and counts their tokens: no sequence has two documents."""

    def __init__(self, tokenizer: Tokenizer, length: int) -> None:
        self._frame = DocumentFrame(tokenizer, length)
        self._sep_id = tokenizer.sep_id
        self.counts: Counter[str] = Counter()

    def samples(self, several: Iterable[Encoded]) -> Iterator[np.ndarray]:
        """Yield the pieces of texts, each uint16 or uint32 of at most ``length`` tokens."""
        for tokens, counts in several:
            self.counts += counts
            start = 0
            for end in np.flatnonzero(tokens == self._sep_id).tolist():
                yield from self._frame.pieces(tokens[start:end])
                start = end + 1

    def rest(self) -> Iterator[np.ndarray]:
        """Yield nothing: each document is complete."""
        return iter(())


def run_hashes(tokens: np.ndarray) -> np.ndarray:
    """Return uint64 [T - RUN + 1], a hash of each run of `RUN` tokens."""
    if len(tokens) < RUN:
        return np.empty(0, np.uint64)
    wide = tokens.astype(np.uint64)
    count = len(wide) - RUN + 1
    hashes = np.zeros(count, np.uint64)
    for place in range(RUN):
        hashes = hashes * _PRIME + wide[place : place + count] + np.uint64(1)
    return hashes


def nearly_repeated(tokens: np.ndarray, starts: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return bool [T]: tokens of lines (int64 [lines + 1] ``starts``) with at least half of their
    tokens in known runs.
    """
    found = _are_known(run_hashes(tokens), known)
    change = np.zeros(len(tokens) + 1, np.int64)
    change[: len(found)] += found
    change[RUN : RUN + len(found)] -= found
    covered = offsets_of(np.cumsum(change)[:-1] > 0)
    lengths = np.diff(starts)
    shares = np.diff(covered[starts]) / np.maximum(lengths, 1)
    return np.repeat(shares >= NEAR_DUPLICATE, lengths)


def _are_known(runs: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return bool [T], whether each hash (uint64 [T]) is in ``known``, sorted."""
    marked = np.zeros(1 << _MARKED_BITS, bool)
    shift = np.uint64(64 - _MARKED_BITS)
    marked[known >> shift] = True
    found = marked[runs >> shift]
    candidates = np.flatnonzero(found)  # few: only they are searched for
    values = runs[candidates]
    places = np.minimum(np.searchsorted(known, values), len(known) - 1)
    found[candidates] = known[places] == values
    return found


def has_next(sample: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return bool [T]: whether a token is followed by a neighbor from the same document."""
    ends = (sample == tokenizer.sep_id) | (sample == tokenizer.cls_id)
    is_followed = ~ends
    is_followed[:-1] &= ~ends[1:]
    is_followed[-1] = False
    return is_followed


def choose_sentences(texts: Iterable[str], tokenizer: Tokenizer) -> list[list[str]]:
    """Return up to `COUNT` sentences, each as a text with a word that is one token masked, and
    that word; deterministic for the same texts.
    """
    found: dict[str, str] = {}
    for sentence in islice(_sentences(texts), _LOOKED_AT):
        if (
            "[" not in sentence
            and tokenizer.mask_token not in sentence
            and len(sentence) < _LONGEST
            and len(tokenizer.encode(sentence)) in _TOKENS
        ):
            found[hashlib.sha256(sentence.encode()).hexdigest()] = sentence
    masked = (
        _mask(sentence, int(digest[:8], 16), tokenizer)
        for digest, sentence in sorted(found.items())
    )
    return list(islice(filter(None, masked), COUNT))


def _sentences(texts: Iterable[str]) -> Iterable[str]:
    for text in texts:
        for paragraph in text.split("\n\n"):
            sentences = [
                end for one in split_sentences(paragraph) for end in _SENTENCE_END.split(one) if end
            ]
            # A cut document may have partial first and last sentences.
            yield from (sentences[1:-1] or sentences)


def _mask(sentence: str, number: int, tokenizer: Tokenizer) -> list[str] | None:
    """Mask one of the words that are one token; return text and word, or None if there is none."""
    mask_word = _mask_entry if tokenizer.is_plain else _mask_token
    found = [
        (match.group(), masked)
        for match in _WORD.finditer(sentence)
        if (masked := mask_word(sentence, match, tokenizer)) is not None
    ]
    if not found:
        return None
    word, masked = found[number % len(found)]
    return [masked, word.lower() if tokenizer.lower_case else word]


def _mask_entry(sentence: str, match: re.Match[str], tokenizer: Tokenizer) -> str | None:
    """Return the sentence with [MASK] in place of a whole word, or a Chinese character, that is one
    entry of the vocabulary; None for another one.
    """
    ids = tokenizer.encode(match.group())
    is_entry = len(ids) == 1 and ids[0] not in tokenizer.special_ids
    if not is_entry or not _is_whole_word(sentence, match):
        return None
    return f"{sentence[: match.start()]}{tokenizer.mask_token}{sentence[match.end() :]}"


def _mask_token(sentence: str, match: re.Match[str], tokenizer: Tokenizer) -> str | None:
    """Return the sentence with the mask token in place of a whole word, or a Chinese character, and
    of the space before it if its token has that; None if the word is not one token.
    """
    if not _is_whole_word(sentence, match):
        return None
    whole = tokenizer.encode(sentence)
    before = sentence[: match.start()]
    after = sentence[match.end() :]
    for start in dict.fromkeys((before, before.removesuffix(" "))):
        masked = tokenizer.encode_around_mask(start, after)
        place = masked.index(tokenizer.mask_id)
        is_same_else = whole[:place] == masked[:place] and whole[place + 1 :] == masked[place + 1 :]
        is_one_token = len(whole) == len(masked) and is_same_else
        if is_one_token and whole[place] not in tokenizer.special_ids:
            return f"{start}{tokenizer.mask_token}{after}"
    return None


def _is_whole_word(sentence: str, match: re.Match[str]) -> bool:
    word = match.group()
    around = (
        sentence[max(0, match.start() - 1) : match.start()]
        + sentence[match.end() : match.end() + 1]
    )
    is_whole = not any(unicodedata.category(char)[0] in "MN" or char in "_-'’" for char in around)
    return is_whole and (len(word) >= _LEAST_LETTERS or is_cjk(word[0]))
