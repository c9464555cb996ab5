"""Convert documents to sequences of tokens, without lines that nearly repeat known text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mlbert.data.formats.ragged import offsets_of
from mlbert.data.formats.tokenizer import Tokenizer
from mlbert.data.formats.wordpiece import UNKNOWN

RUN, NEAR_DUPLICATE = 8, 0.5  # tokens; fraction of a line
_TOGETHER = 1 << 20  # characters tokenised at a time
_PRIME = np.uint64(0x9E3779B97F4A7C15)


class SequenceStream:
    """Convert documents to sequences and count the tokens.

    Args:
        known: uint64, sorted: hashes of token runs; lines that consist mostly of them are dropped.
    """

    def __init__(self, tokenizer: Tokenizer, length: int, known: np.ndarray | None = None) -> None:
        self._tokenizer, self._room, self._known = tokenizer, length - 2, known
        self._end = np.asarray([tokenizer.sep_id], np.uint16)
        self._waiting = np.empty(0, np.uint16)
        self.tokens = self.left_out = self.unknown = 0

    def samples(self, texts: Iterator[str]) -> Iterator[np.ndarray]:
        """Yield the full sequences of texts, uint16 [length]."""
        for several in _together(texts):
            self._waiting = np.concatenate([self._waiting, self._encoded(several)])
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
        start = np.asarray([self._tokenizer.cls_id], np.uint16)
        return np.concatenate([start, inner, self._end])

    def _encoded(self, texts: Sequence[str]) -> np.ndarray:
        """Return uint16 tokens of some documents, with [SEP] after each and without known lines."""
        lines = [text.splitlines() for text in texts]
        tokens, starts = self._tokenizer.encode_all([line for document in lines for line in document])
        kept = np.ones(len(tokens), bool)
        if self._known is not None:
            kept = ~_repeated(tokens, starts, self._known)
        self.left_out += int(len(tokens) - kept.sum())
        ends = starts[offsets_of([len(document) for document in lines])[1:]]  # of the documents
        self.unknown += int((tokens[kept] == self._tokenizer.vocabulary[UNKNOWN]).sum())
        self.tokens += int(kept.sum())
        before = np.concatenate([[0], np.cumsum(kept)])
        places = before[ends]
        found = np.insert(tokens[kept], places, self._end[0])
        is_end = np.zeros(len(found), bool)
        is_end[places + np.arange(len(places))] = True
        again = np.concatenate([[False], is_end[1:] & is_end[:-1]]) if len(found) else is_end
        return found[~again]  # a document without remaining tokens leaves no [SEP]


def _together(texts: Iterator[str]) -> Iterator[list[str]]:
    several, size = list[str](), 0
    for text in texts:
        several.append(text)
        size += len(text)
        if size >= _TOGETHER:
            yield several
            several, size = [], 0
    if several:
        yield several


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


def _repeated(tokens: np.ndarray, starts: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return bool [T]: tokens of lines (int64 [lines + 1] ``starts``) with at least half of their tokens in known
    runs."""
    runs = run_hashes(tokens)
    found = known[np.minimum(np.searchsorted(known, runs), len(known) - 1)] == runs if len(known) else runs == 1
    change = np.zeros(len(tokens) + 1, np.int64)
    change[: len(found)] += found
    change[RUN : RUN + len(found)] -= found
    covered = offsets_of(np.cumsum(change)[:-1] > 0)
    lengths = np.diff(starts)
    shares = np.diff(covered[starts]) / np.maximum(lengths, 1)
    return np.repeat(shares >= NEAR_DUPLICATE, lengths)


def has_next(sample: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return bool [T]: whether a token is followed by a neighbour from the same document."""
    ends = (sample == tokenizer.sep_id) | (sample == tokenizer.cls_id)
    is_followed = ~ends
    is_followed[:-1] &= ~ends[1:]
    is_followed[-1] = False
    return is_followed
