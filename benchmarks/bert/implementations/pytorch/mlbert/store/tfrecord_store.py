"""The benchmark's TFRecords as a `mlbert.store.base.Store`: read as they are, in any order.

Opening a folder for the first time reads it once, checks every record, and keeps where each one lies in the user's
cache folder (``$XDG_CACHE_HOME/mlbert/tfrecord``, by default under ``~/.cache``), never beside the data. That index
counts while every file has the same path, size and modification time. It is a memory map, shared by the processes of a
machine. Checksums are checked again whenever a record is read.

Legend: N records of all files, F files, S sequences asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlbert.core.errors import UserError
from mlbert.core.native import cache_folder
from mlbert.store.base import StoreInfo
from mlbert.store.file_map import FileMap
from mlbert.store.ragged import Ragged
from mlbert.store.tfrecord import RESTORE, ExampleReader, Widths, codec, find_files, read_widths
from mlbert.store.tfrecord_plain import FOOTER_BYTES, HEADER_BYTES, BadExample, parse_example

_VERSION = 1
_HDF5 = b"\x89HDF\r\n\x1a\n"
_THREADS = min(16, os.cpu_count() or 1)
_GATHERED = 8192  # records read at a time


def accepts(folder: Path | str) -> bool:
    """Whether the folder holds files named like TFRecords that are not HDF5."""
    try:
        with find_files(folder)[0].open("rb") as file:
            return file.read(len(_HDF5)) != _HDF5
    except (UserError, OSError):
        return False


def describe(folder: Path | str) -> StoreInfo:
    """What file names, sizes and the first record's list sizes tell of a folder of TFRecords.

    Raises:
        UserError: no such files, or the first one is not TFRecords.
    """
    files = find_files(folder)
    # A bad record is told by whoever reads the set.
    widths = read_widths(files[0], skip_bad=True)
    try:
        named = [(file.name, file.stat().st_size) for file in files]
    except OSError as error:
        raise UserError(folder, f"cannot be read ({error.strerror})", "Check the path and its permissions") from None
    return StoreInfo(
        folder=Path(folder),
        kind="tfrecord",
        identity=hashlib.sha256(json.dumps(named).encode()).hexdigest(),
        max_seq_length=widths.max_seq_length,
        max_predictions=widths.max_predictions,
        num_sequences=None,
        vocab_size=None,
        vocabulary_sha256=None,
    )


def open_folder(folder: Path | str) -> TFRecordStore:
    """`TFRecordStore` of a folder."""
    return TFRecordStore(folder)


@dataclass(frozen=True)
class Index:
    """Where the records of some files lie.

    Attributes:
        widths: int64 [2], tokens and predictions of every record.
        counts: int64 [F], records of each file.
        starts: int64 [N], first byte in its file.
        sizes: uint32 [N], bytes.
        lengths: uint16 [N], tokens.
    """

    widths: np.ndarray
    counts: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    lengths: np.ndarray


_DTYPES = {"widths": "<i8", "counts": "<i8", "starts": "<i8", "sizes": "<u4", "lengths": "<u2"}


class TFRecordStore:
    """TFRecord files opened for random access.

    Args:
        folder: of TFRecord files (see `mlbert.store.tfrecord.find_files`), or one file.
        cached: keep the index in the user's cache folder and take it from there.

    Raises:
        UserError: a file is unreadable or damaged, or has records of another width than the first one.
    """

    def __init__(self, folder: Path | str, cached: bool = True) -> None:
        self.info = describe(folder)
        self._paths = find_files(folder)
        self._map = FileMap(self._paths)
        self._index = load_index(self._paths, cached)
        self._widths = Widths(*self._index.widths.tolist())
        self._first = np.cumsum(self._index.counts) - self._index.counts

    def __len__(self) -> int:
        return len(self._index.lengths)

    @property
    def lengths(self) -> np.ndarray:
        """int32 [N], tokens of every sequence."""
        return self._index.lengths.astype(np.int32)

    @property
    def num_packs(self) -> int:
        """0: these are single sequences."""
        return 0

    def gather(self, indices: np.ndarray) -> Ragged:
        """The sequences ``indices`` (int64 [S]), in that order.

        Raises:
            UserError: a record changed or cannot be read back; names file, record and byte.
        """
        indices = np.asarray(indices, np.int64)
        if len(indices) <= _GATHERED:
            return self._gather(indices)
        pieces = [indices[first : first + _GATHERED] for first in range(0, len(indices), _GATHERED)]
        return Ragged.concatenate([self._gather(piece) for piece in pieces])

    def gather_packs(self, indices: np.ndarray) -> tuple[Ragged, np.ndarray]:
        """There are no packs."""
        raise AssertionError("TFRecords hold no packs")

    def _gather(self, indices: np.ndarray) -> Ragged:
        file = np.searchsorted(self._first, indices, side="right") - 1
        starts = self._index.starts[indices] + self._map.starts[file]
        ends = starts + self._index.sizes[indices]
        inside = (starts >= self._map.starts[file]) & (ends <= self._map.ends[file])
        inside &= ends - starts >= HEADER_BYTES + FOOTER_BYTES
        if inside.all():
            intact = codec().check(self._map.bytes, starts, ends)
            rows, good = codec().parse(self._map.bytes, starts, ends, intact, self._widths)
            if good.all():
                good[good] = rows.lengths == self._index.lengths[indices[good]]
        else:
            good = inside
        if good.all():
            return rows
        bad = int(np.flatnonzero(~good)[0])
        raise self._problem(int(indices[bad]), int(file[bad]))

    def _problem(self, record: int, file: int) -> UserError:
        """Why a record is refused that was fine when the index was made."""
        start = int(self._index.starts[record])
        place = start + int(self._map.starts[file])
        content = self._map.bytes[place : place + int(self._index.sizes[record])]
        reason = "has damaged data: a checksum is wrong"
        if len(content) >= HEADER_BYTES + FOOTER_BYTES and codec().check(
            content, np.array([0]), np.array([len(content)])
        ):
            try:
                (tokens, *_), _ = parse_example(content[HEADER_BYTES:-FOOTER_BYTES].tobytes(), self._widths)
                reason = f"has {len(tokens)} tokens, its index says {self._index.lengths[record]}"
            except BadExample as error:
                reason = str(error)
        number = record - int(self._first[file])
        remedy = f"{RESTORE}, and remove {_cache()} if the file is right"
        return UserError(self._paths[file], f"record {number} (byte {start}) {reason}", remedy)


def load_index(paths: Sequence[Path], cached: bool = True) -> Index:
    """The index of some files, from the cache or made now by several threads.

    Raises:
        UserError: a file is unreadable or damaged, or has records of another width than the first one.
    """
    kept = _cache() / _name(paths)
    if cached:
        with contextlib.suppress(OSError, ValueError):
            return _read(kept)
    index = build_index(paths)
    if cached:
        # A cache that cannot be written costs time at the next opening, nothing else.
        with contextlib.suppress(OSError):
            _write(kept, index)
    return index


def build_index(paths: Sequence[Path]) -> Index:
    """`load_index` without the cache: reads every file once."""
    with ThreadPoolExecutor(_THREADS) as pool:
        parts = list(pool.map(_index_file, paths))
    for path, part in zip(paths, parts, strict=True):
        if (part.widths != parts[0].widths).any():
            reason = f"its records have {part.widths[0]} tokens and {part.widths[1]} predictions"
            reason += f", those of {paths[0].name} {parts[0].widths[0]} and {parts[0].widths[1]}"
            raise UserError(path, reason, "Keep one set in a folder")
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _DTYPES if name != "widths"}
    return Index(widths=parts[0].widths, **joined)


def _index_file(path: Path) -> Index:
    reader = ExampleReader(path)
    parts = [(part.starts, part.ends - part.starts, part.rows.lengths) for part in reader]
    assert reader.widths is not None
    starts, sizes, lengths = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Index(
        widths=np.array(reader.widths, np.int64),
        counts=np.array([len(starts)], np.int64),
        starts=starts,
        sizes=sizes.astype(np.uint32),
        lengths=lengths.astype(np.uint16),
    )


def _cache() -> Path:
    return cache_folder() / "tfrecord"


def _name(paths: Sequence[Path]) -> str:
    """Of the index: which files, and what they are now."""
    files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    which, state = files[0][0], json.dumps([_VERSION, files])
    return "-".join(hashlib.sha256(text.encode()).hexdigest()[:32] for text in (which, state))


def _read(folder: Path) -> Index:
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r").view(np.ndarray) for name in _DTYPES}
    if any(array.dtype != np.dtype(_DTYPES[name]) or array.ndim != 1 for name, array in arrays.items()):
        raise ValueError("not an index")
    if {len(arrays[name]) for name in ("starts", "sizes", "lengths")} != {int(arrays["counts"].sum())}:
        raise ValueError("arrays of different sets")
    return Index(**arrays)


def _write(folder: Path, index: Index) -> None:
    """A folder with a file for each array; renamed as a whole, whoever comes first. Older ones of the set go."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".index-", dir=folder.parent))
    try:
        for name, dtype in _DTYPES.items():
            np.save(temporary / f"{name}.npy", getattr(index, name).astype(dtype, copy=False))
        for old in folder.parent.glob(f"{folder.name.split('-')[0]}-*"):
            shutil.rmtree(old)  # also one of this name: it is damaged, or it would have been read
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
