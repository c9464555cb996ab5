"""Python's side of csrc/cpu/wordpiece.c: lines of text to token ids, as `mlbert.data.formats.wordpiece` gives them.

Legend: T tokens, S sentences (lines that are not blank), D documents (what blank lines separate).
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlbert.data.formats.ragged import offsets_of
from mlbert.data.formats.wordpiece import UNKNOWN, WordPieceTokenizer
from mlbert.host import native
from mlbert.host.errors import UserError

BLOCK_BYTES = 4 << 20
MAX_REMEMBERED_BYTES = 256 << 20
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
}


@functools.cache
def _library() -> ctypes.CDLL:
    library = native.load("wordpiece", ("wordpiece.c",), openmp=False)
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = [_CODES[code] for code in arguments]
        function.restype = _CODES[result]
    return library


def addresses(*arrays: np.ndarray) -> list[int]:
    """Where the values of arrays lie, for C functions."""
    return [array.ctypes.data for array in arrays]


@dataclass(frozen=True)
class Parsed:
    """Documents as flat arrays; no sentence and no document is empty."""

    tokens: np.ndarray  # uint16 [T]
    sentences: np.ndarray  # int64 [S+1], sentence s holds tokens[sentences[s]:sentences[s+1]]
    documents: np.ndarray  # int64 [D+1], document d holds the sentences documents[d] to documents[d+1]-1


class NativeWordPiece:
    """A tokenizer, compiled; for one thread at a time. Raises mlbert.host.native.NativeUnavailable: it cannot be
    compiled or loaded here."""

    def __init__(self, tokenizer: WordPieceTokenizer) -> None:
        self._tokenizer, self._library = tokenizer, _library()
        # Words of ASCII can only match entries of ASCII; the others are Python's business.
        entries = [(entry.encode(), number) for entry, number in tokenizer.vocabulary.items() if entry.isascii()]
        joined = b"".join(entry for entry, _ in entries)
        offsets = offsets_of([len(entry) for entry, _ in entries])
        ids = np.asarray([number for _, number in entries], np.int32)
        options = (len(entries), tokenizer.vocabulary[UNKNOWN], int(tokenizer.lower_case))
        self._handle = self._library.wordpiece_new(joined, *addresses(offsets, ids), *options)
        if not self._handle:
            raise no_memory("the vocabulary")
        weakref.finalize(self, self._library.wordpiece_free, self._handle)

    def parse(self, data: bytes, name: str, block_bytes: int = BLOCK_BYTES) -> Parsed:
        """Documents of a text in UTF-8 without carriage returns; ``name`` is for messages. Works block by block of
        whole lines. Raises UnicodeDecodeError: it is not UTF-8."""
        library, handle = self._library, self._handle
        library.wordpiece_reset(handle)
        counts = np.zeros(3, np.int64)
        begin = 0
        while begin < len(data) or begin == 0:  # an empty text has one empty block, its last
            end = data.find(b"\n", begin + block_bytes) + 1 or len(data)
            pending = library.wordpiece_scan(handle, data, begin, end)
            # ``pending`` chunks are not ASCII: Python says what they are before the block is appended.
            if pending < 0 or (pending and self._define(data, pending)):
                raise no_memory(f"the text of {name}")
            if library.wordpiece_append(handle, int(end == len(data)), counts.ctypes.data):
                raise no_memory(f"the text of {name}")
            if library.wordpiece_remembered_bytes(handle) > MAX_REMEMBERED_BYTES:
                library.wordpiece_forget(handle)
            begin = max(end, 1)
        num_tokens, *num_rows = counts.tolist()
        offsets: list[np.ndarray] = [np.empty(num + 1, np.int64) for num in num_rows]  # of sentences, of documents
        arrays = (np.empty(num_tokens, np.uint16), *offsets)
        library.wordpiece_take(handle, *addresses(*arrays))
        library.wordpiece_reset(handle)  # its chunks point into ``data``
        return Parsed(*arrays)

    def _define(self, data: bytes, pending: int) -> int:
        """Work out the chunks that are not ASCII, each for itself."""
        begins, lengths = np.empty(pending, np.int64), np.empty(pending, np.int64)
        self._library.wordpiece_pending(self._handle, *addresses(begins, lengths))
        ids: list[int] = []
        counts: list[int] = []
        blank: list[bool] = []
        for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True):
            chunk = data[begin : begin + length].decode("utf-8")
            tokens = self._tokenizer.encode(chunk)
            ids += tokens
            counts.append(len(tokens))
            blank.append(not chunk.strip())
        arrays = (np.asarray(ids, np.uint16), offsets_of(counts), np.asarray(blank, np.uint8))
        return int(self._library.wordpiece_define(self._handle, *addresses(*arrays)))


def no_memory(what: str) -> UserError:
    """There is too little for this."""
    return UserError(
        "machine.memory", "memory", f"there is not enough for {what}", "Use fewer --workers or smaller text parts"
    )
