"""Token ids of the texts in MDS sets; each shard is tokenized once and cached.

A set has a column ``text`` (str), or ``tokens`` or ``input_ids`` (`mlbert.data.formats.mds_tokens`)
if it was tokenized when it was written. Padding at the end of ``input_ids`` is dropped.
Token sets of `mlbert.data.prepare` record their vocabulary, and are read with no other one.

Arrays of ids are read where they are stored (`mlbert.data.formats.mds_arrays`). Of a set with texts
or with ids as ``bytes``, tokens of shard F are in ``tokens-<tokenizer>/<F's name>.ids`` in
`MdsReader.cache`: the folder to which a set elsewhere is copied, or a folder in the user's cache,
named by the index of a set that is read in place. Little-endian:

==================  =====================================================================
magic               8 bytes
identity            32 bytes, SHA-256 of the set's index, name and state of the shard,
                    and the tokenizer
n, T, checksum      int64 each; the checksum is the CRC-32 of the rest
offsets             int64 [n+1], text i has tokens[offsets[i]:offsets[i+1]]
tokens              uint16 [T], or uint32 if the tokenizer has more than 65,536 ids
==================  =====================================================================

Processes share these files: a file is renamed to its final name when it is complete, only one
process at a time makes it, and a file that does not match its head is made again. If the folder is
not writable, tokens are kept in memory.

Legend: n texts of a shard, T tokens, F shards.
"""

from __future__ import annotations

import bisect
import hashlib
import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from mlbert.data.formats.cache_limit import TOKENS_SUFFIX, CacheLimit, disk_bytes, touch
from mlbert.data.formats.file_map import FileMap
from mlbert.data.formats.mds import UINT32, MdsReader
from mlbert.data.formats.mds_arrays import StoredTokens, stored_tokens
from mlbert.data.formats.mds_files import INT, STR, locked, other_disk
from mlbert.data.formats.mds_tokens import Decoder, decoder_of, holds_tokens
from mlbert.data.formats.ragged import offsets_of
from mlbert.data.formats.streams import Stream, samples_of_epoch
from mlbert.data.formats.tokenizer import Tokenizer
from mlbert.data.formats.tokenizer_files import vocabulary_text
from mlbert.data.formats.vocabulary_checks import unknown_share
from mlbert.host.errors import UserError
from mlbert.host.files import local_path, write_atomically

TEXT = "text"
TOKENS = "tokens"
INPUT_IDS = "input_ids"
_MASKED = "masked_lm_positions"  # a column of sets of masked samples, which also have input_ids
_FIRST_SAMPLES = 16  # of a shard, which decide on the width of token ids
_MAGICS = {2: b"MLBERTI1", 4: b"MLBERTI4"}  # by the bytes of a token id
_HEAD = struct.Struct("<8s32sqqq")
_MOST_MEMORY = 4 << 30  # bytes of shards that cannot be stored in files
_MOST_LOOSE = 16_384  # texts
_INT64 = np.dtype("<i8")


@dataclass(frozen=True)
class TextInfo:
    """Facts about a set of texts that are known before a text is read."""

    identity: str  # "sha256:...", of the set's index and the tokenizer
    num_texts: int  # of an epoch


@dataclass(frozen=True)
class TokenShard:
    """The texts of one shard."""

    tokens: np.ndarray  # uint16 or uint32 [T]
    offsets: np.ndarray  # int64 [n+1]

    def text(self, place: int) -> np.ndarray:
        """Return the tokens of one text."""
        return self.tokens[self.offsets[place] : self.offsets[place + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n], tokens of each text."""
        return np.diff(self.offsets)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return self.tokens.nbytes + self.offsets.nbytes


ShardTokens = TokenShard | StoredTokens


def open_texts(streams: Sequence[Stream], tokenizer: Tokenizer) -> list[MdsReader]:
    """Open each set in its folder, or at its path or URL, with shards copied to the folder on
    demand. Reads only the indices. Raises UserError if there is no set, one has no text column, not
    all have the same one, or one has tokens of another vocabulary than the tokenizer's.
    """
    readers: list[MdsReader] = []
    for stream in streams:
        is_in_place = stream.remote is None or local_path(stream.remote) == stream.folder
        readers.append(
            MdsReader(stream.folder) if is_in_place else MdsReader(stream.name, stream.folder)
        )
        if column_of(readers[-1]) != (column := column_of(readers[0])) or column is None:
            found = ", ".join(
                f"{name} ({encoding})" for name, encoding in readers[-1].columns.items()
            )
            remedy = (
                f"Give a set with a column {TEXT} (str), "
                f"or {TOKENS} or {INPUT_IDS} (bytes or ndarray)"
                if column is None
                else f"Give sets that all have a column {column}"
            )
            raise UserError("data.columns", stream.name, f"has the columns {found}", remedy)
        _check_vocabulary(readers[-1], stream.name, tokenizer)
    return readers


def _check_vocabulary(reader: MdsReader, name: str, tokenizer: Tokenizer) -> None:
    """Raise UserError if the set records another vocabulary than the tokenizer's."""
    recorded = reader.vocabulary_sha256
    own = vocabulary_sha256(tokenizer)
    if recorded not in (None, own) and column_of(reader) != TEXT:
        reason = (
            f"has tokens from a different vocabulary than {tokenizer.name} (sha256 {own[:12]}...)"
        )
        remedy = (
            "Give the tokenizer that the set was written with, whose vocabulary has the sha256 "
            f"{recorded[:12]}..., or write the set again with this one"
        )
        raise UserError("vocabulary.mismatch", name, reason, remedy)


def vocabulary_sha256(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 that token sets record: that of a vocab.txt with these entries, or of a
    tokenizer that is more than its entries.
    """
    if not tokenizer.is_plain:
        return tokenizer.sha256
    return hashlib.sha256(vocabulary_text(tokenizer.vocabulary).encode()).hexdigest()


def whole_text_columns(dtype: np.dtype) -> dict[str, str]:
    """Return name and encoding of the columns of a set of ids (uint16 or uint32) of whole texts, as
    the pre-training of ModernBERT's research repository reads them.
    """
    return {"id": STR, INPUT_IDS: f"ndarray:{dtype.name}", "len": INT}


def whole_text_row(ids: np.ndarray) -> dict[str, Any]:
    """Return the values of these columns for the ids of one text, [T]."""
    return {"id": xxhash.xxh3_64_hexdigest(ids.tobytes()), INPUT_IDS: ids, "len": len(ids)}


def describe_text(streams: Sequence[Stream], tokenizer: Tokenizer) -> TextInfo:
    """Read only the indices, copying them to local folders if needed.

    Raises UserError if one is missing or lists no texts.
    """
    readers = open_texts(streams, tokenizer)
    sets = [
        f"{reader.identity}{stream.weight or ''}"
        for reader, stream in zip(readers, streams, strict=True)
    ]
    digest = hashlib.sha256("\0".join([*sets, tokenizer.identity]).encode()).hexdigest()
    return TextInfo(
        f"sha256:{digest}",
        sum(samples_of_epoch(streams, [len(reader) for reader in readers], seed=0)),
    )


def column_of(reader: MdsReader) -> str | None:
    """Return the column with a sample's text or tokens, or None."""
    if reader.columns.get(TEXT) == STR:
        return TEXT
    if _MASKED in reader.columns:
        return None
    for name in (TOKENS, INPUT_IDS):
        if holds_tokens(reader.columns.get(name)):
            return name
    return None


class TokenShards:
    """The tokens of one or more sets, shard by shard. Thread-safe.

    Args:
        readers: the opened sets, with texts in the same column.
        tokenizer: tokenizes texts, and defines the valid ids of tokens.
        warn: called with one line if tokens can be kept only in memory.
        most_bytes: of the files in the sets' caches; None for no limit.

    Attributes:
        is_text: True if the set has texts, False if it has tokens,
            which are already cut and have special tokens.
        first: int64 [F+1], number of each shard's first text, and the number of all texts.
    """

    def __init__(
        self,
        readers: Sequence[MdsReader],
        tokenizer: Tokenizer,
        warn: Callable[[str], None] = lambda line: None,
        most_bytes: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._dtype = tokenizer.dtype
        self._warn = warn
        self._has_warned = False
        column = column_of(readers[0])
        assert column is not None, "open_texts checks the columns"
        self._column = column
        self.is_text = column == TEXT
        self._pad_id = tokenizer.pad_id if column == INPUT_IDS else None
        self.first = offsets_of(np.concatenate([reader.shard_sizes for reader in readers]))
        self._readers = readers
        # The number of each set's first text, and of its first shard.
        self._first_text = offsets_of([len(reader) for reader in readers]).tolist()
        self._first_shard = offsets_of([len(reader.shards) for reader in readers]).tolist()
        self._folder = f"tokens-{hashlib.sha256(tokenizer.identity.encode()).hexdigest()[:16]}"
        self._decoders: dict[int, Decoder] = {}  # of the token ids of each shard
        self._per_thread = threading.local()
        self._shards: OrderedDict[int, ShardTokens] = OrderedDict()
        self._limit: CacheLimit | None = None
        if most_bytes is not None:
            caches = [(reader.cache, reader.shards.has_name) for reader in readers]
            self._limit = CacheLimit(most_bytes, caches, warn)
            for reader in readers:
                reader.limit_cache(self._limit)
        # Bytes of shards that are only in memory, oldest first.
        self._in_memory: dict[int, int] = {}
        self._memory_lock = threading.Lock()
        self._decoded_shards: set[int] = set()  # of arrays that are decoded one by one
        # Tokens of texts whose shard did not exist yet.
        self._loose: OrderedDict[int, np.ndarray] = OrderedDict()
        self._loose_lock = threading.Lock()

    def _place(self, number: int) -> tuple[MdsReader, int, int]:
        """Return the set of a shard, its number in the set, and the number of the set's first
        text.
        """
        of = bisect.bisect_right(self._first_shard, number) - 1
        return self._readers[of], number - self._first_shard[of], self._first_text[of]

    def shards_of(self, texts: np.ndarray) -> np.ndarray:
        """Return the shards (int64 [k]) of texts (int [k])."""
        return np.searchsorted(self.first, texts, side="right") - 1

    def ready(self, number: int) -> ShardTokens | None:
        """Return shard ``number`` if any process has made it, otherwise None."""
        found = self._known(number)
        if found is not None:
            return found
        reader, place, _ = self._place(number)
        if reader.is_open(place):
            found = self._stored(number)
        if found is None:
            found = self._kept(number)
            if found is not None:
                self._keep(number, found)
        return found

    def check_ids(self, texts: np.ndarray, tokens: np.ndarray) -> None:
        """Check ``tokens`` (int [T]) of ``texts`` (int [k]) that were read where they are stored.

        Raises UserError, naming the text, if one is no entry of the vocabulary.
        """
        if not len(tokens):
            return
        is_inside = int(tokens.max()) < self._tokenizer.vocab_size
        if not is_inside or (tokens.dtype.kind == "i" and int(tokens.min()) < 0):
            self._encode(texts.tolist())  # raises the error

    def loose(self, texts: Sequence[int]) -> list[np.ndarray]:
        """Return the tokens of each of ``texts`` without tokenizing their shards; the
        latest are cached. Raises UserError if their shards cannot be read or fetched.
        """
        with self._loose_lock:
            found = {text: self._loose[text] for text in texts if text in self._loose}
        missing = [text for text in dict.fromkeys(texts) if text not in found]
        if missing:
            made = self._encode(missing)
            found |= zip(missing, np.split(made.tokens, made.offsets[1:-1]), strict=True)
        with self._loose_lock:
            self._loose |= found
            while len(self._loose) > max(_MOST_LOOSE, len(found)):
                self._loose.popitem(last=False)
        return [found[text] for text in texts]

    def shard(self, number: int) -> ShardTokens:
        """Return shard ``number``, making it if necessary.

        Raises UserError if it cannot be read or fetched.
        """
        found = self._known(number) or self._open(number, wait=True)
        assert found is not None, "with wait=True there is always a result"
        return found

    def prepare(self, number: int) -> bool:
        """Make shard ``number`` unless it exists.

        Return False immediately if another process or thread is making it.
        Raises UserError as `shard`.
        """
        return number in self._shards or self._open(number, wait=False) is not None

    def _stored(self, number: int) -> StoredTokens | None:
        """Return a shard's tokens as they are stored; None if they are not arrays, or damaged."""
        if self.is_text or number in self._decoded_shards:
            return None
        reader, place, _ = self._place(number)
        found = stored_tokens(reader, place, self._column, self._pad_id)
        if found is None:
            self._decoded_shards.add(number)
        else:
            self._remember(number, found)
        return found

    def _open(self, number: int, wait: bool) -> ShardTokens | None:
        found = self.ready(number) or self._stored(number) or self._make(number, wait)
        if found is not None:
            self._keep(number, found)
        return found

    def _known(self, number: int) -> ShardTokens | None:
        """Return a shard that this process has opened."""
        if self._limit is not None:
            with self._memory_lock:
                if number in self._shards:
                    self._shards.move_to_end(number)
        return self._shards.get(number)

    def _keep(self, number: int, found: ShardTokens) -> None:
        """Keep a shard open, in place of those not used for longest if there is a limit."""
        limit = self._limit
        if limit is None:
            self._shards[number] = found
            return
        with self._memory_lock:
            is_new = number not in self._shards
            self._shards[number] = found
            self._shards.move_to_end(number)
            size = sum(disk_bytes(shard.num_bytes) for shard in self._shards.values())
            while size > limit.open_bytes and len(self._shards) > 1:
                oldest, closed = self._shards.popitem(last=False)
                self._in_memory.pop(oldest, None)
                size -= disk_bytes(closed.num_bytes)
        if is_new:
            touch(self._path(number))
            limit.trim()

    def _make(self, number: int, wait: bool) -> TokenShard | None:
        """Make a shard, or return None if another process or thread is making it
        and ``wait`` is False.
        """
        path = self._path(number)
        made = None
        try:
            with locked(path, wait) as is_mine:
                if not is_mine:
                    return None
                if (found := self._kept(number)) is not None:  # another one made it in the meantime
                    return found
                made = self._tokenized(number)
                body = (
                    made.offsets.astype(_INT64).tobytes()
                    + made.tokens.astype(self._dtype).tobytes()
                )
                num_texts = len(made.offsets) - 1
                num_tokens = len(made.tokens)
                identity = self._identity(number)
                head = _HEAD.pack(self._magic, identity, num_texts, num_tokens, zlib.crc32(body))
                write_atomically(path, head + body)
                if (found := self._kept(number)) is not None:
                    return found
        except UserError as error:
            if error.code != "file.unwritable":
                raise
            self._warn_of_memory(path, error)
        made = made or self._tokenized(number)
        self._remember(number, made)
        return made

    def _warn_of_memory(self, path: Path, error: UserError) -> None:
        """Warn, once, that tokens are kept in memory because of ``error``."""
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"warning: {error.subject}: {error.problem}. "
                "Each process on this machine therefore keeps tokens in "
                "memory, and tokenizes texts again. Free some space there, "
                f"or {other_disk(path.parent)}."
            )

    def _remember(self, number: int, made: ShardTokens) -> None:
        """Keep a shard in memory, in place of the oldest ones if there are too many."""
        with self._memory_lock:
            self._shards[number] = made
            self._in_memory[number] = made.num_bytes
            while sum(self._in_memory.values()) > _MOST_MEMORY and len(self._in_memory) > 1:
                oldest = next(iter(self._in_memory))
                del self._in_memory[oldest]
                self._shards.pop(oldest, None)

    @property
    def _magic(self) -> bytes:
        return _MAGICS[self._dtype.itemsize]

    def _name(self, number: int) -> str:
        reader, place, _ = self._place(number)
        return reader.shards[place].raw.name

    def _path(self, number: int) -> Path:
        return self._place(number)[0].cache / self._folder / f"{self._name(number)}{TOKENS_SUFFIX}"

    def _identity(self, number: int) -> bytes:
        reader, place, _ = self._place(number)
        parts = (
            reader.identity,
            self._name(number),
            *map(str, reader.state_of(place)),
            self._tokenizer.identity,
        )
        return hashlib.sha256("\0".join(parts).encode()).digest()

    def _kept(self, number: int) -> TokenShard | None:
        """Return a shard from its file, or None if the file is missing or damaged."""
        path = self._path(number)
        try:
            if path.stat().st_size < _HEAD.size:
                return None
            files = FileMap([path])
        except (OSError, UserError):
            return None
        content = files.bytes[: files.ends[0]]
        magic, identity, texts, tokens, checksum = _HEAD.unpack(content[: _HEAD.size].tobytes())
        middle = _HEAD.size + (texts + 1) * _INT64.itemsize
        expected = self._magic, self._identity(number), self.first[number + 1] - self.first[number]
        if (magic, identity, texts) != expected:
            return None
        if (
            len(content) != middle + tokens * self._dtype.itemsize
            or zlib.crc32(content[_HEAD.size :].data) != checksum
        ):
            return None
        ids = content[middle:].view(self._dtype)
        return TokenShard(ids, content[_HEAD.size : middle].view(_INT64))

    def _tokenized(self, number: int) -> TokenShard:
        found = self._at_once(number) if self.is_text else None
        found = found or self._encode(range(self.first[number], self.first[number + 1]))
        if self.is_text:
            unknown = self._tokenizer.unknown_id
            unknown_share(found.tokens, unknown, self._name(number), self._tokenizer.name)
        return found

    def _at_once(self, number: int) -> TokenShard | None:
        """Tokenize a shard without per-sample overhead; a sample is the size of a text and the
        text. Return None if there are other columns, or a sample is damaged; reading it
        individually raises the error.
        """
        reader, place, _ = self._place(number)
        if len(reader.columns) > 1:
            return None
        samples, starts = reader.shard_bytes(place)
        lengths = np.diff(starts) - UINT32.itemsize
        if (lengths < 0).any():
            return None
        sizes = samples[starts[:-1, None] + np.arange(UINT32.itemsize)].view(UINT32)[:, 0]
        if (sizes != lengths).any():
            return None
        try:
            return TokenShard(*self._tokenizer_of_thread().encode_records(samples, starts))
        except UnicodeDecodeError:
            return None

    def _encode(self, texts: Sequence[int]) -> TokenShard:
        """Return some texts in the form of a shard."""
        if not self.is_text:
            return self._ids(texts)
        values = [self._value(text) for text in texts]
        return TokenShard(*self._tokenizer_of_thread().encode_all(values))

    def _value(self, text: int) -> Any:
        """Return the text, or its tokens as stored."""
        reader, _, first = self._place(bisect.bisect_right(self.first, text) - 1)
        return reader[text - first][self._column]

    def _tokenizer_of_thread(self) -> Tokenizer:
        if not hasattr(self._per_thread, "tokenizer"):
            self._per_thread.tokenizer = self._tokenizer.clone()
        return self._per_thread.tokenizer

    def _ids(self, texts: Sequence[int]) -> TokenShard:
        """Return the stored tokens of some texts in the form of a shard."""
        found = []
        for text in texts:
            ids = self._stored_ids(text)
            if self._column == INPUT_IDS:
                last = np.flatnonzero(ids != self._pad_id).max(initial=-1)
                ids = ids[: last + 1]
            if not len(ids):
                raise self._wrong(text, "is only padding", "Write the set again")
            found.append(ids)
        ids = np.concatenate([np.empty(0, np.int64), *found])
        size = self._tokenizer.vocab_size
        offsets = offsets_of([len(ids) for ids in found])
        outside = np.flatnonzero((ids < 0) | (ids >= size))
        if len(outside):
            text = texts[int(np.searchsorted(offsets, outside[0], side="right")) - 1]
            reason = (
                f"has token {ids[outside[0]]}, but the vocabulary "
                f"of {self._tokenizer.name} has {size} entries"
            )
            raise self._wrong(text, reason, "Give the tokenizer that the set was written with")
        return TokenShard(ids.astype(self._dtype), offsets)

    def _stored_ids(self, text: int) -> np.ndarray:
        """Return the stored tokens of a text, int64. Raises UserError if they are damaged."""
        number = bisect.bisect_right(self.first, text) - 1
        decode = self._decoders.get(number)
        if decode is None:
            reader, _, _ = self._place(number)
            first, end = self.first[number : number + 2].tolist()
            values = [self._value(one) for one in range(first, min(end, first + _FIRST_SAMPLES))]
            decode = self._decoders[number] = decoder_of(reader.columns[self._column], values)
        try:
            return decode(self._value(text))
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            reason = f"has {self._column} that cannot be read: {error}"
            raise self._wrong(text, reason, "Write the set again") from None

    def _wrong(self, text: int, reason: str, remedy: str) -> UserError:
        number = int(self.shards_of(np.asarray(text)))
        place = text - int(self.first[number])
        return UserError("data.damaged", self._name(number), f"sample {place} {reason}", remedy)
