"""Read documents, tokenize them, and store the ids in chunks: the first pass of
`mlbert.data.prepare.token_set`.

A group is some files of one source. One process reads the files of a group one after another;
others tokenize about a million characters at a time. Chunk C of group G in the work folder:

    G-C.tokens   ids of its documents, without special tokens, in the tokenizer's type
    G-C.json     its counts, and documents that may be held out
    G-C.docs     a `DOCUMENT` for each document; written last, so the chunk is complete

A group that was interrupted continues after its last complete chunk.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from mlbert.data.formats.manifest import reading
from mlbert.data.formats.tokenizer import Tokenizer
from mlbert.data.prepare.corpus_files import CorpusSource
from mlbert.data.prepare.custom_corpus import new_held_out
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.held_out import HeldOut
from mlbert.data.prepare.languages import is_named, language_of, load_languages
from mlbert.data.prepare.readable_sources import read_texts, together
from mlbert.data.prepare.text_measures import letters_of, markup_of, scripts_of
from mlbert.host.files import read_plain, whole_file, write_atomically

DOCUMENT = np.dtype([("digest", "<u8"), ("tokens", "<u4")])  # of its letters; without special ones
TOGETHER = 1 << 20  # characters that a process gets at a time
AHEAD = 8  # lists of so many characters, at most, that wait besides one for each process
# Processes: for a million characters, the reader takes 0.02 seconds, and byte pairs 0.8.
MOST_ENCODERS = 40
# Of a process among several.
AT_A_TIME = 1 << 16  # characters, see `DocumentEncoder`
CACHE_BYTES = 128 << 20  # for words in all of them, twice, see `Tokenizer.cache_bytes`
CHUNK_CHARACTERS = 16_000_000
SAMPLED = 500  # characters of a document in which markup and scripts are counted
SHORT = 100  # characters, below which a document is short


@dataclass
class TextCounts:
    """Counts of documents.

    Attributes:
        short: documents of fewer than `SHORT` characters.
        lines, repeated_lines: lines with text, and those that equal an earlier one of their
            document.
        sampled, markup: characters searched for markup, and those of it.
        scripts: letters of the same characters by script.
        languages: documents by language, of those whose language was named.
    """

    documents: int = 0
    characters: int = 0
    num_bytes: int = 0
    tokens: int = 0
    unknown: int = 0
    short: int = 0
    lines: int = 0
    repeated_lines: int = 0
    sampled: int = 0
    markup: int = 0
    scripts: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)

    def add(self, other: TextCounts) -> None:
        """Add the counts of other documents."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    @property
    def unknown_share(self) -> float:
        """Unknown tokens among all."""
        return self.unknown / max(1, self.tokens)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of UTF-8 for a token."""
        return self.num_bytes / max(1, self.tokens)

    @property
    def short_share(self) -> float:
        """Short documents among all."""
        return self.short / max(1, self.documents)

    @property
    def repeated_share(self) -> float:
        """Repeated lines among all."""
        return self.repeated_lines / max(1, self.lines)

    @property
    def markup_share(self) -> float:
        """Characters of markup among those that were searched for it."""
        return self.markup / max(1, self.sampled)

    def as_json(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {
            **vars(self),
            "scripts": dict(self.scripts),
            "languages": dict(self.languages),
        }

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> TextCounts:
        """Return the counts of `as_json`."""
        scripts = Counter(values["scripts"])
        languages = Counter(values.get("languages", {}))
        return cls(**(values | {"scripts": scripts, "languages": languages}))


@dataclass(frozen=True)
class Encoded:
    """Tokenized documents: ids without special tokens [T], `DOCUMENT` [documents], counts."""

    ids: np.ndarray
    documents: np.ndarray
    counts: TextCounts


@dataclass(frozen=True)
class DocumentEncoder:
    """Tokenizes and counts documents. Picklable.

    Args:
        tokenizer: of the ids.
        names_languages: name the language of some, see `mlbert.data.prepare.languages`.
        at_a_time: characters that are tokenized in one call. The library tokenizers takes 100 bytes
            of memory for each, and divides the documents of a call among its threads.
    """

    tokenizer: Tokenizer
    names_languages: bool = False
    at_a_time: int = TOGETHER

    def load(self) -> None:
        """Load what processes forked afterwards share."""
        self.tokenizer.load()
        if self.names_languages:
            load_languages()

    def encode(self, texts: list[str]) -> Encoded:
        """Tokenize and count documents."""
        tokenizer = self.tokenizer
        ids, lengths = self._tokenize(texts)
        documents = np.empty(len(texts), DOCUMENT)
        documents["tokens"] = lengths
        counts = TextCounts(documents=len(texts), tokens=len(ids))
        if tokenizer.unknown_id is not None:
            counts.unknown = int(np.count_nonzero(ids == tokenizer.unknown_id))
        characters: Counter[str] = Counter()
        for number, text in enumerate(texts):
            digest = xxhash.xxh3_64_intdigest(letters_of(text))
            documents["digest"][number] = digest
            lines = [line for line in text.split("\n") if line]
            sample = text[:SAMPLED]
            counts.characters += len(text)
            counts.num_bytes += len(text.encode())
            counts.short += len(text) < SHORT
            counts.lines += len(lines)
            counts.repeated_lines += len(lines) - len(set(lines))
            counts.sampled += len(sample)
            counts.markup += markup_of(sample)
            characters.update(sample)
            if self.names_languages and is_named(digest):
                counts.languages[language_of(sample)] += 1
        counts.scripts = scripts_of(characters)
        return Encoded(ids, documents, counts)

    def _tokenize(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts [T], and int64 [texts], the tokens of each."""
        ids = [np.empty(0, self.tokenizer.dtype)]
        lengths = [np.empty(0, np.int64)]
        for some in together(texts, self.at_a_time):
            ids_of_some, offsets = self.tokenizer.encode_all(some)
            ids.append(ids_of_some)
            lengths.append(np.diff(offsets))
        return np.concatenate(ids), np.concatenate(lengths)


# Maps lists of documents to what `DocumentEncoder.encode` returns, in their order.
EncodeAll = Callable[[Iterable[list[str]]], Iterator[tuple[list[str], Encoded]]]


@contextmanager
def encoding(
    executor: Executor, tokenizer: Tokenizer, names_languages: bool
) -> Iterator[EncodeAll]:
    """Yield what tokenizes and counts, in processes that take little memory each."""
    workers = min(executor.workers, MOST_ENCODERS)
    encoder = DocumentEncoder(tokenizer, names_languages)
    if workers > 1:
        limited = replace(tokenizer, cache_bytes=CACHE_BYTES // workers)
        encoder = DocumentEncoder(limited, names_languages, AT_A_TIME)
    ahead = workers + min(workers, AHEAD)
    some = replace(executor, workers=workers)
    with some.pool(encoder.encode, "the text", ahead, encoder.load) as encode:
        yield encode


@dataclass(frozen=True)
class Group:
    """Files of one source that are read one after another."""

    number: int
    source: str  # its name
    files: tuple[CorpusSource, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return sum(file.num_bytes for file in self.files)


@dataclass(frozen=True)
class ChunkStore:
    """The chunks in a work folder. Picklable.

    Args:
        folder: the work folder.
        dtype: of the ids.
    """

    folder: Path
    dtype: np.dtype

    def name(self, group: int, chunk: int) -> str:
        """Return the name of a chunk of a group."""
        return f"{group:05d}-{chunk:05d}"

    def num_complete(self, group: int) -> int:
        """Return how many chunks of a group are complete."""
        count = 0
        while self._path(self.name(group, count), "docs").exists():
            count += 1
        return count

    def write(
        self, name: str, parts: Sequence[Encoded], held_out: Sequence[tuple[int, str]]
    ) -> None:
        """Store a chunk. Raises UserError if it cannot be written."""
        counts = TextCounts()
        for part in parts:
            counts.add(part.counts)
        with whole_file(self._path(name, "tokens")) as file:
            for part in parts:
                file.write(part.ids.astype(self.dtype, copy=False).tobytes())
        facts = {"counts": counts.as_json(), "held_out": held_out}
        write_atomically(self._path(name, "json"), json.dumps(facts))
        documents = np.concatenate([part.documents for part in parts])
        write_atomically(self._path(name, "docs"), documents.tobytes())

    def documents(self, name: str) -> np.ndarray:
        """Return the `DOCUMENT` of each document of a chunk."""
        path = self._path(name, "docs")
        with reading(path):
            return np.fromfile(path, DOCUMENT)

    def tokens(self, name: str) -> np.ndarray:
        """Return the ids of the documents of a chunk, [T]."""
        path = self._path(name, "tokens")
        with reading(path):
            return np.fromfile(path, self.dtype)

    def counts(self, name: str) -> TextCounts:
        """Return the counts of a chunk."""
        return TextCounts.of_json(self._facts(name)["counts"])

    def held_out(self, name: str) -> list[tuple[int, str]]:
        """Return digest and text of the documents of a chunk that may be held out."""
        return [(digest, text) for digest, text in self._facts(name)["held_out"]]

    def _facts(self, name: str) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(read_plain(self._path(name, "json")))
        return facts

    def _path(self, name: str, suffix: str) -> Path:
        return self.folder / f"{name}.{suffix}"


@dataclass(frozen=True)
class GroupReader:
    """Stores the chunks of groups.

    Args:
        chunks: where they are stored.
        encode: tokenizes lists of documents.
        piece: characters after which a large plain file is cut, see
            `mlbert.data.prepare.corpus_files.documents`.
        advance: called with bytes on disk that were read.
    """

    chunks: ChunkStore
    encode: EncodeAll
    piece: int
    advance: Callable[[int], None]

    def read(self, group: Group) -> int:
        """Store the chunks of a group; return their number.

        Raises UserError if a file cannot be read.
        """
        chunks = self.chunks
        held_out = new_held_out()
        count = chunks.num_complete(group.number)
        num_done = 0
        for number in range(count):
            name = chunks.name(group.number, number)
            num_done += len(chunks.documents(name))
            for digest, text in chunks.held_out(name):
                held_out.offer(digest, text)
        read = read_texts(group.files, self.piece, False, self.advance)
        texts = islice((text for _, text in read), num_done, None)
        waiting: list[tuple[list[str], Encoded]] = []
        characters = 0
        for some, encoded in self.encode(together(texts, TOGETHER)):
            waiting.append((some, encoded))
            characters += encoded.counts.characters
            if characters >= CHUNK_CHARACTERS:
                self._write(chunks.name(group.number, count), waiting, held_out)
                count += 1
                waiting = []
                characters = 0
        if waiting:
            self._write(chunks.name(group.number, count), waiting, held_out)
            count += 1
        return count

    def _write(
        self, name: str, waiting: Sequence[tuple[list[str], Encoded]], held_out: HeldOut
    ) -> None:
        digests = []
        for texts, encoded in waiting:
            for text, digest in zip(texts, encoded.documents["digest"].tolist(), strict=True):
                held_out.offer(digest, text)
                digests.append((digest, text))
        chosen = {digest: text for digest, text in digests if digest in held_out}
        self.chunks.write(name, [encoded for _, encoded in waiting], [*chosen.items()])
