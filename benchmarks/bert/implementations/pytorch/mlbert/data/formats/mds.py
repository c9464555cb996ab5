"""Reads MosaicML Streaming's MDS sets ("Mosaic data shard", version 2): any sample, from memory maps of the shards.

A shard is uint32 n, uint32 [n+1] offsets of the samples in the file, JSON settings, and the samples. A sample is the
uint32 sizes of those columns whose values have no fixed size, then the values of all columns. Everything is
little-endian; `mlbert.data.formats.mds_columns` has the values, `mlbert.data.formats.mds_index` the index.

Legend: N samples, F shards.
"""

from __future__ import annotations

import bisect
import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from mlbert.data.formats.file_map import FileMap
from mlbert.data.formats.manifest import no_folder, reading
from mlbert.data.formats.mds_columns import CONVERSION_ERRORS
from mlbert.data.formats.mds_fetch import Damaged, cached_shard, check_file, fetch_index, local_folder
from mlbert.data.formats.mds_index import INDEX, ShardInfo, decoders, parse_index
from mlbert.data.formats.ragged import offsets_of
from mlbert.host.errors import UserError

UINT32 = np.dtype("<u4")
_RESTORE = "Restore the file, or write the set again"


class MdsReader:
    """An opened set. A shard is checked against its checksums when its first sample is read; reading is thread-safe.

    Args:
        folder: a path, or a URL: ``file``, ``http`` and ``https``, or any scheme that fsspec knows.
        cache: folder on this machine that shards are copied to as they are needed, and decompressed; several processes
            may share it, sets may not. None: shards are read where they lie, which must be here and not compressed.

    Attributes:
        columns: from name to encoding, sorted as in the samples.
        shard_sizes: int64 [F], samples of each shard.
        shards: what the index says of each shard.
        identity: SHA-256 of the index.

    Raises UserError: no such set, a damaged index, or a cache that cannot be used.
    """

    def __init__(self, folder: Path | str, cache: Path | str | None = None) -> None:
        self._remote, self._cache = str(folder), None if cache is None else Path(cache)
        self._folder = local_folder(self._remote)
        if self._folder is not None and not self._folder.is_dir():
            raise UserError(
                "file.missing", folder, no_folder(self._folder), f"Give a folder with {INDEX}, or its address"
            )
        raw = self._read_index() if self._cache is None else fetch_index(self._remote, self._cache)
        index = parse_index(f"{self._remote.rstrip('/')}/{INDEX}", raw)
        self.columns = index.columns
        self.shards = index.shards
        self.identity = hashlib.sha256(raw).hexdigest()
        self.shard_sizes: np.ndarray = np.array([shard.num_samples for shard in index.shards], np.int64)
        self._first: list[int] = offsets_of(self.shard_sizes).tolist()
        self._decoders = decoders(INDEX, self.columns)
        self._sizes = struct.Struct(f"<{sum(column.size is None for column in self._decoders.values())}I")
        self._opened: dict[int, _Shard] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        """Number of samples (N)."""
        return self._first[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Sample ``index`` (0 to N - 1) by the names of its columns; arrays are read-only. Raises IndexError: there is
        no such sample; UserError: its shard or the sample is missing or damaged, or cannot be fetched."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self._first, index) - 1
        shard = self._opened.get(number) or self._open(number)
        place = int(index) - self._first[number]
        try:
            return self._decode(shard.sample(place))
        except ValueError as error:
            raise UserError("data.damaged", shard.path, f"sample {place} is damaged ({error})", _RESTORE) from None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All samples in the order of the set."""
        return (self[index] for index in range(len(self)))

    def shard_bytes(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """All samples of shard ``number`` as they are stored: uint8 [bytes], read-only, and int64 [samples+1], where
        each begins. Raises UserError: the shard is missing or damaged, or cannot be fetched."""
        shard = self._opened.get(number) or self._open(number)
        return shard.samples()

    def _read_index(self) -> bytes:
        if self._folder is None:
            raise UserError(
                "config.conflict", self._remote, "lies on another machine", "Give a cache folder on this one"
            )
        path = self._folder / INDEX
        with reading(path):
            return path.read_bytes()

    def _open(self, number: int) -> _Shard:
        with self._lock:
            if number not in self._opened:
                shard = self.shards[number]
                self._opened[number] = _Shard(self._checked_file(shard), shard.num_samples)
            return self._opened[number]

    def _checked_file(self, shard: ShardInfo) -> Path:
        if self._cache is not None:
            return cached_shard(self._remote, self._cache, shard)
        assert self._folder is not None
        path = self._folder / shard.raw.name
        if shard.zipped and not path.exists() and (self._folder / shard.zipped.name).exists():
            reason = "is compressed, and only decompressed shards are read where they lie"
            raise UserError("config.missing", self._folder / shard.zipped.name, reason, "Give a cache folder")
        try:
            check_file(path, shard.raw)
        except Damaged as damage:
            raise UserError("data.damaged", path, str(damage), _RESTORE) from None
        return path

    def _decode(self, data: bytes) -> dict[str, Any]:
        """Raises ValueError."""
        start = self._sizes.size
        if len(data) < start:
            raise ValueError("the sizes of its columns are missing")
        sample, sizes = {}, iter(self._sizes.unpack_from(data))
        for name, column in self._decoders.items():
            end = start + (next(sizes) if column.size is None else column.size)
            if end > len(data):
                raise ValueError(f"column {name!r} ends after the sample")
            try:
                sample[name] = column.decode(data[start:end])
            except CONVERSION_ERRORS as error:
                raise ValueError(f"column {name!r}: {error!r}") from None
            start = end
        if start != len(data):
            raise ValueError(f"{len(data) - start} bytes are left over")
        return sample


class _Shard:
    """One shard's file, mapped. Raises UserError: its offsets are not those of so many samples."""

    def __init__(self, path: Path, num_samples: int) -> None:
        self.path = path
        files = FileMap([path])
        self._content = files.bytes[: files.ends[0]]
        head = UINT32.itemsize * (num_samples + 2)
        if len(self._content) < head:
            raise UserError("data.damaged", path, f"is too short for {num_samples} samples", _RESTORE)
        found = int(self._content[: UINT32.itemsize].view(UINT32)[0])
        if found != num_samples:
            raise UserError("data.damaged", path, f"holds {found} samples, the index says {num_samples}", _RESTORE)
        self._offsets = self._content[UINT32.itemsize : head].view(UINT32)
        edges = self._offsets.astype(np.int64)
        if edges[0] < head or edges[-1] != len(self._content) or (np.diff(edges) < 0).any():
            raise UserError("data.damaged", path, "has offsets that fall or lie outside of the file", _RESTORE)

    def samples(self) -> tuple[np.ndarray, np.ndarray]:
        """The bytes of all samples, and where each begins in them."""
        edges = self._offsets.astype(np.int64)
        return self._content[edges[0] :], edges - edges[0]

    def sample(self, place: int) -> bytes:
        """The bytes of one sample."""
        return self._content[self._offsets[place] : self._offsets[place + 1]].tobytes()
