"""The index of an MDS set: index.json, which lists the shards.

A set of 100 TB has millions of shards, and an index of more than a gigabyte. So the index is
mapped into memory, and its entries are checked one after the other. Only the place of each entry,
its number of samples and a hash of its name remain in memory: 32 bytes a shard. An entry is parsed
again when its shard is used. For large indexes these arrays are kept in the user's cache folder,
where the processes of a machine share them.

Legend: F shards.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xxhash

from mlbert.data.formats.file_map import FileMap
from mlbert.data.formats.index_cache import IndexCache
from mlbert.data.formats.mds_files import FORMAT, RESTORE, VERSION, ShardInfo
from mlbert.host.errors import UserError
from mlbert.host.files import open_plain, reading
from mlbert.host.json_files import parse_json
from mlbert.host.json_stream import Item, parse_long_object
from mlbert.host.schema import Count, Document, Sha256, parse_model

_Model = TypeVar("_Model", bound=Document)
_SHARDS = "shards"
_CACHED_BYTES = 1 << 24  # a smaller index is checked in less than a second
_VERSION = 1  # of the arrays in the cache
_KEPT_ENTRIES = 1024  # parsed ones: loaders ask for the same few shards again and again
_ARRAYS = ("edges", "num_samples", "names", "rest", "sha256")


class _ShardFormat(Document):
    format: str
    version: int


class _Formats(Document):
    shards: list[_ShardFormat]


class _Index(Document):
    shards: list[ShardInfo]
    vocabulary_sha256: Sha256 | None = None


class Column(NamedTuple):
    """A column of every sample."""

    name: str
    encoding: str
    size: Count | None  # bytes of every value; None if it varies


class ShardTable:
    """The entries of an index, each parsed when it is asked for. Thread-safe.

    Args:
        content: uint8 [B], the text of the index.
        edges: int64 [F, 2], first byte of each entry, and one past its last.
        names: uint64 [F], sorted hashes of the names of the uncompressed shards.
    """

    def __init__(self, content: np.ndarray, edges: np.ndarray, names: np.ndarray) -> None:
        self._content = content
        self._edges = edges
        self._names = names
        self._entry = lru_cache(_KEPT_ENTRIES)(self._parse)

    def __len__(self) -> int:
        """Return the number of shards (F)."""
        return len(self._edges)

    def __getitem__(self, number: int) -> ShardInfo:
        """Return the entry of shard ``number``, 0 to F - 1. Raises IndexError."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        return self._entry(number)

    def __iter__(self) -> Iterator[ShardInfo]:
        """Return an iterator over all entries."""
        return map(self._parse, range(len(self)))

    def _parse(self, number: int) -> ShardInfo:
        start, end = self._edges[number].tolist()
        return ShardInfo.model_validate(parse_json(self._content[start:end].tobytes()))

    def has_name(self, name: str) -> bool:
        """Return True if an uncompressed shard has this name (compared by 64-bit hashes)."""
        wanted = _name_hash(name)
        place = int(np.searchsorted(self._names, wanted))
        return place < len(self._names) and bool(self._names[place] == wanted)


class MdsIndex(NamedTuple):
    """The contents of index.json."""

    columns: list[Column]  # in the order in a sample
    shards: ShardTable
    num_samples: np.ndarray  # int64 [F], of each shard
    identity: str  # SHA-256 of the file
    vocabulary_sha256: str | None  # of the vocabulary of a set of tokens, if the set records it


def open_index(path: Path, subject: Path | str | None = None) -> MdsIndex:
    """Map an index.json and check all of it.

    ``subject`` is the name of the file for messages, if it is a copy. The file must not shrink
    while the index is in use; replacing it is harmless.

    Raises UserError if it cannot be read, or is not the consistent index of an MDS set of version
    2.
    """
    subject = path if subject is None else subject
    with reading(path, RESTORE), open_plain(path):
        files = FileMap([path])
    content = files.bytes[: files.ends[0]]

    def make() -> Mapping[str, np.ndarray]:
        return _checked(content, subject)

    def index(**arrays: np.ndarray) -> MdsIndex:
        return _index(content, **arrays)

    if len(content) < _CACHED_BYTES:
        return index(**make())
    return IndexCache("mds-index", [path], [_VERSION]).once(index, _ARRAYS, make)


def _index(
    content: np.ndarray,
    edges: np.ndarray,
    num_samples: np.ndarray,
    names: np.ndarray,
    rest: np.ndarray,
    sha256: np.ndarray,
) -> MdsIndex:
    shards = ShardTable(content, edges, names)
    columns = [Column(*column) for column in zip(*_layout(shards[0]), strict=True)]
    members = json.loads(rest.tobytes())
    return MdsIndex(
        columns,
        shards,
        num_samples,
        sha256.tobytes().hex(),
        members.get("vocabulary_sha256"),
    )


def _checked(content: np.ndarray, subject: Path | str) -> dict[str, np.ndarray]:
    """Return the arrays of `_index`. Raises UserError as `open_index`."""
    checks = _Checks(subject)
    try:
        rest = parse_long_object(content, _SHARDS, checks.add)
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError("file.json", subject, f"is not JSON ({error})", RESTORE) from None
    if not isinstance(rest, dict):
        raise UserError("file.json", subject, "is not a JSON object", RESTORE)
    parse_model(_Index, rest, subject, RESTORE)
    if not checks.edges:
        raise UserError("data.empty", subject, "lists no shard", RESTORE)
    edges = np.array(checks.edges, np.int64).reshape(-1, 2)
    _check_names(content, edges, checks.all_hashes, subject)
    return {
        "edges": edges,
        "num_samples": np.array(checks.num_samples, np.int64),
        "names": np.sort(np.array(checks.hashes, np.uint64)),
        "rest": np.frombuffer(json.dumps(rest).encode(), np.uint8),
        "sha256": np.frombuffer(hashlib.sha256(content.data).digest(), np.uint8),
    }


class _Checks:
    """Checks each entry of an index, and collects what remains of it."""

    def __init__(self, subject: Path | str) -> None:
        self.edges = array("q")  # first byte, and one past the last, of each entry
        self.num_samples = array("q")
        self.hashes = array("Q")  # of the names of uncompressed shards
        self.all_hashes = array("Q")  # of the names of all files
        self._subject = subject
        self._layout: tuple[list[str], list[str], list[int | None]] | None = None

    def add(self, item: Item) -> None:
        """Check the next entry. Raises UserError."""
        number = len(self.num_samples)
        self._check_format(item.value, number)
        shard = _entry(_Index, item.value, number, self._subject).shards[0]
        self._check_layout(shard)
        self._check_compression(shard)
        self.edges.extend((item.start, item.end))
        self.num_samples.append(shard.num_samples)
        self.hashes.append(_name_hash(shard.raw.name))
        self.all_hashes.extend(_name_hash(name) for name in _names(shard))

    def _check_format(self, value: Any, number: int) -> None:
        found = _entry(_Formats, value, number, self._subject).shards[0]
        if (found.format, found.version) != (FORMAT, VERSION):
            problem = (
                f"has shards of {found.format} version {found.version}; "
                f"{FORMAT} version {VERSION} is read"
            )
            raise UserError("data.format", self._subject, problem, "Write the set again")

    def _check_layout(self, shard: ShardInfo) -> None:
        layout = _layout(shard)
        if self._layout is None:
            self._layout = layout
            names = layout[0]
            has_repeats = len(set(names)) != len(names)
            if not names or has_repeats or len({len(part) for part in layout}) != 1:
                self._damaged("has columns that contradict each other")
        if layout != self._layout:
            raise UserError(
                "data.mixed",
                self._subject,
                "has shards with different columns",
                "Keep one set in a folder",
            )

    def _check_compression(self, shard: ShardInfo) -> None:
        compression = shard.compression or "zstd"
        if compression.partition(":")[0] != "zstd":
            remedy = "Write the set again with zstd, or decompress it with MosaicML Streaming"
            raise UserError(
                "data.format", self._subject, f"has shards compressed as {compression}", remedy
            )
        if bool(shard.compression) != bool(shard.zipped):
            self._damaged("has a compression without zip_data, or zip_data without it")

    def _damaged(self, problem: str) -> None:
        raise UserError("data.damaged", self._subject, problem, RESTORE)


def _entry(kind: type[_Model], value: Any, number: int, subject: Path | str) -> _Model:
    """Return the model of an object whose array of shards has one item, and call that item
    ``number`` in the message of the UserError.
    """
    try:
        return parse_model(kind, {_SHARDS: [value]}, subject, RESTORE)
    except UserError as error:
        problem = error.problem.replace(f"{_SHARDS}[0]", f"{_SHARDS}[{number}]", 1)
        raise UserError(error.code, subject, problem, error.remedy) from None


def _check_names(
    content: np.ndarray, edges: np.ndarray, hashes: array[int], subject: Path | str
) -> None:
    """Raise UserError if two files have the same name."""
    values, counts = np.unique(np.array(hashes, np.uint64), return_counts=True)
    suspects = set(values[counts > 1].tolist())
    if not suspects:
        return
    shards = ShardTable(content, edges, values)
    named = (name for shard in shards for name in _names(shard) if _name_hash(name) in suspects)
    if max(Counter(named).values()) > 1:
        raise UserError("data.damaged", subject, "lists a shard twice", RESTORE)


def _names(shard: ShardInfo) -> list[str]:
    return [file.name for file in (shard.raw, shard.zipped) if file]


def _name_hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())


def _layout(shard: ShardInfo) -> tuple[list[str], list[str], list[int | None]]:
    return shard.column_names, shard.column_encodings, shard.column_sizes
