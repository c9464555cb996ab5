"""Reader and writer of MosaicML Streaming's MDS sets ("Mosaic data shard", version 2).

A shard is uint32 n, uint32 [n+1] offsets of the samples in the file, JSON settings, and the
samples. A sample is the uint32 sizes of the columns without a fixed size, then the values of all
columns. Everything is little-endian. `mlbert.data.formats.mds_index` reads the index.

The reader maps shards into memory and returns samples in any order. It decodes text; other values
stay bytes, and pickled ones are never loaded. The writer produces the same bytes as MosaicML
Streaming; compressed files depend on the version of Zstandard, everything else only on samples and
settings.

Legend: N samples, F shards.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any

import numpy as np

from mlbert.data.formats import mds_files
from mlbert.data.formats.cache_limit import CacheLimit, disk_bytes, touch
from mlbert.data.formats.file_map import FileMap
from mlbert.data.formats.index_cache import state_of
from mlbert.data.formats.manifest import check_folder, make_folder
from mlbert.data.formats.mds_files import (
    FORMAT,
    INDEX,
    INT,
    INT_BYTES,
    RESTORE,
    STR,
    VERSION,
    FileInfo,
    ShardInfo,
)
from mlbert.data.formats.mds_index import open_index
from mlbert.data.formats.mds_tokens import encode_array
from mlbert.data.formats.ragged import offsets_of
from mlbert.host.errors import UserError
from mlbert.host.files import local_path, write_atomically
from mlbert.host.texts import is_count

UINT32 = np.dtype("<u4")
_MOST_BYTES = (1 << 32) - 1  # of a shard: offsets are uint32
_DEFAULT_LEVEL = 3  # of Zstandard, if the compression does not name one


class MdsReader:
    """An opened set. A shard's checksums are verified when its first sample is read. Thread-safe.

    Args:
        folder: a path, or a URL: ``file``, ``http`` and ``https``,
            or any scheme supported by fsspec.
        cache: local folder to which shards are copied and decompressed on demand. Processes may
            share it, but each set needs a separate one. Without it, shards must be local and are
            read in place; compressed ones are decompressed to the user's cache folder.

    Attributes:
        cache: the folder for what is made from the set.
        columns: encoding of each column by name.
        shard_sizes: int64 [F], samples of each shard.
        shards: the index entry of each shard.
        identity: SHA-256 of the index.
        vocabulary_sha256: of the vocabulary of a set of tokens; None if the set does not record it.

    Raises UserError if there is no such set, its index is damaged, or the cache cannot be used.
    """

    def __init__(self, folder: Path | str, cache: Path | str | None = None) -> None:
        self._remote = str(folder)
        self._is_copied = cache is not None
        self._folder = local_path(self._remote)
        if self._folder is not None:
            check_folder(self._folder, f"Give a folder with {INDEX}, or its address", folder)
        path = (
            self._own_index() if cache is None else mds_files.fetch_index(self._remote, Path(cache))
        )
        index = open_index(path, f"{self._remote.rstrip('/')}/{INDEX}")
        self.columns = {column.name: column.encoding for column in index.columns}
        self.shards = index.shards
        self.vocabulary_sha256 = index.vocabulary_sha256
        self.identity = index.identity
        self.cache = mds_files.cache_of(self.identity) if cache is None else Path(cache)
        self.shard_sizes = index.num_samples
        # A search in a view takes a fifth of the time of one in the array.
        self._first = offsets_of(self.shard_sizes).data
        self._layout = index.columns
        self._sizes = struct.Struct(f"<{sum(column.size is None for column in self._layout)}I")
        self._opened: OrderedDict[int, _Shard] = OrderedDict()
        self._lock = Lock()
        self._limit: CacheLimit | None = None

    def limit_cache(self, limit: CacheLimit) -> None:
        """Keep the cache within a limit: close the shards that were not used for longest, so that
        their files may be deleted.
        """
        self._limit = limit

    def __len__(self) -> int:
        """Return the number of samples (N)."""
        total: int = self._first[-1]
        return total

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the values of sample ``index`` (0 to N - 1) by column name: str of text, bytes of
        others. Raises IndexError, or UserError if its shard is missing or damaged, or cannot be
        fetched.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self._first, index) - 1
        shard = self._shard(number)
        place = int(index) - self._first[number]
        try:
            return self._decode(shard.sample(place))
        except ValueError as error:
            raise UserError(
                "data.damaged", shard.path, f"sample {place} is damaged ({error})", RESTORE
            ) from None

    def shard_bytes(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the stored bytes of all samples of shard ``number``, uint8 [bytes], read-only, and
        the start of each, int64 [samples+1]. Raises UserError if the shard is missing or damaged,
        or cannot be fetched.
        """
        return self._shard(number).samples()

    def column_places(
        self, number: int, column: str
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Find the values of a column in shard ``number``.

        Returns the stored bytes of the shard's samples, uint8 [bytes], read-only, and where each
        value begins and ends in them, int64 [samples] each. None if a sample is damaged; reading it
        alone raises the error. Raises UserError as `shard_bytes`.
        """
        content, edges = self.shard_bytes(number)
        starts = edges[:-1]
        head = self._sizes.size  # bytes of the sizes in front of a sample
        if (np.diff(edges) < head).any():
            return None
        stored = content[starts[:, None] + np.arange(head)]
        sizes = np.ascontiguousarray(stored).view(UINT32).astype(np.int64)
        ends = starts + head
        first = last = ends
        variable = 0
        for name, _, size in self._layout:
            begins = ends
            if size is None:
                ends = begins + sizes[:, variable]
                variable += 1
            else:
                ends = begins + size
            if name == column:
                first = begins
                last = ends
        if (ends != edges[1:]).any():
            return None
        return content, first, last

    def is_open(self, number: int) -> bool:
        """Return True if shard ``number`` was read before, so that reading it does not fetch it."""
        return number in self._opened

    def _own_index(self) -> Path:
        if self._folder is None:
            raise UserError(
                "config.conflict",
                self._remote,
                "is on another machine",
                "Give a cache folder on this one",
            )
        return self._folder / INDEX

    def _shard(self, number: int) -> _Shard:
        if self._limit is not None:
            with self._lock:
                if number in self._opened:
                    self._opened.move_to_end(number)
        return self._opened.get(number) or self._open(number)

    def _open(self, number: int) -> _Shard:
        with self._lock:
            if number in self._opened:
                return self._opened[number]
            shard = self.shards[number]
            opened = _Shard(self._checked_file(shard), shard.num_samples)
            self._opened[number] = opened
            if self._limit is None:
                return opened
            sizes = sum(one.num_bytes for one in self._opened.values())
            while sizes > self._limit.open_bytes and len(self._opened) > 1:
                _, oldest = self._opened.popitem(last=False)
                sizes -= oldest.num_bytes
        if opened.path.is_relative_to(self.cache):  # else it is the user's
            touch(opened.path)
            self._limit.trim()
        return opened

    def _checked_file(self, shard: ShardInfo) -> Path:
        if self._is_copied or self._folder is None or shard.stored_in(self._folder) is shard.zipped:
            return mds_files.cached_shard(self._remote, self.cache, shard)
        path = self._folder / shard.raw.name
        mds_files.check_file(path, shard.raw)
        return path

    def state_of(self, number: int) -> list[int]:
        """Return size and modification time (ns) of the file of shard ``number`` in the set's
        folder. They are empty if it is missing, or if shards are copied, because a copy is what the
        index says.
        """
        shard = self.shards[number]
        if self._is_copied or self._folder is None:
            return []
        with contextlib.suppress(OSError):
            return state_of(self._folder / shard.stored_in(self._folder).name)
        return []

    def _decode(self, data: bytes) -> dict[str, Any]:
        """Return the values of one sample; raises ValueError if it is damaged."""
        start = self._sizes.size
        if len(data) < start:
            raise ValueError("the sizes of its columns are missing")
        sample = {}
        sizes = iter(self._sizes.unpack_from(data))
        for name, encoding, size in self._layout:
            end = start + (next(sizes) if size is None else size)
            if end > len(data):
                raise ValueError(f"column {name!r} ends after the sample")
            sample[name] = str(data[start:end], "utf-8") if encoding == STR else data[start:end]
            start = end
        if start != len(data):
            raise ValueError(f"{len(data) - start} bytes are left over")
        return sample


class _Shard:
    """One shard's mapped file. Raises UserError if its offsets do not match ``num_samples``."""

    def __init__(self, path: Path, num_samples: int) -> None:
        self.path = path
        files = FileMap([path])
        self._content = files.bytes[: files.ends[0]]
        head = UINT32.itemsize * (num_samples + 2)
        if (
            len(self._content) < head
            or self._content[: UINT32.itemsize].view(UINT32) != num_samples
        ):
            raise UserError(
                "data.damaged",
                path,
                f"does not contain the {num_samples:,} samples that the index lists",
                RESTORE,
            )
        self._offsets = self._content[UINT32.itemsize : head].view(UINT32)
        edges = self._offsets.astype(np.int64)
        if edges[0] < head or edges[-1] != len(self._content) or (np.diff(edges) < 0).any():
            raise UserError(
                "data.damaged", path, "has offsets that decrease or point outside the file", RESTORE
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of the file on the disk."""
        return disk_bytes(len(self._content))

    def samples(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of all samples, and the start of each."""
        edges = self._offsets.astype(np.int64)
        return self._content[edges[0] :], edges - edges[0]

    def sample(self, place: int) -> bytes:
        """Return the bytes of one sample."""
        return self._content[self._offsets[place] : self._offsets[place + 1]].tobytes()


class MdsWriter:
    """Context manager that writes samples into a folder.

    It writes index.json, which completes the set, at the end, and only if the block raises nothing.

    Args:
        folder: created if needed; must not have an index.
        columns: encoding of each column by name: `STR`, `BYTES`, `INT`, or ``ndarray:TYPE`` for
            the ids of a text (`mlbert.data.formats.mds_tokens`); stored sorted by name.
        size_limit: maximum bytes of a shard before compression, unless a single sample is larger.
        compression: None, "zstd" or "zstd:LEVEL".
        hashes: checksums of each file, see `checksum`.
        first: number of the first shard, for one of several writers of a set (see `flush`).
        vocabulary_sha256: recorded in the index; for sets of tokens.

    Attributes:
        room: maximum bytes of the samples of a shard, each with 4 bytes for its offset.

    Raises UserError if the compression is unknown, or the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path | str,
        columns: Mapping[str, str],
        *,
        size_limit: int = 1 << 26,
        compression: str | None = None,
        hashes: Sequence[str] = ("sha1",),
        first: int = 0,
        vocabulary_sha256: str | None = None,
    ) -> None:
        self._folder = Path(folder)
        self._names = names = sorted(columns)
        self._encodings = [columns[name] for name in names]
        column_sizes = [INT_BYTES if encoding == INT else None for encoding in self._encodings]
        self._has_size = [size is not None for size in column_sizes]
        self._level = compression_level(compression)
        self._size_limit = size_limit
        self._settings: dict[str, Any] = {
            "column_encodings": self._encodings,
            "column_names": names,
            "column_sizes": column_sizes,
            "compression": compression,
            "format": FORMAT,
            "hashes": list(hashes),
            "size_limit": size_limit,
            "version": VERSION,
        }
        self._head = json.dumps(self._settings, sort_keys=True).encode()
        self.room = size_limit - self._shard_bytes(0, 0)
        self._first = first
        self._vocabulary_sha256 = vocabulary_sha256
        self._samples: list[bytes] = []
        self._bytes = 0  # of self._samples
        self._entries: list[dict[str, Any]] = []
        make_folder(self._folder)
        if (self._folder / INDEX).exists():
            raise UserError(
                "file.exists", self._folder, f"already has an {INDEX}", "Choose an empty folder"
            )

    def __enter__(self) -> MdsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add one sample: for every column a str, an int, an array int [T], or the value's bytes.

        Raises UserError if the sample is too large for a shard, or a shard cannot be written.
        """
        values = [
            _encoded(sample[name], encoding)
            for name, encoding in zip(self._names, self._encodings, strict=True)
        ]
        sizes = [
            len(value)
            for value, has_size in zip(values, self._has_size, strict=True)
            if not has_size
        ]
        if self._shard_bytes(1, UINT32.itemsize * len(sizes) + sum(map(len, values))) > _MOST_BYTES:
            raise UserError(
                "data.too-long", self._folder, "a sample is larger than 4 GiB", "Cut it"
            )
        data = np.array(sizes, UINT32).tobytes() + b"".join(values)
        if (
            self._samples
            and self._shard_bytes(len(self._samples) + 1, self._bytes + len(data))
            > self._size_limit
        ):
            self._write_shard()
        self._samples.append(data)
        self._bytes += len(data)

    def finish(self) -> None:
        """Write the last shard and the index.

        Raises UserError if there are no samples or writing fails.
        """
        if not self.flush():
            raise UserError(
                "data.empty", self._folder, "no sample was written", "A set needs one or more"
            )
        write_index(self._folder, self._entries, self._vocabulary_sha256)

    def flush(self) -> list[dict[str, Any]]:
        """Write the last shard, and return the entries of all shards for `write_index`."""
        if self._samples:
            self._write_shard()
        return self._entries

    def _shard_bytes(self, samples: int, num_bytes: int) -> int:
        return UINT32.itemsize * (samples + 2) + len(self._head) + num_bytes

    def _write_shard(self) -> None:
        total = self._shard_bytes(len(self._samples), self._bytes)
        offsets = offsets_of([len(sample) for sample in self._samples]) + total - self._bytes
        head = np.array([len(self._samples), *offsets.tolist()], UINT32).tobytes() + self._head
        raw = b"".join([head, *self._samples])
        name = f"shard.{self._first + len(self._entries):05d}.mds"
        zipped = None
        if self._level is None:
            write_atomically(self._folder / name, raw)
        else:
            packed = mds_files.zstandard_module().ZstdCompressor(self._level).compress(raw)
            zipped = self._file(f"{name}.zstd", packed)
            write_atomically(self._folder / zipped.name, packed)
        samples = len(self._samples)
        file = self._file(name, raw)
        shard = ShardInfo(**self._settings, samples=samples, raw_data=file, zip_data=zipped)
        self._entries.append({**self._settings, **shard.model_dump(by_alias=True)})
        self._samples = []
        self._bytes = 0

    def _file(self, name: str, data: bytes) -> FileInfo:
        digests = {
            algorithm: mds_files.checksum(algorithm, data) for algorithm in self._settings["hashes"]
        }
        return FileInfo(basename=name, bytes=len(data), hashes=digests)


def _encoded(value: Any, encoding: str) -> bytes:
    """Return the stored bytes of a column's value."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, int):
        return value.to_bytes(INT_BYTES, "little", signed=True)
    if isinstance(value, np.ndarray):
        return encode_array(value, encoding)
    encoded: bytes = value
    return encoded


def write_index(
    folder: Path, entries: Sequence[Mapping[str, Any]], vocabulary_sha256: str | None = None
) -> None:
    """Complete a set whose shards were written by several `MdsWriter`.

    A set of tokens records the SHA-256 of its vocabulary, which MosaicML Streaming does not read.
    """
    index: dict[str, Any] = {"shards": entries, "version": VERSION}
    if vocabulary_sha256 is not None:
        index["vocabulary_sha256"] = vocabulary_sha256
    write_atomically(folder / INDEX, json.dumps(index, sort_keys=True))


def compression_level(compression: str | None) -> int | None:
    """Return the Zstandard level, or None without compression.

    Raises UserError if it is invalid, or if Zstandard is not installed.
    """
    if compression is None:
        return None
    name, colon, level = compression.partition(":")
    if name != "zstd" or (colon and not is_count(level)):
        raise UserError(
            "config.choice",
            f"compression {compression!r}",
            "is not known",
            "Use zstd, or zstd:LEVEL",
        )
    zstandard = mds_files.zstandard_module()
    if colon and not 1 <= int(level) <= zstandard.MAX_COMPRESSION_LEVEL:
        raise UserError(
            "config.range", f"compression {compression!r}", "has no such level", "Use 1 to 22"
        )
    return int(level) if colon else _DEFAULT_LEVEL
