"""The instance generator that prepared sets use: text part in, rows out.

`NativeGenerator` runs ``csrc/cpu/wordpiece.c`` and ``instances.c``. `PlainGenerator` is the Python
reference, built from `mlbert.data.formats.wordpiece` and `mlbert.data.prepare.instances`. Both
return the same rows for the same text, vocabulary and options. `make_generator` chooses the native
one if it can be compiled.

Legend: T tokens, S sentences, D documents.
"""

from __future__ import annotations

import ctypes
import io
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mlbert.data.formats.manifest import reading
from mlbert.data.formats.ragged import DTYPES, Ragged, sizes_of
from mlbert.data.formats.wordpiece import (
    FlatDocuments,
    NativeWordPiece,
    WordPieceTokenizer,
    addresses,
    no_memory,
)
from mlbert.data.prepare import instances
from mlbert.host import native

_FUNCTIONS = {  # of csrc/cpu/instances.c, see `mlbert.host.native.load`
    "instances_make": "ppplppp:p",
    "instances_take": "pppppppp:v",
    "instances_free": "p:v",
}


class Generator(Protocol):
    """Converts a text part to documents, and documents to rows."""

    name: str
    tokenizer: WordPieceTokenizer

    def read(self, path: Path) -> Any:
        """Return the documents of one text part.

        Raises UserError: the file cannot be read, is not UTF-8 (names the line), or holds no text.
        """

    def rows(self, documents: Any, options: instances.InstanceOptions) -> Ragged:
        """Return all instances of the documents in the benchmark's order.

        Does not change the documents.
        """


class PlainGenerator:
    """The reference in pure Python."""

    name = "plain"

    def __init__(self, tokenizer: WordPieceTokenizer) -> None:
        self.tokenizer = tokenizer

    def read(self, path: Path) -> list[instances.Document]:
        """See `Generator.read`."""
        return instances.read_documents(path, self.tokenizer)

    def rows(
        self, documents: list[instances.Document], options: instances.InstanceOptions
    ) -> Ragged:
        """See `Generator.rows`."""
        return Ragged.from_rows(
            instances.create_instances(list(documents), self.tokenizer, options)
        )


def flat(documents: FlatDocuments | list[instances.Document]) -> FlatDocuments:
    """Return the documents of either generator as flat arrays."""
    return (
        documents if isinstance(documents, FlatDocuments) else FlatDocuments.from_lists(documents)
    )


class _Options(ctypes.Structure):
    """`struct options` of instances.c."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("masked_lm_prob", "short_seq_prob")),
        *((name, ctypes.c_int32) for name in ("max_seq_length", "max_predictions", "dupe_factor")),
        *((name, ctypes.c_int32) for name in ("mask_id", "cls_id", "sep_id", "vocab_size")),
    )


class NativeGenerator:
    """The compiled generator.

    Raises mlbert.host.native.NativeUnavailable: it cannot be compiled or loaded here.
    """

    name = "native"

    def __init__(self, tokenizer: WordPieceTokenizer) -> None:
        self.tokenizer = tokenizer
        self._library = native.load("instances", ("instances.c",), _FUNCTIONS, openmp=False)
        self._words = NativeWordPiece(tokenizer)

    def read(self, path: Path) -> FlatDocuments:
        """See `Generator.read`."""
        with reading(path, instances.REMEDY):
            data = path.read_bytes()
        documents = self.parse(data, path)
        if not len(documents):
            raise instances.without_text(path)
        return documents

    def parse(self, data: bytes, path: Path) -> FlatDocuments:
        """Return the documents of a text in memory; errors name ``path``."""
        try:
            return self._words.parse(data.replace(b"\r", b""), str(path))  # as `decoded_lines`
        except UnicodeDecodeError:
            for _ in instances.decoded_lines(path, io.BytesIO(data)):
                pass  # raises an error that names the line
            raise AssertionError("a chunk is not UTF-8, but every line is") from None

    def rows(self, documents: FlatDocuments, options: instances.InstanceOptions) -> Ragged:
        """See `Generator.rows`."""
        settings = _Options(
            **asdict(instances.masking_rule(self.tokenizer.vocabulary, options)),
            short_seq_prob=options.short_seq_prob,
            max_seq_length=options.max_seq_length,
            dupe_factor=options.dupe_factor,
        )
        tokens = documents.tokens
        assert tokens.dtype == np.uint16, "16-bit tokens expected"
        assert not np.any((tokens == settings.cls_id) | (tokens == settings.sep_id)), (
            "special tokens in the text"
        )
        state = np.asarray(random.Random(options.random_seed).getstate()[1], np.uint32)
        counts = np.zeros(3, np.int64)
        handle = self._library.instances_make(
            *addresses(tokens, documents.sentences, documents.documents),
            len(documents),
            ctypes.addressof(settings),
            *addresses(state, counts),
        )
        if not handle:
            raise no_memory("the instances of a text part")
        sizes = sizes_of(*counts.tolist())  # in the order of the arguments of instances_take
        try:
            arrays = {name: np.empty(size, DTYPES[name]) for name, size in sizes.items()}
            self._library.instances_take(handle, *addresses(*arrays.values()))
        finally:
            self._library.instances_free(handle)
        return Ragged(**arrays)


def make_generator(vocabulary: dict[str, int], lower_case: bool = True) -> Generator:
    """Return the native generator, or the plain one if it cannot be compiled;
    `native.status` gives the reason.
    """
    tokenizer = WordPieceTokenizer(vocabulary, lower_case)
    try:
        return NativeGenerator(tokenizer)
    except native.NativeUnavailable:
        return PlainGenerator(tokenizer)
