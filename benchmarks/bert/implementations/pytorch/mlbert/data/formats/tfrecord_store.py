"""The benchmark's TFRecords as a `mlbert.data.formats.base.Store`: read directly, in any order.

Opening a folder for the first time reads it once, checks every record, and caches the records'
locations (`mlbert.data.formats.index_cache`). Checksums are checked again whenever a record is
read.

Legend: N records of all files, F files, S requested sequences.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlbert.data.formats.base import IndexedStore, StoreInfo
from mlbert.data.formats.file_map import FileMap
from mlbert.data.formats.index_cache import IndexCache, content_of
from mlbert.data.formats.manifest import json_sha256
from mlbert.data.formats.padded import MAX_ID, Widths
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.tfrecord import (
    RESTORE,
    ExampleReader,
    codec,
    find_files,
    named_files,
    problem_of,
    read_widths,
)
from mlbert.data.formats.tfrecord_plain import read_list
from mlbert.host.errors import UserError
from mlbert.host.files import open_plain, plain_size

_VERSION = 1  # of the cached index
_HDF5 = b"\x89HDF\r\n\x1a\n"  # first bytes of an HDF5 file
_THREADS = min(16, os.cpu_count() or 1)  # that check files at a time
# Arrays of `RecordIndex` with an entry for each record.
_PER_RECORD = ("starts", "sizes", "lengths")
_ARRAYS = ("widths", "counts", *_PER_RECORD)  # all arrays of `RecordIndex`, as cached


def accepts(folder: Path | str) -> bool:
    """Return True if the folder has files that are named like TFRecords and are not HDF5."""
    try:
        with open_plain(named_files(Path(folder))[0]) as file:
            return file.read(len(_HDF5)) != _HDF5
    except (UserError, OSError, IndexError):
        return False


def describe(folder: Path | str, most: Widths | None = None) -> StoreInfo:
    """Describe a folder of TFRecords from file names and sizes, its list if it has one,
    and the first record's widths.

    With ``most``, no record is read: the widths come from the list, and without a list they are
    ``most``. Raises UserError if there are no such files, not those listed, or the first is not
    TFRecords.
    """
    folder = Path(folder)
    files = find_files(folder)
    listed = read_list(folder)
    if most is None:
        most = read_widths(files[0], skip_bad=True)  # bad records are reported when the set is read
    elif listed:
        listed.check_sizes(files)
        most = Widths(listed.max_seq_length, listed.max_predictions)
    return StoreInfo(
        folder=folder,
        kind="tfrecord",
        identity=json_sha256([(file.name, plain_size(file)) for file in files]),
        max_seq_length=most.max_seq_length,
        max_predictions=most.max_predictions,
        num_sequences=listed.num_sequences if listed else None,
        vocab_size=listed.vocab_size if listed else None,
        vocabulary_sha256=listed.vocabulary_sha256 if listed else None,
        lower_case=listed.lower_case if listed else None,
        is_listed=False,
        content=content_of(folder, files),
    )


@dataclass(frozen=True)
class RecordIndex:
    """Locations of the records of some files. Raises ValueError if the arrays are inconsistent."""

    widths: np.ndarray  # int64 [2], tokens and predictions of every record
    counts: np.ndarray  # int64 [F], records of each file
    starts: np.ndarray  # int64 [N], first byte in its file
    sizes: np.ndarray  # uint32 [N], bytes
    lengths: np.ndarray  # uint16 [N], tokens

    def __post_init__(self) -> None:
        if {len(self.starts), len(self.sizes), len(self.lengths)} != {int(self.counts.sum())}:
            raise ValueError("arrays of different sets")


class TFRecordStore(IndexedStore):
    """TFRecord files (see `mlbert.data.formats.tfrecord.find_files`) opened for random access.

    The index is kept in the user's cache folder. Raises UserError if a file is unreadable or
    damaged, its records have other widths than the first, or its counts differ from its list.
    """

    gathered = 8192

    def __init__(self, folder: Path | str) -> None:
        self.info = describe(folder)
        self._paths = find_files(folder)
        listed = read_list(Path(folder))
        if listed:
            listed.check_sizes(self._paths)
        self._map = FileMap(self._paths)
        self._cache = IndexCache("tfrecord", self._paths, [_VERSION])
        self._index = load_index(self._paths, self._cache)
        self._lengths = self._index.lengths
        self._widths = Widths(*self._index.widths.tolist())
        self._first = np.cumsum(self._index.counts) - self._index.counts
        if listed:
            for path, lengths in zip(
                self._paths, np.split(self._lengths, self._first[1:]), strict=True
            ):
                listed.check_counts(path, len(lengths), int(lengths.sum(dtype=np.int64)))

    def _gather(self, indices: np.ndarray) -> Ragged:
        """See `IndexedStore._gather`.

        Raises UserError naming file, record and byte if a record has changed or cannot be read.
        """
        file = np.searchsorted(self._first, indices, side="right") - 1
        starts = self._index.starts[indices] + self._map.starts[file]
        ends = starts + self._index.sizes[indices]
        inside = (starts >= self._map.starts[file]) & (ends <= self._map.ends[file])
        rows, good = codec().parse(
            self._map.bytes, starts * inside, ends * inside, self._widths, MAX_ID + 1
        )
        if good.all():
            good = rows.lengths == self._lengths[indices]
        if good.all():
            return rows
        bad = int(np.flatnonzero(~good)[0])
        raise self._problem(int(indices[bad]), int(file[bad]))

    def _problem(self, record: int, file: int) -> UserError:
        """Return the error for a record that was good when the index was made."""
        start = int(self._index.starts[record])
        place = start + int(self._map.starts[file])
        content = self._map.bytes[place : place + int(self._index.sizes[record])]
        reason = problem_of(content, self._widths) or "does not have the length that its index says"
        number = record - int(self._first[file])
        remedy = f"{RESTORE}, and remove {self._cache.folder} if the file is right"
        return UserError(
            "data.damaged", self._paths[file], f"record {number} (byte {start}) {reason}", remedy
        )


open_folder = TFRecordStore  # as in the other formats


def load_index(paths: Sequence[Path], cache: IndexCache) -> RecordIndex:
    """Return the index of some files from the cache, or build it in several threads.

    Raises UserError if a file is unreadable or damaged,
    or has records of other widths than the first.
    """
    return cache.once(RecordIndex, _ARRAYS, lambda: vars(build_index(paths)))


def build_index(paths: Sequence[Path]) -> RecordIndex:
    """Build the index of `load_index` without the cache, reading every file once."""
    with ThreadPoolExecutor(_THREADS) as pool:
        parts = list(pool.map(_index_file, paths))
    for path, part in zip(paths, parts, strict=True):
        if (part.widths != parts[0].widths).any():
            reason = f"its records have {part.widths[0]} tokens and {part.widths[1]} predictions"
            reason += (
                f", but those of {paths[0].name} have {parts[0].widths[0]} and {parts[0].widths[1]}"
            )
            raise UserError("data.mixed", path, reason, "Keep one set in a folder")
    joined = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("counts", *_PER_RECORD)
    }
    return RecordIndex(widths=parts[0].widths, **joined)


def _index_file(path: Path) -> RecordIndex:
    reader = ExampleReader(path)
    parts = [(part.starts, part.ends - part.starts, part.rows.lengths) for part in reader]
    assert reader.widths is not None
    starts, sizes, lengths = (np.concatenate(column) for column in zip(*parts, strict=True))
    counts = np.array([len(starts)], np.int64)
    return RecordIndex(
        np.array(reader.widths), counts, starts, sizes.astype(np.uint32), lengths.astype(np.uint16)
    )
