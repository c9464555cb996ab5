"""The instance generator as prepared sets use it: text part in, rows out.

`NativeGenerator` runs ``csrc/cpu/wordpiece.c`` and ``instances.c``; `PlainGenerator` is its twin, made of
`mlbert.prepare.wordpiece` and `mlbert.prepare.instances`. Both give the same rows for the same text, vocabulary and
options. `make_generator` takes the native one where it can be compiled.

Legend: T tokens, S sentences, D documents.
"""

from __future__ import annotations

import ctypes
import functools
import io
import itertools
import random
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mlbert.core import native
from mlbert.core.errors import UserError
from mlbert.prepare.instances import (
    Document,
    InstanceOptions,
    create_instances,
    decoded_lines,
    read_documents,
    unreadable,
    without_text,
)
from mlbert.prepare.wordpiece import UNKNOWN, WordPieceTokenizer
from mlbert.store.ragged import DTYPES, Ragged, offsets_of

SOURCES = ("wordpiece.c", "instances.c")
BLOCK_BYTES = 4 << 20
MAX_REMEMBERED_BYTES = 256 << 20


class Generator(Protocol):
    """Text part -> documents -> rows."""

    name: str

    def read(self, path: Path) -> Any:
        """Documents of one text part.

        Raises:
            UserError: the file cannot be read, is not UTF-8 (names the line), or holds no text.
        """

    def rows(self, documents: Any, options: InstanceOptions) -> Ragged:
        """All instances of the documents, in the benchmark's order. The documents stay as they are."""


class PlainGenerator:
    """Pure Python; the definition."""

    name = "plain"

    def __init__(self, tokenizer: WordPieceTokenizer) -> None:
        self.tokenizer = tokenizer

    def read(self, path: Path) -> list[Document]:
        """See `Generator.read`."""
        return read_documents(path, self.tokenizer)

    def rows(self, documents: list[Document], options: InstanceOptions) -> Ragged:
        """See `Generator.rows`."""
        return Ragged.from_rows(create_instances(list(documents), self.tokenizer, options))


@dataclass(frozen=True)
class FlatDocuments:
    """Documents as flat arrays; no sentence and no document is empty.

    Attributes:
        tokens: uint16 [T].
        sentences: int64 [S+1], sentence s holds tokens[sentences[s]:sentences[s+1]].
        documents: int64 [D+1], document d holds the sentences documents[d] to documents[d+1]-1.
    """

    tokens: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray

    def __len__(self) -> int:
        return len(self.documents) - 1

    @classmethod
    def from_lists(cls, documents: Sequence[Document]) -> FlatDocuments:
        """The same documents, flat."""
        sentences = [sentence for document in documents for sentence in document]
        return cls(
            tokens=np.asarray([token for sentence in sentences for token in sentence], np.uint16),
            sentences=offsets_of([len(sentence) for sentence in sentences]),
            documents=offsets_of([len(document) for document in documents]),
        )

    def to_lists(self) -> list[Document]:
        """The same documents as `PlainGenerator` holds them."""
        tokens, sentences = self.tokens.tolist(), self.sentences.tolist()
        flat = [tokens[begin:end] for begin, end in itertools.pairwise(sentences)]
        documents = self.documents.tolist()
        return [flat[begin:end] for begin, end in itertools.pairwise(documents)]


def flat(documents: FlatDocuments | list[Document]) -> FlatDocuments:
    """What either generator read, as flat arrays."""
    return documents if isinstance(documents, FlatDocuments) else FlatDocuments.from_lists(documents)


class _Options(ctypes.Structure):
    """`struct options` of instances.c."""

    _fields_ = (
        ("masked_lm_prob", ctypes.c_double),
        ("short_seq_prob", ctypes.c_double),
        ("max_seq_length", ctypes.c_int32),
        ("max_predictions", ctypes.c_int32),
        ("dupe_factor", ctypes.c_int32),
        ("mask_id", ctypes.c_int32),
        ("cls_id", ctypes.c_int32),
        ("sep_id", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
    )


_CODES: dict[str, Any] = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "v": None}
_SIGNATURES = {  # arguments, result
    "wordpiece_new": ("ppplii", "p"),
    "wordpiece_free": ("p", "v"),
    "wordpiece_forget": ("p", "v"),
    "wordpiece_reset": ("p", "v"),
    "wordpiece_remembered_bytes": ("p", "l"),
    "wordpiece_scan": ("ppll", "l"),
    "wordpiece_pending": ("ppp", "v"),
    "wordpiece_define": ("pppp", "i"),
    "wordpiece_append": ("pip", "i"),
    "wordpiece_take": ("pppp", "v"),
    "instances_make": ("ppplppp", "p"),
    "instances_take": ("pppppppp", "v"),
    "instances_free": ("p", "v"),
}


@functools.cache
def _library() -> ctypes.CDLL:
    library = native.load("instances", SOURCES, openmp=False)
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = [_CODES[code] for code in arguments]
        function.restype = _CODES[result]
    return library


def _no_memory(what: str) -> UserError:
    return UserError("memory", f"there is not enough for {what}", "Use fewer --workers or smaller text parts")


class NativeGenerator:
    """The compiled generator.

    Raises:
        mlbert.core.native.NativeUnavailable: it cannot be compiled or loaded here.
    """

    name = "native"

    def __init__(self, tokenizer: WordPieceTokenizer) -> None:
        self.tokenizer = tokenizer
        self._library = _library()
        # Words of ASCII can only match entries of ASCII; the others are Python's business.
        entries = [(entry.encode(), number) for entry, number in tokenizer.vocabulary.items() if entry.isascii()]
        joined = b"".join(entry for entry, _ in entries)
        offsets = offsets_of([len(entry) for entry, _ in entries])
        ids = np.asarray([number for _, number in entries], np.int32)
        unknown = tokenizer.vocabulary[UNKNOWN]
        self._handle = self._library.wordpiece_new(
            joined, offsets.ctypes.data, ids.ctypes.data, len(entries), unknown, int(tokenizer.lower_case)
        )
        if not self._handle:
            raise _no_memory("the vocabulary")
        weakref.finalize(self, self._library.wordpiece_free, self._handle)

    def read(self, path: Path) -> FlatDocuments:
        """See `Generator.read`."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise unreadable(path, error) from None
        documents = self.parse(data, path)
        if not len(documents):
            raise without_text(path)
        return documents

    def parse(self, data: bytes, path: Path, block_bytes: int = BLOCK_BYTES) -> FlatDocuments:
        """Documents of a text in memory; ``path`` is named in errors. Works block by block of whole lines."""
        library, handle = self._library, self._handle
        library.wordpiece_reset(handle)
        data = data.replace(b"\r", b"")  # as `decoded_lines`
        counts = np.zeros(3, np.int64)
        begin = 0
        while begin < len(data) or begin == 0:
            end = data.find(b"\n", begin + block_bytes) + 1 or len(data)
            pending = library.wordpiece_scan(handle, data, begin, end)
            if pending < 0 or (pending and self._define(data, pending, path)):
                raise _no_memory(f"the text of {path}")
            if library.wordpiece_append(handle, int(end == len(data)), counts.ctypes.data):
                raise _no_memory(f"the text of {path}")
            if library.wordpiece_remembered_bytes(handle) > MAX_REMEMBERED_BYTES:
                library.wordpiece_forget(handle)
            begin = max(end, 1)
        num_tokens, num_sentences, num_documents = counts.tolist()
        documents = FlatDocuments(
            np.empty(num_tokens, np.uint16),
            np.empty(num_sentences + 1, np.int64),
            np.empty(num_documents + 1, np.int64),
        )
        arrays = (documents.tokens, documents.sentences, documents.documents)
        library.wordpiece_take(handle, *(array.ctypes.data for array in arrays))
        library.wordpiece_reset(handle)  # its chunks point into ``data``
        return documents

    def _define(self, data: bytes, pending: int, path: Path) -> int:
        """Work out the chunks that are not ASCII, each for itself."""
        begins, lengths = np.empty(pending, np.int64), np.empty(pending, np.int64)
        self._library.wordpiece_pending(self._handle, begins.ctypes.data, lengths.ctypes.data)
        ids: list[int] = []
        counts: list[int] = []
        blank: list[bool] = []
        for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True):
            try:
                chunk = data[begin : begin + length].decode("utf-8")
            except UnicodeDecodeError:
                for _ in decoded_lines(path, io.BytesIO(data)):
                    pass  # names the line
                raise AssertionError("a chunk is not UTF-8, but every line is") from None
            tokens = self.tokenizer.encode(chunk)
            ids += tokens
            counts.append(len(tokens))
            blank.append(not chunk.strip())
        tokens_array, offsets = np.asarray(ids, np.uint16), offsets_of(counts)
        blank_array = np.asarray(blank, np.uint8)
        arrays = (tokens_array, offsets, blank_array)
        return int(self._library.wordpiece_define(self._handle, *(array.ctypes.data for array in arrays)))

    def rows(self, documents: FlatDocuments, options: InstanceOptions) -> Ragged:
        """See `Generator.rows`."""
        vocabulary = self.tokenizer.vocabulary
        settings = _Options(
            masked_lm_prob=options.masked_lm_prob,
            short_seq_prob=options.short_seq_prob,
            max_seq_length=options.max_seq_length,
            max_predictions=options.max_predictions_per_seq,
            dupe_factor=options.dupe_factor,
            mask_id=vocabulary["[MASK]"],
            cls_id=vocabulary["[CLS]"],
            sep_id=vocabulary["[SEP]"],
            vocab_size=len(vocabulary),
        )
        tokens = documents.tokens
        assert tokens.dtype == np.uint16, "16-bit tokens expected"
        assert not np.any((tokens == settings.cls_id) | (tokens == settings.sep_id)), "text gives no special tokens"
        state = np.asarray(random.Random(options.random_seed).getstate()[1], np.uint32)
        counts = np.zeros(3, np.int64)
        text = (tokens, documents.sentences, documents.documents)
        handle = self._library.instances_make(
            *(array.ctypes.data for array in text),
            len(documents),
            ctypes.addressof(settings),
            state.ctypes.data,
            counts.ctypes.data,
        )
        if not handle:
            raise _no_memory("the instances of a text part")
        try:
            rows = _empty_rows(*counts.tolist())
            self._library.instances_take(handle, *(getattr(rows, name).ctypes.data for name in _TAKEN))
        finally:
            self._library.instances_free(handle)
        return rows


# Arguments of instances_take.
_TAKEN = (
    *("tokens", "offsets", "masked_positions", "masked_labels"),
    *("masked_offsets", "first_lengths", "next_sentence"),
)


def _empty_rows(num_instances: int, num_tokens: int, num_masked: int) -> Ragged:
    sizes = {
        "tokens": num_tokens,
        "offsets": num_instances + 1,
        "masked_positions": num_masked,
        "masked_labels": num_masked,
        "masked_offsets": num_instances + 1,
        "first_lengths": num_instances,
        "next_sentence": num_instances,
    }
    return Ragged(**{name: np.empty(size, DTYPES[name]) for name, size in sizes.items()})


def make_generator(vocabulary: dict[str, int], lower_case: bool = True) -> Generator:
    """The native generator, or the plain one where nothing can be compiled; `native.status` says why."""
    tokenizer = WordPieceTokenizer(vocabulary, lower_case)
    try:
        return NativeGenerator(tokenizer)
    except native.NativeUnavailable:
        return PlainGenerator(tokenizer)
