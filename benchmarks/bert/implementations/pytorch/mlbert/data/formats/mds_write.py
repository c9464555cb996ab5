"""Writes MDS sets: the shards that `mlbert.data.formats.mds` reads, byte for byte those of MosaicML Streaming.

What is compressed depends on the version of Zstandard; everything else on the samples and settings alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mlbert.data.formats.manifest import make_folder
from mlbert.data.formats.mds import UINT32
from mlbert.data.formats.mds_columns import CONVERSION_ERRORS
from mlbert.data.formats.mds_fetch import zstandard_module
from mlbert.data.formats.mds_index import FORMAT, INDEX, VERSION, FileInfo, Hasher, ShardInfo, decoders, new_hasher
from mlbert.data.formats.ragged import offsets_of
from mlbert.host.errors import UserError
from mlbert.host.files import write_atomically

_MOST_BYTES = (1 << 32) - 1  # of a shard: offsets are uint32
_DEFAULT_LEVEL = 3


class MdsWriter:
    """Writes samples into a folder; a context manager. index.json, without which there is no set, comes last, and only
    when the block raises nothing.

    Args:
        folder: is made; must not hold an index yet.
        columns: from name to encoding; stored sorted by name.
        size_limit: bytes of a shard before compression, at most, unless a single sample is larger.
        compression: None, "zstd" or "zstd:LEVEL".
        hashes: algorithms of `hashlib`; with the package xxhash also its own.

    Raises UserError: a column, hash or compression that is not known, or a folder that cannot be written.
    """

    def __init__(
        self,
        folder: Path | str,
        columns: Mapping[str, str],
        *,
        size_limit: int = 1 << 26,
        compression: str | None = None,
        hashes: Sequence[str] = (),
    ) -> None:
        self._folder = Path(folder)
        names = sorted(columns)
        self._columns = decoders(self._folder, {name: columns[name] for name in names})
        if not names:
            raise UserError("config.missing", self._folder, "a sample needs a column", "Name one")
        self._level = _level(compression)
        for algorithm in hashes:
            _hasher(algorithm)
        if not 0 < size_limit <= _MOST_BYTES:
            raise UserError(
                "config.range", f"size_limit {size_limit}", "is no size of a shard", f"Use 1 to {_MOST_BYTES}"
            )
        self._size_limit = size_limit
        self._settings: dict[str, Any] = {
            "column_encodings": [columns[name] for name in names],
            "column_names": names,
            "column_sizes": [column.size for column in self._columns.values()],
            "compression": compression,
            "format": FORMAT,
            "hashes": list(hashes),
            "size_limit": size_limit,
            "version": VERSION,
        }
        self._head = json.dumps(self._settings, sort_keys=True).encode()
        self._samples: list[bytes] = []
        self._bytes = 0  # of self._samples
        self._shards: list[ShardInfo] = []
        make_folder(self._folder)
        if (self._folder / INDEX).exists():
            raise UserError("file.exists", self._folder, f"has an {INDEX} already", "Choose an empty folder")

    def __enter__(self) -> MdsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            self.finish()

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add one sample: a value of every column. Raises UserError: one is missing, unknown or of another kind, or a
        shard cannot be written."""
        if set(sample) != set(self._columns):
            differing = ", ".join(sorted(set(sample) ^ set(self._columns)))
            raise UserError(
                "data.columns", self._folder, f"a sample lacks or adds columns ({differing})", "Give all columns"
            )
        values, sizes = [], []
        for name, column in self._columns.items():
            try:
                values.append(column.encode(sample[name]))
            except CONVERSION_ERRORS as error:
                raise UserError("data.row", f"column {name!r}", str(error), "Use another encoding for it") from None
            if column.size is None:
                sizes.append(len(values[-1]))
        if sum(sizes) > _MOST_BYTES:
            raise UserError("data.too-long", self._folder, "a sample is larger than 4 GiB", "Cut it")
        data = np.array(sizes, UINT32).tobytes() + b"".join(values)
        if self._samples and self._shard_bytes(len(self._samples) + 1, self._bytes + len(data)) > self._size_limit:
            self._write_shard()
        self._samples.append(data)
        self._bytes += len(data)

    def finish(self) -> None:
        """Write the last shard and the index. Raises UserError: there was no sample, or it cannot be written."""
        if self._samples:
            self._write_shard()
        if not self._shards:
            raise UserError("data.empty", self._folder, "no sample was written", "A set needs one or more")
        entries = [{**self._settings, **shard.model_dump(by_alias=True)} for shard in self._shards]
        document = json.dumps({"shards": entries, "version": VERSION}, sort_keys=True)
        write_atomically(self._folder / INDEX, document)

    def _shard_bytes(self, samples: int, num_bytes: int) -> int:
        return UINT32.itemsize * (samples + 2) + len(self._head) + num_bytes

    def _write_shard(self) -> None:
        total = self._shard_bytes(len(self._samples), self._bytes)
        if total > _MOST_BYTES:
            raise UserError("data.too-long", self._folder, "a shard would be larger than 4 GiB", "Cut the sample")
        offsets = offsets_of([len(sample) for sample in self._samples]) + total - self._bytes
        head = np.array([len(self._samples), *offsets.tolist()], UINT32).tobytes() + self._head
        raw = b"".join([head, *self._samples])
        name = f"shard.{len(self._shards):05d}.mds"
        zipped = None
        if self._level is None:
            write_atomically(self._folder / name, raw)
        else:
            packed = zstandard_module().ZstdCompressor(self._level).compress(raw)
            zipped = self._file(f"{name}.zstd", packed)
            write_atomically(self._folder / zipped.name, packed)
        samples, file = len(self._samples), self._file(name, raw)
        self._shards.append(ShardInfo(**self._settings, samples=samples, raw_data=file, zip_data=zipped))
        self._samples, self._bytes = [], 0

    def _file(self, name: str, data: bytes) -> FileInfo:
        digests = {}
        for algorithm in self._settings["hashes"]:
            hasher = _hasher(algorithm)
            hasher.update(data)
            digests[algorithm] = hasher.hexdigest()
        return FileInfo(basename=name, bytes=len(data), hashes=digests)


def _hasher(algorithm: str) -> Hasher:
    """Raises UserError: there is none of this name, or not here."""
    try:
        hasher = new_hasher(algorithm)
    except ValueError:
        raise UserError("config.choice", f"hash {algorithm!r}", "is not known", "Use sha1 or sha256") from None
    if hasher is None:
        raise UserError(
            "package.missing", f"hash {algorithm!r}", "needs the package xxhash", "Install it: pip install xxhash"
        )
    return hasher


def _level(compression: str | None) -> int | None:
    """Of Zstandard; None without compression. Raises UserError: another form, or Zstandard is not installed."""
    if compression is None:
        return None
    name, colon, level = compression.partition(":")
    if name != "zstd" or (colon and not level.isdecimal()):
        raise UserError("config.choice", f"compression {compression!r}", "is not known", "Use zstd, or zstd:LEVEL")
    zstandard = zstandard_module()
    if colon and not 1 <= int(level) <= zstandard.MAX_COMPRESSION_LEVEL:
        raise UserError("config.range", f"compression {compression!r}", "has no such level", "Use 1 to 22")
    return int(level) if colon else _DEFAULT_LEVEL
