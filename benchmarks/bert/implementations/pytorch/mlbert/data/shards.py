"""The prepared set: ragged HDF5 shards and one manifest.

A folder holds ``manifest.json`` and ``shard-00000-of-00004.h5`` and so on. A shard keeps sequences back to back
with offsets instead of padding; every array is contiguous, so a reader maps it into memory and touches only what it
takes. Nothing is pickled. Files are written under a temporary name, flushed to disk and renamed, the manifest last:
a folder with a manifest is complete, whatever happened while it was made.

The arrays are those of `mlbert.data.ragged`; every dataset is one-dimensional and little-endian.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mlbert.core.errors import UserError
from mlbert.data.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    Manifest,
    file_sha256,
    read_manifest,
    write_atomically,
)
from mlbert.data.ragged import DTYPES, Ragged, offsets_of

VERIFY_BYTES = 2 << 30  # sets up to this size are hashed when opened; larger ones by `mlbert prepare verify`
REMAKE = "Restore the file, or remove the folder and prepare the data again"
_SHARD_NAME = re.compile(r"shard-(\d{5})-of-(\d{5})\.h5")


def shard_name(index: int, count: int) -> str:
    """File name of shard ``index`` of ``count``."""
    return f"shard-{index:05d}-of-{count:05d}.h5"


def content_sha256(rows: Ragged) -> str:
    """sha256 over the bytes of all arrays, in the order of `DTYPES`."""
    result = hashlib.sha256()
    for name, dtype in DTYPES.items():
        result.update(np.ascontiguousarray(getattr(rows, name), dtype).data)
    return result.hexdigest()


class ShardWriter:
    """Writes one prepared set, shard by shard; `finish` writes the manifest. Several processes may each write shards
    of their own with `write_shard`; one of them then calls `finish`.

    Args:
        folder: made when missing.
        num_shards: how many shards the set will have.
        fingerprint: names input and options; a shard already there with the same fingerprint is kept on a rerun.
    """

    def __init__(self, folder: Path, num_shards: int, fingerprint: str) -> None:
        self.folder = Path(folder)
        self.num_shards = num_shards
        self.fingerprint = fingerprint
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(folder, f"cannot be made ({error.strerror})", "Choose another output folder") from None

    def path(self, index: int) -> Path:
        """Final path of shard ``index``."""
        return self.folder / shard_name(index, self.num_shards)

    def clear_leftovers(self) -> None:
        """Remove what an earlier run left: its manifest (the set is unfinished from now on), temporary files, and
        shards of another count."""
        for path in self.folder.iterdir():
            match = _SHARD_NAME.fullmatch(path.name)
            of_another_count = match is not None and int(match.group(2)) != self.num_shards
            if path.name == MANIFEST or of_another_count or path.name.endswith(".tmp"):
                path.unlink()

    def is_written(self, index: int) -> bool:
        """Whether shard ``index`` of the same fingerprint is there from an earlier, interrupted run."""
        path = self.path(index)
        try:
            with h5py.File(path, "r") as file:
                attributes = dict(file.attrs)
            known = attributes["fingerprint"] == self.fingerprint
            return known and attributes["content_sha256"] == content_sha256(map_shard(path))
        except (OSError, KeyError, RuntimeError, UserError):
            return False

    def write_shard(self, index: int, rows: Ragged) -> None:
        """Write shard ``index`` as a whole.

        Raises:
            UserError: the disk is full or the folder not writable; nothing under the final name then.
        """
        # The image is built in memory and written as plain bytes: a full disk is then an ordinary error.
        with h5py.File("shard", "w", driver="core", backing_store=False) as file:
            file.attrs["format"] = FORMAT
            file.attrs["version"] = FORMAT_VERSION
            file.attrs["fingerprint"] = self.fingerprint
            file.attrs["content_sha256"] = content_sha256(rows)
            for name, dtype in DTYPES.items():
                array = np.ascontiguousarray(getattr(rows, name), dtype)
                file.create_dataset(name, data=array, track_times=False)
            file.flush()
            image = file.id.get_file_image()
        write_atomically(self.path(index), image)

    def finish(
        self, *, vocabulary: Mapping[str, Any], max_seq_length: int, max_predictions: int, provenance: Mapping[str, Any]
    ) -> Manifest:
        """Read the shards back, check them, and write the manifest.

        Args:
            vocabulary: {"sha256": of vocab.txt, "size": entries}.
            max_seq_length, max_predictions: limits of one sequence, tokens.
            provenance: JSON-able: options, seed, tool version.
        """
        histogram = np.zeros(max_seq_length + 1, np.int64)
        shards: list[dict[str, Any]] = []
        for index in range(self.num_shards):
            path = self.path(index)
            rows = map_shard(path)
            histogram += np.bincount(rows.lengths, minlength=max_seq_length + 1)
            shards.append(
                {
                    "file": path.name,
                    "sha256": file_sha256(path),
                    "bytes": path.stat().st_size,
                    "num_sequences": len(rows),
                    "num_tokens": len(rows.tokens),
                    "num_masked": len(rows.masked_labels),
                }
            )
        totals = {key: sum(shard[key] for shard in shards) for key in ("num_sequences", "num_tokens", "num_masked")}
        document = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "vocabulary": dict(vocabulary),
            "max_seq_length": max_seq_length,
            "max_predictions": max_predictions,
            **totals,
            "shards": shards,
            "provenance": dict(provenance),
            "length_histogram": histogram.tolist(),
        }
        write_atomically(self.folder / MANIFEST, (json.dumps(document, indent=1) + "\n").encode())
        return read_manifest(self.folder)


def map_shard(path: Path) -> Ragged:
    """Map one shard's arrays into memory, read-only.

    Raises:
        UserError: the file is missing, no HDF5, truncated, or its arrays are not a ragged set.
    """
    try:
        with h5py.File(path, "r") as file:
            if file.attrs.get("format") != FORMAT or int(file.attrs.get("version", -1)) != FORMAT_VERSION:
                raise UserError(path, f"is not a shard of {FORMAT} version {FORMAT_VERSION}", REMAKE)
            arrays = {name: _map_dataset(path, file[name], dtype) for name, dtype in DTYPES.items()}
    except FileNotFoundError:
        raise UserError(path, "the shard is missing", REMAKE) from None
    except (OSError, KeyError, RuntimeError) as error:
        raise UserError(path, f"is damaged or not a shard ({str(error).splitlines()[0]})", REMAKE) from None
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(path, f"is truncated or damaged ({error})", REMAKE) from None
    rows = Ragged(**arrays)
    size = len(rows)
    consistent = (
        len(rows.offsets) == len(rows.masked_offsets) == size + 1
        and len(rows.next_sentence) == size
        and rows.offsets[0] == rows.masked_offsets[0] == 0
        and rows.offsets[-1] == len(rows.tokens)
        and rows.masked_offsets[-1] == len(rows.masked_labels) == len(rows.masked_positions)
    )
    if not consistent:
        raise UserError(path, "its arrays do not fit each other", REMAKE)
    return rows


def _map_dataset(path: Path, dataset: Any, dtype: np.dtype) -> np.ndarray:
    if dataset.dtype != dtype or dataset.ndim != 1:
        raise ValueError(f"{dataset.name} is {dataset.dtype} with {dataset.ndim} dimensions")
    if dataset.size == 0:
        return np.empty(0, dtype)
    start = dataset.id.get_offset()
    if start is None or dataset.chunks is not None:
        raise ValueError(f"{dataset.name} is not stored contiguously")
    if start + dataset.nbytes > path.stat().st_size:
        raise ValueError(f"{dataset.name} ends after the end of the file")
    return np.memmap(path, dtype, "r", start, dataset.shape).view(np.ndarray)


class ShardSet:
    """A prepared set opened for reading.

    Attributes:
        manifest: its manifest.
        lengths: int32 [N], tokens of every sequence, shard by shard.
    """

    def __init__(self, manifest: Manifest, shards: list[Ragged]) -> None:
        self.manifest = manifest
        self._shards = shards
        self._first = offsets_of([len(shard) for shard in shards])
        parts = [shard.lengths.astype(np.int32) for shard in shards]
        self.lengths: np.ndarray = np.concatenate(parts) if parts else np.empty(0, np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def open(cls, folder: Path | str, verify: bool | None = None) -> ShardSet:
        """Open a prepared set and check it.

        Always: every shard of the manifest is there, no other shard lies beside them, sizes and counts agree.
        With ``verify`` (None: when the set has at most 2 GiB): checksums, and every value in its range.

        Raises:
            UserError: names the first bad file.
        """
        manifest = read_manifest(folder)
        folder = Path(folder)
        listed = {str(shard["file"]) for shard in manifest.shards}
        strangers = sorted(path.name for path in folder.iterdir() if _SHARD_NAME.fullmatch(path.name))
        for name in strangers:
            if name not in listed:
                raise UserError(
                    folder / name, "is not in the manifest beside it", "Remove it or prepare the data again"
                )
        if verify is None:
            verify = sum(int(shard["bytes"]) for shard in manifest.shards) <= VERIFY_BYTES
        return cls(manifest, [_open_shard(folder, shard, manifest, verify) for shard in manifest.shards])

    def gather(self, indices: np.ndarray) -> Ragged:
        """Copy the sequences ``indices`` (int64 [S], into `lengths`), in that order."""
        if len(self._shards) == 1:
            return self._shards[0].take(indices)
        shard_of = np.searchsorted(self._first, indices, side="right") - 1
        by_shard = np.argsort(shard_of, kind="stable")
        parts = []
        for shard in np.unique(shard_of):
            wanted = by_shard[shard_of[by_shard] == shard]
            parts.append(self._shards[shard].take(indices[wanted] - self._first[shard]))
        return Ragged.concatenate(parts).take(np.argsort(by_shard, kind="stable"))

    def load(self) -> ShardSet:
        """The same set held in memory as one piece: faster to gather from."""
        return ShardSet(self.manifest, [Ragged.concatenate(self._shards)])

    def __iter__(self) -> Iterator[Ragged]:
        """The shards, in order."""
        return iter(self._shards)


def _open_shard(folder: Path, entry: Mapping[str, Any], manifest: Manifest, verify: bool) -> Ragged:
    path = folder / str(entry["file"])
    if path.exists() and path.stat().st_size != int(entry["bytes"]):
        raise UserError(path, f"has {path.stat().st_size} bytes, the manifest says {entry['bytes']}", REMAKE)
    if verify and path.exists() and file_sha256(path) != entry["sha256"]:
        raise UserError(path, "its checksum differs from the manifest's", REMAKE)
    rows = map_shard(path)
    counts = {"num_sequences": len(rows), "num_tokens": len(rows.tokens), "num_masked": len(rows.masked_labels)}
    for key, count in counts.items():
        if count != int(entry[key]):
            raise UserError(path, f"{key} is {count}, the manifest says {entry[key]}", REMAKE)
    if verify:
        _check_values(path, rows, manifest)
    return rows


def _check_values(path: Path, rows: Ragged, manifest: Manifest) -> None:
    """Every value in its range; the first sequence that breaks a rule is named."""
    lengths, masked = rows.lengths, np.diff(rows.masked_offsets)
    token_of = np.repeat(np.arange(len(rows)), lengths) if len(rows) else np.empty(0, np.int64)
    masked_of = np.repeat(np.arange(len(rows)), masked) if len(rows) else np.empty(0, np.int64)
    problems = {
        "is empty or longer than max_seq_length": np.flatnonzero((lengths < 1) | (lengths > manifest.max_seq_length)),
        "has more masked tokens than max_predictions": np.flatnonzero(masked > manifest.max_predictions),
        "has a first segment longer than itself": np.flatnonzero(rows.first_lengths > lengths),
        "has a next-sentence label other than 0 or 1": np.flatnonzero(rows.next_sentence > 1),
        "has a token outside the vocabulary": token_of[rows.tokens >= manifest.vocab_size],
        "has a label outside the vocabulary": masked_of[rows.masked_labels >= manifest.vocab_size],
        "has a masked position after its end": masked_of[rows.masked_positions >= lengths[masked_of]],
    }
    for problem, where in problems.items():
        if len(where):
            raise UserError(path, f"sequence {int(where[0])} {problem}", "Prepare the data again")
