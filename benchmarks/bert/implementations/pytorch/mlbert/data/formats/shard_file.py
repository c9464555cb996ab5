"""One shard file: concatenated sequences in HDF5; every array is one-dimensional,
contiguous and little-endian.

The arrays are those of `mlbert.data.formats.ragged`. A shard of packed sequences also has
``pack_offsets`` int64 [P+1]: pack p is the sequences pack_offsets[p] to pack_offsets[p+1]. Nothing
is pickled. A reader maps the file into memory once and reads only the parts it needs.

Legend: S sequences, P packs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mlbert.data.formats.file_map import FileMap
from mlbert.data.formats.manifest import FORMAT, FORMAT_VERSION, REMAKE
from mlbert.data.formats.ragged import DTYPES, Ragged
from mlbert.host.errors import UserError
from mlbert.host.files import write_atomically

PACK_OFFSETS = "pack_offsets"
INT64 = np.dtype("<i8")


@dataclass(frozen=True)
class Shard:
    """A shard's contents."""

    rows: Ragged  # its sequences
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)  # additional int64 arrays by name
    # Recorded in the file, see `content_sha256`; empty for a shard held in memory.
    content_sha256: str = ""
    files: FileMap | None = None  # the map of its file; None for a shard held in memory

    @property
    def pack_offsets(self) -> np.ndarray | None:
        """int64 [P+1], or None for single sequences."""
        return self.extra.get(PACK_OFFSETS)


def content_sha256(rows: Ragged, extra: Mapping[str, np.ndarray] | None = None) -> str:
    """Return the sha256 of the bytes of all arrays, in the order of `DTYPES`,
    then the extra ones by name.
    """
    result = hashlib.sha256()
    for name, dtype in DTYPES.items():
        result.update(np.ascontiguousarray(getattr(rows, name), dtype).data)
    for name, array in sorted((extra or {}).items()):
        result.update(name.encode())
        result.update(np.ascontiguousarray(array, INT64).data)
    return result.hexdigest()


def write_shard_file(
    path: Path, rows: Ragged, fingerprint: str, extra: Mapping[str, np.ndarray] | None = None
) -> None:
    """Write a shard atomically, with additional int64 arrays (``extra``); `is_written` compares the
    fingerprint. Raises UserError if the disk is full or the folder is not writable.
    """
    arrays = {
        name: np.ascontiguousarray(getattr(rows, name), dtype) for name, dtype in DTYPES.items()
    }
    arrays |= {name: np.ascontiguousarray(array, INT64) for name, array in (extra or {}).items()}
    attributes: dict[str, Any] = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "fingerprint": fingerprint,
    }
    write_hdf5(path, {**attributes, "content_sha256": content_sha256(rows, extra)}, arrays)


def write_hdf5(path: Path, attributes: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write an HDF5 file atomically.

    Its image is built in memory and written as plain bytes,
    so that a full disk is an ordinary error: UserError.
    """
    with h5py.File("shard", "w", driver="core", backing_store=False) as file:
        file.attrs.update(attributes)
        for name, array in arrays.items():
            file.create_dataset(name, data=array, track_times=False)
        file.flush()
        image = file.id.get_file_image()
    write_atomically(path, image)


def is_written(path: Path, fingerprint: str) -> bool:
    """Return True if an earlier, interrupted run left a complete,
    undamaged shard with this fingerprint.
    """
    try:
        with h5py.File(path, "r") as file:
            if file.attrs["fingerprint"] != fingerprint:
                return False
        shard = map_file(path)
        return shard.content_sha256 == content_sha256(shard.rows, shard.extra)
    except (OSError, KeyError, RuntimeError, UserError):
        return False


def map_file(path: Path) -> Shard:
    """Map one shard's arrays into memory, read-only.

    Raises UserError if the file is missing, truncated or not HDF5, or its arrays are inconsistent.
    """
    try:
        with h5py.File(path, "r") as file:
            if (
                file.attrs.get("format") != FORMAT
                or int(file.attrs.get("version", -1)) != FORMAT_VERSION
            ):
                raise UserError(
                    "data.format",
                    path,
                    f"is not a shard of {FORMAT} version {FORMAT_VERSION}",
                    REMAKE,
                )
            dtypes = DTYPES | {name: INT64 for name in file if name not in DTYPES}
            files = FileMap([path])  # holds no file descriptor: a set may have thousands of shards
            memory = files.bytes[: files.ends[0]]
            arrays = {
                name: _map_dataset(memory, file[name], dtype) for name, dtype in dtypes.items()
            }
            sha256 = str(file.attrs["content_sha256"])
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError("data.incomplete", path, "the shard is missing", REMAKE) from None
    except PermissionError:
        reason = "cannot be read (Permission denied)"
        raise UserError("file.unreadable", path, reason, "Check its permissions") from None
    except (OSError, KeyError, RuntimeError, ValueError, TypeError) as error:
        reason = f"is damaged or not a shard ({str(error).splitlines()[0]})"
        raise UserError("data.damaged", path, reason, REMAKE) from None
    rows = Ragged(**{name: arrays.pop(name) for name in DTYPES})
    if not _is_consistent(rows):
        raise UserError("data.damaged", path, "its arrays contradict each other", REMAKE)
    return Shard(rows, arrays, sha256, files)


def _is_consistent(rows: Ragged) -> bool:
    size = len(rows)
    return bool(
        len(rows.offsets) == len(rows.masked_offsets) == size + 1
        and len(rows.next_sentence) == size
        and rows.offsets[0] == rows.masked_offsets[0] == 0
        and rows.offsets[-1] == len(rows.tokens)
        and rows.masked_offsets[-1] == len(rows.masked_labels) == len(rows.masked_positions)
    )


def _map_dataset(memory: np.ndarray, dataset: Any, dtype: np.dtype) -> np.ndarray:
    if dataset.dtype != dtype or dataset.ndim != 1:
        raise ValueError(f"{dataset.name} is {dataset.dtype} with {dataset.ndim} dimensions")
    if dataset.size == 0:
        return np.empty(0, dtype)
    start = dataset.id.get_offset()
    if start is None or dataset.chunks is not None:
        raise ValueError(f"{dataset.name} is not stored contiguously")
    if start + dataset.nbytes > len(memory):
        raise ValueError(f"{dataset.name} ends after the end of the file")
    return np.frombuffer(memory, dtype, dataset.size, start)
