"""Prepare the user's own text for `mlbert pretrain`:
training and held-out sets, a vocabulary, example sentences.

    text/vocab.txt, tokenizer_config.json   the vocabulary; of a given tokenizer.json, its files
    text/train/, text/val/                  MDS sets of sequences:
                                            [CLS], tokens of documents with [SEP] between, [SEP],
                                            or a piece of one document (``Request.joins``)
    text/text.json                          written last:
                                            input, counts, baselines, masked example sentences

The text is read twice, to count words and choose the held-out documents, and to tokenize, in
constant memory. One process reads and writes; others count or tokenize about a million characters
at a time. Their number changes nothing.

Exact duplicates are dropped; only letters are compared. The held-out documents are
those with the smallest SHA-256 of their text, so neither order nor number of files matters.
Training lines that nearly repeat one are dropped: those with at least half of their tokens in runs
of 8 that also occur in the held-out text.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mlbert.data.formats.dynamic_masking import Masking
from mlbert.data.formats.manifest import make_folder, write_json
from mlbert.data.formats.mds import MdsWriter
from mlbert.data.formats.ragged import Ragged, offsets_of
from mlbert.data.formats.token_shards import TOKENS, vocabulary_sha256
from mlbert.data.formats.tokenizer import Tokenizer, load_tokenizer, write_tokenizer
from mlbert.data.formats.tokenizer_files import TOKENIZER_CONFIG, VOCAB_FILE
from mlbert.data.formats.wordpiece import MAX_CHARS_PER_WORD, clean_words
from mlbert.data.prepare.baselines import Neighbors
from mlbert.data.prepare.corpus_files import TEXT, CorpusSource, documents, format_counts
from mlbert.data.prepare.corpus_sequences import (
    PieceStream,
    SequenceStream,
    choose_sentences,
    encode_texts,
    has_next,
    run_hashes,
)
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.held_out import HeldOut, text_digest
from mlbert.data.prepare.readable_sources import (
    BadSources,
    piece_size,
    read_documents,
    scan_readable,
    together,
)
from mlbert.data.prepare.text_measures import letters_of, markup_of, script_words, scripts_of
from mlbert.data.prepare.vocabulary_training import (
    choose_case,
    count_characters,
    least_count,
    split_words,
    train_vocabulary,
)
from mlbert.host.errors import UserError
from mlbert.host.files import read_plain, write_atomically
from mlbert.host.json_files import add_checksum, parse_checksummed

LEAST_CHARACTERS = 20_000  # of all text
# Size of the held-out text.
HELD_OUT_SHARE = 0.02  # fraction of all characters
HELD_OUT_AT_LEAST = 60_000  # characters, if they are not more than HELD_OUT_MOST_SHARE
HELD_OUT_AT_MOST = 400_000  # characters
HELD_OUT_MOST_SHARE = 0.1  # fraction of all characters
_LEAST_HELD_OUT = 10  # documents, so that no single one dominates the accuracy
MOST_UNKNOWN = 0.5  # fraction of [UNK] above which nothing can be learnt
_MOST_WORDS = 400_000  # different words kept; above that, words seen only once are dropped
MOST_PAIRS = 4_000_000  # different pairs of neighbors that the baselines count
_MOST_KNOWN = 2_000_000  # documents that later ones are compared with
_SAMPLED = 2000  # characters of a document in which markup is counted
_MUCH_MARKUP = 0.02  # share of these characters above which a warning is shown
_SHARD_BYTES = 8 << 20  # maximum size of an MDS shard
_TOGETHER = 1 << 20  # characters that a process works on at a time
_FACTS = "text.json"


@dataclass(frozen=True)
class Facts:
    """Facts about prepared text; ``made_from`` is the request that produced it.

    Of a set of another program (``is_estimate``), the characters are not known, and the number of
    training tokens is an estimate.
    """

    made_from: dict[str, Any]
    characters: int
    documents: int
    train_sequences: int
    train_tokens: int
    held_out_sequences: int
    held_out_tokens: int
    near_repeats: int  # tokens dropped from the training text
    unknown_share: float  # of the training text
    held_out_unknown: float
    inventory: list[str]  # lines for the user
    scripts: str
    baselines: dict[str, Any]
    sentences: list[list[str]]  # text with [MASK], and the original word
    # Of the sets in train/ with a part of an epoch each; empty if train/ is one set.
    proportions: dict[str, float] = field(default_factory=dict)
    is_estimate: bool = False

    @property
    def origin(self) -> str:
        """The text in a few words."""
        if self.is_estimate:
            return f"{self.documents:,} texts of a prepared set"
        return f"{self.characters:,} characters, {self.documents:,} documents"


@dataclass(frozen=True)
class Request:
    """How to prepare text.

    Attributes:
        sources: the input text.
        vocabulary: the tokenizer to use (None trains a vocabulary).
        vocab_size: maximum number of entries of a trained vocabulary.
        lower_case: whether a trained vocabulary is uncased;
            None decides by the text, see `choose_case`.
        length: tokens per sequence.
        eval_rate: probability of masking a held-out token, as in the evaluations during training.
        held_out: text to hold out instead of a part of ``sources``.
        others: files that are not read, by suffix.
        encoding, skip_bad: of the files that are not UTF-8; leave out files that cannot be read.
        joins: fill sequences with several documents; otherwise each is a piece of one document.
    """

    sources: Sequence[CorpusSource]
    vocabulary: Tokenizer | None
    vocab_size: int
    lower_case: bool | None
    length: int
    eval_rate: float
    held_out: Sequence[CorpusSource] = ()
    others: Counter[str] = field(default_factory=Counter)
    encoding: str | None = None
    skip_bad: bool = False
    joins: bool = True

    def made_from(self) -> dict[str, Any]:
        """Return a JSON-serializable description; equal descriptions produce equal data."""
        files = [
            [source.identity for source in sources] for sources in (self.sources, self.held_out)
        ]
        reading = [self.encoding, self.skip_bad]
        vocabulary = (
            self.vocabulary.identity if self.vocabulary else [self.vocab_size, self.lower_case]
        )
        pieces = {} if self.joins else {"joins": False}
        return {
            **pieces,
            "sources": files,
            "reading": reading,
            "vocabulary": vocabulary,
            "length": self.length,
            "eval_rate": self.eval_rate,
            "eval_masking": "mask",
        }


def prepare(request: Request, folder: Path, executor: Executor = Executor()) -> Facts:
    """Prepare text, unless the folder already holds the same.

    Raises UserError: text cannot be read, is too short or not natural language,
    or the folder cannot be written.
    """
    if (found := read_facts(folder)) is not None and found.made_from == request.made_from():
        return found
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    readable, scan = _scan_text(request, executor)
    tokenizer = _tokenizer(readable, scan, folder)
    facts = _write_sets(readable, scan, tokenizer, folder, executor, request.made_from())
    write_facts(facts, folder)
    return facts


def take_inventory(request: Request, executor: Executor = Executor()) -> list[str]:
    """Read the text and describe it; write nothing. Raises UserError as `prepare`."""
    request, scan = _scan_text(request, executor)
    return scan.inventory(request)


def write_facts(facts: Facts, folder: Path) -> None:
    """Write the facts, which complete a prepared text. Raises UserError if that fails."""
    write_json(folder / _FACTS, add_checksum(asdict(facts)))


def read_facts(folder: Path) -> Facts | None:
    """Return the facts that `prepare` wrote, or None if it did not finish
    or the file is damaged and all must be rebuilt.
    """
    try:
        found = parse_checksummed(read_plain(folder / _FACTS).decode(errors="replace"))
        return None if found is None else Facts(**found)
    except (UserError, TypeError):
        return None


# Of each document a digest of its letters, one of its text, and its characters of markup; the words
# of all documents, separated by white space.
_Counts = tuple[list[tuple[int, int, int]], Counter[str]]


def _count(texts: Sequence[str]) -> _Counts:
    found = []
    for text in texts:
        letters = text_digest(letters_of(text))
        found.append((letters, text_digest(text), markup_of(text[:_SAMPLED])))
    return found, Counter(word for text in texts for word in _words(text))


def new_held_out() -> HeldOut:
    """Return an empty collection of held-out documents."""
    return HeldOut(HELD_OUT_AT_MOST, _LEAST_HELD_OUT)


@dataclass
class _Scan:
    """Results of the first reading."""

    piece: int  # characters, see `documents`
    is_cut: bool  # also cut documents that could stay whole
    held_out: HeldOut = field(default_factory=new_held_out)
    words: Counter[str] = field(default_factory=Counter)  # separated by white space
    characters: int = 0
    documents: int = 0
    # Numbers of the documents that equal earlier ones.
    repeats: set[int] = field(default_factory=set)
    sampled: int = 0  # characters searched for markup
    markup: int = 0  # characters of it
    bad: BadSources = field(default_factory=dict)
    _known: set[int] = field(default_factory=set)

    def add(self, texts: Sequence[str], may_hold_out: bool, counts: _Counts) -> None:
        """Add documents with what `_count` returns,
        except those whose letters are those of an earlier one.
        """
        found, words = counts
        for text, (letters, digest, markup) in zip(texts, found, strict=True):
            self.characters += len(text)
            if letters in self._known:
                self.repeats.add(self.documents)
                words.subtract(_words(text))
            else:
                if len(self._known) < _MOST_KNOWN:
                    self._known.add(letters)
                if may_hold_out:
                    self.held_out.offer(digest, text)
                self.sampled += len(text[:_SAMPLED])
                self.markup += markup
            self.documents += 1
        self.words.update(words)
        if len(self.words) > _MOST_WORDS:
            self.words = Counter({word: count for word, count in self.words.items() if count > 1})

    @cached_property
    def scripts(self) -> str:
        """See `script_words`; after the last document."""
        return script_words(scripts_of(count_characters(self.words)))

    @cached_property
    def case(self) -> tuple[bool, str]:
        """`choose_case` of the words; after the last document."""
        return choose_case(self.words)

    def inventory(self, request: Request) -> list[str]:
        """Return lines about the files and their text."""
        read = Counter(source.suffix for source in request.sources)
        column = "".join(
            f", column {name}" for name in {source.column for source in request.sources} - {TEXT}
        )
        others = f"; not read: {format_counts(request.others)}" if request.others else ""
        skipped = (
            f"; skipped: {', '.join(str(source.path) for source in self.bad)}" if self.bad else ""
        )
        lines = [
            f"files: {len(request.sources):,} read "
            f"({format_counts(read)}{column}){others}{skipped}",
            f"text: {self.characters:,} characters in {self.documents:,} documents, "
            f"{len(self.repeats):,} dropped as repeats of others; letters: {self.scripts}",
        ]
        if (share := self.markup / max(1, self.sampled)) > _MUCH_MARKUP:
            lines.append(
                f"warning: {share:.0%} of the characters are markup (tags, entities or wiki syntax)"
            )
        return lines


def _read(request: Request, scan: _Scan, advance: Callable[[int], None]) -> Iterator[str]:
    """Yield the documents of all sources; advance by bytes.

    Sources that cannot be read go to ``scan.bad``.
    """
    read = read_documents(request.sources, scan.piece, scan.is_cut, scan.bad, advance)
    return (text for _, text in read)


def _read_again(request: Request, scan: _Scan, advance: Callable[[int], None]) -> Iterator[str]:
    """Yield the documents to train on: no repeats and no held-out ones; advance by characters."""
    for number, text in enumerate(_read(request, scan, lambda num_bytes: None)):
        if number not in scan.repeats and text_digest(text) not in scan.held_out:
            yield text
        advance(len(text))


def _scan_text(request: Request, executor: Executor) -> tuple[Request, _Scan]:
    """Read all text once; return the request for the sources that can be read, and the results.

    If there are too few documents, or they are too long to hold some out, cut them.
    """
    bad: BadSources = {}  # the first pass leaves them out of the request
    for is_cut in (False, True):
        request, scan = _scan_readable(request, is_cut, executor)
        scan.bad = bad = bad | scan.bad
        if (characters := scan.characters) < LEAST_CHARACTERS:
            reason = f"has only {characters:,} characters, too few to train a model"
            remedy = f"Give {LEAST_CHARACTERS:,} or more; a useful model needs a few million"
            raise UserError("data.too-small", "the text", reason, remedy)
        if request.held_out:
            break
        most = held_out_size(characters)
        scan.held_out.shrink(most)
        if scan.held_out.characters >= most / 3:
            break
    else:
        raise _repeats_itself()
    if not request.held_out:
        for text in scan.held_out.texts:
            scan.words.subtract(_words(text))
    scan.words = +scan.words
    return request, scan


def held_out_size(characters: int) -> int:
    """Return how many of a text's characters are held out."""
    least = min(HELD_OUT_AT_LEAST, HELD_OUT_MOST_SHARE * characters)
    wanted = max(HELD_OUT_SHARE * characters, least)
    return round(min(wanted, HELD_OUT_AT_MOST))


def _repeats_itself() -> UserError:
    reason = "repeats itself: no training text is left after the held-out text is removed"
    return UserError(
        "data.repetitive", "the text", reason, "Give text with many different sentences"
    )


def _scan_readable(request: Request, is_cut: bool, executor: Executor) -> tuple[Request, _Scan]:
    """Scan as `scan_readable`; return the request for the sources that can be read."""

    def scan_once(sources: Sequence[CorpusSource]) -> _Scan:
        return _scan_once(replace(request, sources=sources), is_cut, executor)

    sources, scan = scan_readable(
        request.sources, request.encoding, request.skip_bad, scan_once, executor.progress
    )
    return replace(request, sources=sources, encoding=None), scan


def _scan_once(request: Request, is_cut: bool, executor: Executor) -> _Scan:
    num_bytes = sum(source.num_bytes for source in request.sources)
    scan = _Scan(piece_size(request.sources), is_cut)
    for source in request.held_out:
        for text in documents(source, scan.piece, is_cut=True):
            scan.held_out.offer(text_digest(text), text)
    with (
        executor.progress.task("reading", num_bytes, "bytes") as advance,
        executor.stream(
            _count, together(_read(request, scan, advance), _TOGETHER), "the text"
        ) as counted,
    ):
        for texts, counts in counted:
            scan.add(texts, not request.held_out, counts)
    return scan


def _words(text: str) -> list[str]:
    """Return the words of a text, without those too long to be anything but [UNK]."""
    return [word for word in clean_words(text) if len(word) <= MAX_CHARS_PER_WORD]


def _tokenizer(request: Request, scan: _Scan, folder: Path) -> Tokenizer:
    """Write the given or a newly trained vocabulary to the folder and load it."""
    if (given := request.vocabulary) is not None:
        write_tokenizer(given, folder)
    else:
        lower_case = scan.case[0] if request.lower_case is None else request.lower_case
        words = split_words(scan.words, lower_case)
        entries = train_vocabulary(words, request.vocab_size, least_count(words))
        write_atomically(folder / VOCAB_FILE, "\n".join(entries) + "\n")
        write_json(folder / TOKENIZER_CONFIG, {"do_lower_case": lower_case})
    return load_tokenizer(folder)


def _decision(request: Request, scan: _Scan, tokenizer: Tokenizer) -> str:
    if not tokenizer.is_plain:
        return f"tokenizer: {tokenizer.kind}, as in {tokenizer.name}"
    what = "removed" if tokenizer.lower_case else "kept"
    if request.vocabulary is not None or request.lower_case is not None:
        return f"case and accents: {what}, as asked"
    option = "--cased keeps" if tokenizer.lower_case else "--lower-case removes"
    return f"case and accents: {what}, because {scan.case[1]}; {option} them"


def _write_sets(
    request: Request,
    scan: _Scan,
    tokenizer: Tokenizer,
    folder: Path,
    executor: Executor,
    made_from: dict[str, Any],
) -> Facts:
    make_stream = SequenceStream if request.joins else PieceStream
    held_out = make_stream(tokenizer, request.length)
    train = make_stream(tokenizer, request.length)
    samples = [
        *held_out.samples([encode_texts(tokenizer, None, scan.held_out.texts)]),
        *held_out.rest(),
    ]
    _write_set(folder / "val", samples, tokenizer)
    known = np.unique(np.concatenate([run_hashes(one) for one in samples]))
    neighbors = Neighbors(tokenizer.vocab_size, MOST_PAIRS, never_guessed=tokenizer.special_ids)

    def counted(samples: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        while several := list(islice(samples, 256)):
            tokens = np.concatenate(several)
            neighbors.add(tokens, has_next(tokens, tokenizer))
            yield from several
        yield from train.rest()

    encode = partial(encode_texts, tokenizer, known)
    with executor.progress.task("tokenizing", scan.characters, "characters") as advance:
        texts = together(_read_again(request, scan, advance), _TOGETHER)
        with executor.stream(encode, texts, "the text") as encoded:
            written = _write_set(
                folder / "train", counted(train.samples(tokens for _, tokens in encoded)), tokenizer
            )
    if written < 2:
        raise _repeats_itself()
    counts = train.counts
    of_held_out = held_out.counts
    unknown = counts["unknown"] / max(1, counts["kept"])
    if unknown > MOST_UNKNOWN:
        reason = f"{unknown:.0%} of its tokens are {tokenizer.special.unknown} to the vocabulary"
        remedy = (
            "Give a vocabulary of its language, or none"
            if request.vocabulary
            else "Give natural-language text"
        )
        raise UserError("vocabulary.other-language", "the text", reason, remedy)
    return Facts(
        made_from=json.loads(json.dumps(made_from)),
        characters=scan.characters,
        documents=scan.documents,
        train_sequences=written,
        train_tokens=counts["kept"],
        held_out_sequences=len(samples),
        held_out_tokens=of_held_out["kept"],
        near_repeats=counts["left_out"],
        unknown_share=unknown,
        held_out_unknown=of_held_out["unknown"] / max(1, of_held_out["kept"]),
        inventory=[*scan.inventory(request), _decision(request, scan, tokenizer)],
        scripts=scan.scripts,
        baselines=neighbors.accuracies(mask_samples(samples, tokenizer, request.eval_rate)),
        sentences=choose_sentences(scan.held_out.texts, tokenizer),
    )


def _write_set(folder: Path, samples: Iterable[np.ndarray], tokenizer: Tokenizer) -> int:
    """Write an MDS set of token ids; return the number of its sequences."""
    written = 0
    with MdsWriter(
        folder,
        {TOKENS: "bytes"},
        size_limit=_SHARD_BYTES,
        vocabulary_sha256=vocabulary_sha256(tokenizer),
    ) as writer:
        for sample in samples:
            writer.write({TOKENS: sample.astype("<i8").tobytes()})
            written += 1
        if not written:
            raise _repeats_itself()
    return written


def mask_samples(samples: Sequence[np.ndarray], tokenizer: Tokenizer, rate: float) -> Ragged:
    """Return the held-out sequences with the masks that
    `mlbert.data.loading.masked_text.TextEvalSet` draws.
    """
    masking = Masking.of(tokenizer, seed=0, always_mask=True)
    offsets = offsets_of([len(one) for one in samples])
    return masking(np.concatenate(samples), offsets, 0, np.arange(len(samples)), rate)
