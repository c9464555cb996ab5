"""Prepare the user's own text for `mlbert pretrain`: a training set, a held-out set, a vocabulary and example
sentences.

text/vocab.txt, tokenizer_config.json   the vocabulary text/train/, text/val/                  MDS sets of sequences:
[CLS], tokens of documents with [SEP] between, [SEP] text/text.json                          written last: input,
counts, baselines, masked example sentences

The text is read twice: once to count words and choose the held-out documents, once to tokenise. Memory does not grow
with its size.

The held-out documents are those with the smallest SHA-256 of their text, so neither order nor number of files matters
and equal documents stay together. Training lines that nearly repeat a held-out document are dropped: those with at
least half of their tokens in runs of `RUN` tokens that also occur in the held-out text. The example sentences show
users what a model has learnt.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mlbert.data.formats.manifest import make_folder, write_json
from mlbert.data.formats.masking import Masking
from mlbert.data.formats.mds import MdsWriter
from mlbert.data.formats.ragged import Ragged, offsets_of
from mlbert.data.formats.token_shards import TOKENS
from mlbert.data.formats.tokenizer import TOKENIZER_CONFIG, VOCAB_FILE, Tokenizer, load_tokenizer
from mlbert.data.formats.wordpiece import MAX_CHARS_PER_WORD, UNKNOWN, clean_words
from mlbert.data.prepare.corpus import split_sentences
from mlbert.data.prepare.corpus_files import CorpusSource, documents
from mlbert.data.prepare.jobs import SILENT, Progress
from mlbert.data.prepare.pipeline import MAX_ALPHABET, Neighbours, split_words, train_vocabulary
from mlbert.host.errors import UserError
from mlbert.host.files import read_plain, write_atomically
from mlbert.host.json_files import add_checksum, parse_checksummed

COUNT = 10
_WORDS = range(7, 26)  # allowed number of words in a sentence
_LEAST_LETTERS = 3  # of the masked word
_LOOKED_AT = 20_000  # sentences examined


def choose_sentences(texts: Iterable[str], tokenizer: Tokenizer) -> list[list[str]]:
    """Return up to `COUNT` sentences, each as a text with one word of the vocabulary masked, and that word;
    deterministic for the same texts."""
    found: dict[str, str] = {}
    for sentence in islice(_sentences(texts), _LOOKED_AT):
        if len(sentence.split()) in _WORDS and "[" not in sentence:
            found[hashlib.sha256(sentence.encode()).hexdigest()] = sentence
    masked = (_mask(sentence, int(digest[:8], 16), tokenizer) for digest, sentence in sorted(found.items()))
    return list(islice(filter(None, masked), COUNT))


def _sentences(texts: Iterable[str]) -> Iterable[str]:
    for text in texts:
        for paragraph in text.split("\n\n"):
            sentences = split_sentences(paragraph)
            yield from sentences[1:-1] or sentences  # a cut document may have partial first and last sentences


def _mask(sentence: str, number: int, tokenizer: Tokenizer) -> list[str] | None:
    """Mask one of the words that are entries of the vocabulary; return text and word, or None if there is none."""
    words = sentence.split()
    places = [
        place
        for place, word in enumerate(words)
        if word.isalpha() and len(word) >= _LEAST_LETTERS and len(tokenizer.encode(word)) == 1
        if tokenizer.encode(word)[0] not in tokenizer.special_ids
    ]
    if not places:
        return None
    place = places[number % len(places)]
    masked = [*words[:place], "[MASK]", *words[place + 1 :]]
    return [" ".join(masked), words[place].lower() if tokenizer.lower_case else words[place]]


LEAST_CHARACTERS = 20_000
HELD_OUT_SHARE, HELD_OUT_AT_LEAST, HELD_OUT_AT_MOST, HELD_OUT_MOST_SHARE = 0.02, 60_000, 400_000, 0.1  # characters
_LEAST_HELD_OUT = 10  # documents, so that no single one dominates the accuracy
RUN, NEAR_DUPLICATE = 8, 0.5  # tokens; fraction of a line
MOST_UNKNOWN = 0.5  # fraction of [UNK] above which nothing can be learnt
_MOST_COUNTED, _THINNED = 100_000_000, 16  # characters with all words counted; after that every 16th document
_MOST_WORDS = 400_000  # different words kept; above that, words seen only once are dropped
_MOST_PAIRS = 4_000_000
_TOGETHER = 1 << 20  # characters tokenised at a time
_SHARD_BYTES = 8 << 20
_PRIME = np.uint64(0x9E3779B97F4A7C15)
_FACTS = "text.json"


@dataclass(frozen=True)
class Facts:
    """Facts about prepared text; ``made_from`` is the request that produced it."""

    made_from: dict[str, Any]
    characters: int
    documents: int
    train_sequences: int
    train_tokens: int
    held_out_sequences: int
    held_out_tokens: int
    near_repeats: int  # tokens dropped from the training text
    unknown_share: float
    baselines: dict[str, Any]
    sentences: list[list[str]]  # text with [MASK], and the original word


@dataclass(frozen=True)
class Request:
    """How to prepare text.

    Attributes:
        sources: the input text.
        vocabulary: the tokenizer to use (None trains a vocabulary).
        vocab_size: maximum number of entries of a trained vocabulary.
        lower_case: whether a trained vocabulary is uncased.
        length: tokens per sequence.
        eval_rate: probability of masking a held-out token, as in the evaluations during training.
    """

    sources: Sequence[CorpusSource]
    vocabulary: Tokenizer | None
    vocab_size: int
    lower_case: bool
    length: int
    eval_rate: float

    def made_from(self) -> dict[str, Any]:
        """Return a JSON-serializable description; equal descriptions produce equal data."""
        files = [source.identity for source in self.sources]
        new = [self.vocab_size, self.lower_case]
        vocabulary = self.vocabulary.identity if self.vocabulary else new
        return {"sources": files, "vocabulary": vocabulary, "length": self.length, "eval_rate": self.eval_rate}


def prepare(request: Request, folder: Path, progress: Progress = SILENT) -> Facts:
    """Prepare text, unless the folder already holds the same. Raises UserError: text cannot be read, is too short or
    not natural language, or the folder cannot be written."""
    if (found := read_facts(folder)) is not None and found.made_from == request.made_from():
        return found
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    scan = _scan_text(request, progress)
    tokenizer = _tokenizer(request, scan, folder)
    facts = _write_sets(request, scan, tokenizer, folder, progress)
    write_json(folder / _FACTS, add_checksum(asdict(facts)))
    return facts


def read_facts(folder: Path) -> Facts | None:
    """Return the facts that `prepare` wrote, or None if it did not finish or the file is damaged and all must be
    rebuilt."""
    try:
        found = parse_checksummed(read_plain(folder / _FACTS).decode(errors="replace"))
        return None if found is None else Facts(**found)
    except (UserError, TypeError):
        return None


class _HeldOut:
    """The documents with the smallest digests, up to a total number of characters."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, str]] = []  # (-digest, text): the largest digest is popped first
        self._known: set[int] = set()
        self.characters = 0

    def offer(self, digest: int, text: str) -> None:
        """Add the document, then drop others until all fit."""
        if len(text) > HELD_OUT_AT_MOST // _LEAST_HELD_OUT or digest in self._known:
            return
        heapq.heappush(self._heap, (-digest, text))
        self._known.add(digest)
        self.characters += len(text)
        self.shrink(HELD_OUT_AT_MOST)

    def shrink(self, most: int) -> None:
        """Drop documents until at most this many characters are left."""
        while self.characters > most:
            digest, text = heapq.heappop(self._heap)
            self._known.discard(-digest)
            self.characters -= len(text)

    @property
    def texts(self) -> list[str]:
        """Texts in the order of their digests."""
        return [text for _, text in sorted(self._heap, reverse=True)]

    def __contains__(self, digest: int) -> bool:
        return digest in self._known


@dataclass
class _Scan:
    """Results of the first reading."""

    held_out: _HeldOut
    words: Counter[str]  # separated by white space
    piece: int  # characters, see `documents`
    is_cut: bool  # also cut documents that could stay whole
    characters: int = 0
    documents: int = 0


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _read(request: Request, scan: _Scan, advance: Callable[[int], None]) -> Iterator[str]:
    for source in request.sources:
        yield from documents(source, scan.piece, scan.is_cut)
        advance(source.num_bytes)


def _scan_text(request: Request, progress: Progress) -> _Scan:
    """Read all text once. If there are too few documents, or they are too long to hold some out, cut them."""
    for is_cut in (False, True):
        scan = _scan_once(request, is_cut, progress)
        if (characters := scan.characters) < LEAST_CHARACTERS:
            reason = f"has only {characters:,} characters, too few to train a model"
            remedy = f"Give {LEAST_CHARACTERS:,} or more; a useful model needs a few million"
            raise UserError("data.too-small", "the text", reason, remedy)
        wanted = max(HELD_OUT_SHARE * characters, min(HELD_OUT_AT_LEAST, HELD_OUT_MOST_SHARE * characters))
        most = round(min(wanted, HELD_OUT_AT_MOST))
        scan.held_out.shrink(most)
        if scan.held_out.characters >= most / 3:
            break
    else:
        raise _repeats_itself()
    for text in scan.held_out.texts:
        scan.words.subtract(_words(text))
    scan.words = +scan.words
    return scan


def _repeats_itself() -> UserError:
    reason = "repeats itself: no training text is left after the held-out text is removed"
    return UserError("data.repetitive", "the text", reason, "Give text with many different sentences")


def _scan_once(request: Request, is_cut: bool, progress: Progress) -> _Scan:
    num_bytes = sum(source.num_bytes for source in request.sources)
    scan = _Scan(_HeldOut(), Counter(), max(500, min(20_000, num_bytes // 400)), is_cut)
    with progress.task("reading", num_bytes, "bytes") as advance:
        for text in _read(request, scan, advance):
            digest = _digest(text)
            scan.held_out.offer(digest, text)
            if request.vocabulary is None and (scan.characters < _MOST_COUNTED or digest % _THINNED == 0):
                scan.words.update(_words(text))
                if len(scan.words) > _MOST_WORDS:
                    scan.words = Counter({word: count for word, count in scan.words.items() if count > 1})
            scan.characters += len(text)
            scan.documents += 1
    return scan


def _words(text: str) -> list[str]:
    """Return the words of a text, without those too long to be anything but [UNK]."""
    return [word for word in clean_words(text) if len(word) <= MAX_CHARS_PER_WORD]


def _tokenizer(request: Request, scan: _Scan, folder: Path) -> Tokenizer:
    """Write the given or a newly trained vocabulary to the folder and load it."""
    given = request.vocabulary
    if given is None:
        most = max(MAX_ALPHABET, request.vocab_size // 4)
        entries = train_vocabulary(split_words(scan.words, request.lower_case), request.vocab_size, most)
    else:
        entries = given.entries
    write_atomically(folder / VOCAB_FILE, "\n".join(entries) + "\n")
    write_json(folder / TOKENIZER_CONFIG, {"do_lower_case": request.lower_case if given is None else given.lower_case})
    return load_tokenizer(folder)


def _write_sets(request: Request, scan: _Scan, tokenizer: Tokenizer, folder: Path, progress: Progress) -> Facts:
    held_out = _Stream(tokenizer, request.length)
    samples = [*held_out.samples(iter(scan.held_out.texts)), *held_out.rest()]
    _write_set(folder / "val", samples)
    known = np.unique(np.concatenate([_runs(one) for one in samples]))
    neighbours = Neighbours(len(tokenizer.vocabulary), _MOST_PAIRS)

    train = _Stream(tokenizer, request.length, known)

    def counted() -> Iterator[np.ndarray]:
        for one in train.samples(text for text in texts if _digest(text) not in scan.held_out):
            neighbours.add(one, _has_next(one, tokenizer))
            yield one
        yield from train.rest()

    with progress.task("tokenising", sum(s.num_bytes for s in request.sources), "bytes") as advance:
        texts = _read(request, scan, advance)
        written = _write_set(folder / "train", counted())
    if written < 2:
        raise _repeats_itself()
    unknown = train.unknown / max(1, train.tokens)
    if unknown > MOST_UNKNOWN:
        reason = f"{unknown:.0%} of its words are {UNKNOWN} to the vocabulary"
        remedy = "Give a vocabulary of its language, or none" if request.vocabulary else "Give natural-language text"
        raise UserError("vocabulary.other-language", "the text", reason, remedy)
    return Facts(
        made_from=json.loads(json.dumps(request.made_from())),
        characters=scan.characters,
        documents=scan.documents,
        train_sequences=written,
        train_tokens=train.tokens,
        held_out_sequences=len(samples),
        held_out_tokens=held_out.tokens,
        near_repeats=train.left_out,
        unknown_share=unknown,
        baselines=neighbours.accuracies(_masked(samples, tokenizer, request.eval_rate)),
        sentences=choose_sentences(scan.held_out.texts, tokenizer),
    )


def _write_set(folder: Path, samples: Iterable[np.ndarray]) -> int:
    """Write an MDS set of token ids; return the number of its sequences."""
    written = 0
    with MdsWriter(folder, {TOKENS: "bytes"}, size_limit=_SHARD_BYTES) as writer:
        for sample in samples:
            writer.write({TOKENS: sample.astype("<i8").tobytes()})
            written += 1
        if not written:
            raise _repeats_itself()
    return written


class _Stream:
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


def _runs(tokens: np.ndarray) -> np.ndarray:
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
    runs = _runs(tokens)
    found = known[np.minimum(np.searchsorted(known, runs), len(known) - 1)] == runs if len(known) else runs == 1
    change = np.zeros(len(tokens) + 1, np.int64)
    change[: len(found)] += found
    change[RUN : RUN + len(found)] -= found
    covered = offsets_of(np.cumsum(change)[:-1] > 0)
    lengths = np.diff(starts)
    shares = np.diff(covered[starts]) / np.maximum(lengths, 1)
    return np.repeat(shares >= NEAR_DUPLICATE, lengths)


def _has_next(sample: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return bool [T]: whether a token is followed by a neighbour from the same document."""
    ends = (sample == tokenizer.sep_id) | (sample == tokenizer.cls_id)
    has_next = ~ends
    has_next[:-1] &= ~ends[1:]
    has_next[-1] = False
    return has_next


def _masked(samples: Sequence[np.ndarray], tokenizer: Tokenizer, rate: float) -> Ragged:
    """Return the held-out sequences with the masks that `mlbert.data.loading.masked_text.TextEvalSet` draws."""
    masking = Masking(tokenizer.special_ids, tokenizer.mask_id, len(tokenizer.vocabulary), seed=0)
    offsets = offsets_of([len(one) for one in samples])
    return masking(np.concatenate(samples), offsets, 0, np.arange(len(samples)), rate)
