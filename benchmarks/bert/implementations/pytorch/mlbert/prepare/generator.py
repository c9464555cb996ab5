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
import random
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mlbert.core import native
from mlbert.core.errors import UserError
from mlbert.prepare.instances import (
    REMEDY,
    Document,
    InstanceOptions,
    create_instances,
    decoded_lines,
    masking_rule,
    read_documents,
    without_text,
)
from mlbert.prepare.wordpiece import UNKNOWN, WordPieceTokenizer
from mlbert.store.manifest import reading
from mlbert.store.ragged import DTYPES, Ragged, offsets_of, sizes_of

SOURCES = ("wordpiece.c", "instances.c")
BLOCK_BYTES = 4 << 20
MAX_REMEMBERED_BYTES = 256 << 20


class Generator(Protocol):
    """Text part -> documents -> rows."""

    name: str
    tokenizer: WordPieceTokenizer

    def read(self, path: Path) -> Any:
        """Documents of one text part. Raises UserError: the file cannot be read, is not UTF-8 (names the line), or
        holds no text."""

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
    """Documents as flat arrays; no sentence and no document is empty."""

    tokens: np.ndarray  # uint16 [T]
    sentences: np.ndarray  # int64 [S+1], sentence s holds tokens[sentences[s]:sentences[s+1]]
    documents: np.ndarray  # int64 [D+1], document d holds the sentences documents[d] to documents[d+1]-1

    def __len__(self) -> int:
        return len(self.documents) - 1

    @classmethod
    def from_lists(cls, documents: Sequence[Document]) -> FlatDocuments:
        """The same documents, flat."""
        sentences = [sentence for document in documents for sentence in document]
        tokens = np.asarray([token for sentence in sentences for token in sentence], np.uint16)
        return cls(tokens, offsets_of([*map(len, sentences)]), offsets_of([*map(len, documents)]))


def flat(documents: FlatDocuments | list[Document]) -> FlatDocuments:
    """What either generator read, as flat arrays."""
    return documents if isinstance(documents, FlatDocuments) else FlatDocuments.from_lists(documents)


class _Options(ctypes.Structure):
    """`struct options` of instances.c."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("masked_lm_prob", "short_seq_prob")),
        *((name, ctypes.c_int32) for name in ("max_seq_length", "max_predictions", "dupe_factor")),
        *((name, ctypes.c_int32) for name in ("mask_id", "cls_id", "sep_id", "vocab_size")),
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


def _addresses(*arrays: np.ndarray) -> list[int]:
    return [array.ctypes.data for array in arrays]


def _no_memory(what: str) -> UserError:
    return UserError("memory", f"there is not enough for {what}", "Use fewer --workers or smaller text parts")


class NativeGenerator:
    """The compiled generator. Raises mlbert.core.native.NativeUnavailable: it cannot be compiled or loaded here."""

    name = "native"

    def __init__(self, tokenizer: WordPieceTokenizer) -> None:
        self.tokenizer = tokenizer
        self._library = _library()
        # Words of ASCII can only match entries of ASCII; the others are Python's business.
        entries = [(entry.encode(), number) for entry, number in tokenizer.vocabulary.items() if entry.isascii()]
        joined = b"".join(entry for entry, _ in entries)
        offsets = offsets_of([len(entry) for entry, _ in entries])
        ids = np.asarray([number for _, number in entries], np.int32)
        options = (len(entries), tokenizer.vocabulary[UNKNOWN], int(tokenizer.lower_case))
        self._handle = self._library.wordpiece_new(joined, *_addresses(offsets, ids), *options)
        if not self._handle:
            raise _no_memory("the vocabulary")
        weakref.finalize(self, self._library.wordpiece_free, self._handle)

    def read(self, path: Path) -> FlatDocuments:
        """See `Generator.read`."""
        with reading(path, REMEDY):
            data = path.read_bytes()
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
        while begin < len(data) or begin == 0:  # an empty text has one empty block, its last
            end = data.find(b"\n", begin + block_bytes) + 1 or len(data)
            pending = library.wordpiece_scan(handle, data, begin, end)
            # ``pending`` chunks are not ASCII: Python says what they are before the block is appended.
            if pending < 0 or (pending and self._define(data, pending, path)):
                raise _no_memory(f"the text of {path}")
            if library.wordpiece_append(handle, int(end == len(data)), counts.ctypes.data):
                raise _no_memory(f"the text of {path}")
            if library.wordpiece_remembered_bytes(handle) > MAX_REMEMBERED_BYTES:
                library.wordpiece_forget(handle)
            begin = max(end, 1)
        num_tokens, *num_rows = counts.tolist()
        offsets: list[np.ndarray] = [np.empty(num + 1, np.int64) for num in num_rows]  # of sentences, of documents
        arrays = (np.empty(num_tokens, np.uint16), *offsets)
        library.wordpiece_take(handle, *_addresses(*arrays))
        library.wordpiece_reset(handle)  # its chunks point into ``data``
        return FlatDocuments(*arrays)

    def _define(self, data: bytes, pending: int, path: Path) -> int:
        """Work out the chunks that are not ASCII, each for itself."""
        begins, lengths = np.empty(pending, np.int64), np.empty(pending, np.int64)
        self._library.wordpiece_pending(self._handle, *_addresses(begins, lengths))
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
        arrays = (np.asarray(ids, np.uint16), offsets_of(counts), np.asarray(blank, np.uint8))
        return int(self._library.wordpiece_define(self._handle, *_addresses(*arrays)))

    def rows(self, documents: FlatDocuments, options: InstanceOptions) -> Ragged:
        """See `Generator.rows`."""
        settings = _Options(
            **asdict(masking_rule(self.tokenizer.vocabulary, options)),
            short_seq_prob=options.short_seq_prob,
            max_seq_length=options.max_seq_length,
            dupe_factor=options.dupe_factor,
        )
        tokens = documents.tokens
        assert tokens.dtype == np.uint16, "16-bit tokens expected"
        assert not np.any((tokens == settings.cls_id) | (tokens == settings.sep_id)), "text gives no special tokens"
        state = np.asarray(random.Random(options.random_seed).getstate()[1], np.uint32)
        counts = np.zeros(3, np.int64)
        handle = self._library.instances_make(
            *_addresses(tokens, documents.sentences, documents.documents),
            len(documents),
            ctypes.addressof(settings),
            *_addresses(state, counts),
        )
        if not handle:
            raise _no_memory("the instances of a text part")
        sizes = sizes_of(*counts.tolist())  # the order is that of the arguments of instances_take, too
        try:
            arrays = {name: np.empty(size, DTYPES[name]) for name, size in sizes.items()}
            self._library.instances_take(handle, *_addresses(*arrays.values()))
        finally:
            self._library.instances_free(handle)
        return Ragged(**arrays)


def make_generator(vocabulary: dict[str, int], lower_case: bool = True) -> Generator:
    """The native generator, or the plain one where nothing can be compiled; `native.status` says why."""
    tokenizer = WordPieceTokenizer(vocabulary, lower_case)
    try:
        return NativeGenerator(tokenizer)
    except native.NativeUnavailable:
        return PlainGenerator(tokenizer)
