"""The prepared set: ragged HDF5 shards and a manifest.

A folder has ``manifest.json``, ``checksums.xxh3`` (`mlbert.data.formats.checksums`), and shards
``shard-00000-of-00004.h5`` etc. (`mlbert.data.formats.shard_file`). Files are written under a
temporary name, flushed to disk and renamed, the manifest last, so that a folder with a manifest is
always complete. A packed set also records which consecutive sequences share a pack.

Legend: N sequences of the set, S requested sequences, P packs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from mlbert.data.formats import checksums
from mlbert.data.formats.base import Store, StoreInfo, by_part, gather_parts
from mlbert.data.formats.checks import first_problem
from mlbert.data.formats.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    REMAKE,
    SHARD_NAME,
    ListedShard,
    Manifest,
    file_sha256,
    make_folder,
    read_manifest,
    write_json,
)
from mlbert.data.formats.ragged import Ragged, check_spans, offsets_of, span_members
from mlbert.data.formats.shard_file import (
    PACK_OFFSETS,
    Shard,
    content_sha256,
    is_written,
    map_file,
    write_shard_file,
)
from mlbert.host.errors import UserError

VERIFY_BYTES = 2 << 30  # sets up to this size are hashed when opened, larger ones shard by shard
_MANY_OF_A_SHARD = 32  # sequences per shard above which gathering by index arrays is faster


def shard_name(index: int, count: int) -> str:
    """Return the file name of shard ``index`` of ``count``."""
    return f"shard-{index:05d}-of-{count:05d}.h5"


@dataclass(frozen=True)
class ShardEntry:
    """One shard's entry in the manifest."""

    values: dict[str, Any]  # JSON-serializable: file, sha256, bytes, counts
    xxh3: str  # of the file
    histogram: np.ndarray  # int64 [longest sequence + 1], number of sequences of each length


class ShardWriter:
    """Writes a prepared set shard by shard.

    Several processes may write different shards with `write_shard`; one of them then calls
    `finish`, which writes the manifest. The fingerprint identifies input and options: a rerun keeps
    existing shards with the same fingerprint.
    """

    def __init__(self, folder: Path, num_shards: int, fingerprint: str) -> None:
        self.folder = Path(folder)
        self.num_shards = num_shards
        self.fingerprint = fingerprint
        make_folder(self.folder)

    def path(self, index: int) -> Path:
        """Return the final path of shard ``index``."""
        return self.folder / shard_name(index, self.num_shards)

    def clear_leftovers(self) -> None:
        """Remove files of earlier runs: the manifest (which makes the set unfinished), the
        checksums, temporary files, and shards of another count.
        """
        checksums.remove_unfinished(self.folder, MANIFEST, SHARD_NAME, self.num_shards)

    def is_written(self, index: int) -> bool:
        """Return True if an earlier, interrupted run left shard ``index`` with the same
        fingerprint.
        """
        return is_written(self.path(index), self.fingerprint)

    def write_shard(self, index: int, rows: Ragged, pack_offsets: np.ndarray | None = None) -> None:
        """Write shard ``index`` atomically.

        In a packed set, pack p is rows pack_offsets[p] to pack_offsets[p+1] (int64 [P+1]). Raises
        UserError if the disk is full or the folder is not writable.
        """
        extra = {} if pack_offsets is None else {PACK_OFFSETS: pack_offsets}
        write_shard_file(self.path(index), rows, self.fingerprint, extra)

    def entry(self, index: int) -> ShardEntry:
        """Read all of shard ``index`` and return its manifest entry.

        Raises UserError if it differs from what was written.
        """
        path = self.path(index)
        shard = map_file(path)
        xxh3 = checksums.file_xxh3(path)
        if content_sha256(shard.rows, shard.extra) != shard.content_sha256:
            reason = "differs from what was written to it"
            raise UserError(
                "data.checksum", path, reason, "Check the disk, remove the file and try again"
            )
        values: dict[str, Any] = {
            "file": path.name,
            "sha256": file_sha256(path),
            "content_sha256": shard.content_sha256,
            "bytes": path.stat().st_size,
            **_counts(shard),
        }
        return ShardEntry(values, xxh3, np.bincount(shard.rows.lengths))

    def finish(
        self,
        *,
        vocabulary: Mapping[str, Any],
        max_seq_length: int,
        max_predictions: int,
        provenance: Mapping[str, Any],
        packs: Mapping[str, int] | None = None,
        entries: Sequence[ShardEntry] | None = None,
    ) -> Manifest:
        """Write the manifest.

        Args:
            vocabulary: {"sha256": of vocab.txt, "size": entries}.
            max_seq_length, max_predictions: limits of one sequence, tokens.
            provenance: JSON-serializable: options, seed, tool version.
            packs: for a packed set: {"max_tokens": slots of a pack, "max_sequences": maximum
                sequences of a pack}.
            entries: the result of `entry` for every shard; by default, shards are read back now.
        """
        entries = entries or [self.entry(index) for index in range(self.num_shards)]
        histogram = np.zeros(max_seq_length + 1, np.int64)
        for entry in entries:
            histogram[: len(entry.histogram)] += entry.histogram
        shards = [entry.values for entry in entries]
        totals = {
            key: sum(shard[key] for shard in shards)
            for key in ("num_sequences", "num_tokens", "num_masked")
        }
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
        if packs is not None:
            num_packs = sum(shard["num_packs"] for shard in shards)
            slots = num_packs * packs["max_tokens"]
            fill = round(totals["num_tokens"] / slots, 6) if slots else 1.0
            document["packs"] = {**packs, "num_packs": num_packs, "fill": fill}
        checksums.write_checksums(
            self.folder, {entry.values["file"]: entry.xxh3 for entry in entries}
        )
        write_json(self.folder / MANIFEST, document)
        return read_manifest(self.folder)


class ShardSet(Store):
    """A prepared set opened for reading, a `mlbert.data.formats.base.Store`.

    Each shard is mapped at first use by calling ``touch`` with its number.
    """

    def __init__(
        self,
        manifest: Manifest,
        shards: Sequence[Shard | None],
        touch: Callable[[int], Shard] | None = None,
    ) -> None:
        self.manifest = manifest
        self.info = info_of(manifest)
        self.num_packs = manifest.num_packs
        self._shards = list(shards)
        self._touch = touch or partial(matching_shard, manifest)
        self._is_random = False
        # With one entry, the set has one shard or is loaded as one piece.
        parts: Sequence[Manifest | ListedShard] = (
            [manifest] if len(shards) == 1 else manifest.shards
        )
        self._first = offsets_of([part.num_sequences for part in parts])
        self._first_pack = offsets_of([part.num_packs for part in parts])

    def __len__(self) -> int:
        return self.manifest.num_sequences

    @cached_property
    def lengths(self) -> np.ndarray:
        """int32 [N], tokens of every sequence, shard by shard; read at first use (4 bytes per
        sequence). Raises UserError if a length is out of range.
        """
        parts = [np.empty(0, np.int32)]
        for number, rows in enumerate(self):
            lengths = rows.lengths
            if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= self.info.max_seq_length:
                name = self.manifest.shards[number].file
                reason = f"has a sequence of {lengths.min()} or {lengths.max()} tokens"
                raise UserError("data.damaged", self.info.folder / name, reason, REMAKE)
            parts.append(lengths.astype(np.int32))
        return np.concatenate(parts)

    def lengths_of(self, indices: np.ndarray) -> np.ndarray:
        """Return int64 [S], tokens of the sequences ``indices`` (int64 [S]),
        without reading other lengths.
        """
        lengths = np.empty(len(indices), np.int64)
        for number, places, within in by_part(self._first, indices):
            offsets = self.shard(number).rows.offsets
            with self._damage():
                check_spans(offsets[within], offsets[within + 1], int(offsets[-1]))
            lengths[places] = offsets[within + 1] - offsets[within]
        return lengths

    @contextmanager
    def _damage(self) -> Iterator[None]:
        """Convert ValueErrors from inconsistent arrays to UserErrors."""
        try:
            yield
        except ValueError as error:
            remedy = "`mlbert prepare verify` names the file"
            raise UserError(
                "data.damaged", self.info.folder, f"is damaged: {error}", remedy
            ) from None

    @classmethod
    def open(
        cls,
        folder: Path | str,
        verify: bool | None = None,
        checks: checksums.FileChecks | None = None,
    ) -> ShardSet:
        """Open a prepared set and check it.

        Always checks that the folder has exactly the manifest's shards with the listed sizes (with
        ``checks``, this process's share of them), and at first use of a shard, its counts and
        content hash. Checksums and values are checked now (``verify`` True), never (False), or by
        default now if the set has at most 2 GiB and otherwise at first use of each shard; with
        ``checks``, the latter covers only checksums, in the background. Raises UserError naming the
        first bad file.
        """
        manifest = read_manifest(folder)
        checksums.check_files(manifest, *(checks.share if checks else ()))
        count = len(manifest.shards)
        if verify is False:
            return cls(manifest, [None] * count)
        sums = checksums.file_sums(manifest)
        if verify or manifest.num_bytes <= VERIFY_BYTES:
            return cls(
                manifest, [verified_shard(manifest, index, sums[index]) for index in range(count)]
            )

        def touch(index: int) -> Shard:
            if checks is None:
                return verified_shard(manifest, index, sums[index])
            checks.add(index, sums[index])
            return matching_shard(manifest, index)

        return cls(manifest, [None] * count, touch=touch)

    def shard(self, index: int) -> Shard:
        """Return shard ``index`` of the set, mapped into memory."""
        shard = self._shards[index]
        if shard is None:  # two threads may both map it, which is harmless
            shard = self._shards[index] = self._touch(index)
            self._advise(shard)
        return shard

    def expect_random_reads(self) -> None:
        """See `Store.expect_random_reads`."""
        self._is_random = True
        for shard in self._shards:
            self._advise(shard)

    def _advise(self, shard: Shard | None) -> None:
        if self._is_random and shard is not None and shard.files is not None:
            shard.files.expect_random_reads()

    def gather(self, indices: np.ndarray) -> Ragged:
        """Copy the sequences ``indices`` (int64 [S], shard by shard as in `lengths`), in that
        order. Raises UserError if they are damaged.
        """
        with self._damage():
            return self._gather(np.asarray(indices, np.int64))

    def _gather(self, indices: np.ndarray) -> Ragged:
        if len(self._shards) == 1:
            return self.shard(0).rows.take(indices)
        shard_of = np.searchsorted(self._first, indices, side="right") - 1
        if len(indices) <= _MANY_OF_A_SHARD * len(np.unique(shard_of)):
            within = indices - self._first[shard_of]
            return self._ranges(shard_of, within, within + 1)
        return gather_parts(
            self._first, indices, lambda number, rows: self.shard(number).rows.take(rows)
        )

    def gather_packs(self, indices: np.ndarray) -> tuple[Ragged, np.ndarray]:
        """Return the sequences of the packs ``indices`` (int64), pack by pack, and the number in
        each (int64 [packs]). Raises UserError if they are damaged.
        """
        indices = np.asarray(indices, np.int64)
        with self._damage():
            if len(self._shards) == 1:
                offsets = self._pack_offsets(0)
                first = offsets[indices]
                end = offsets[indices + 1]
                check_spans(first, end, len(self))
                return self.shard(0).rows.take(span_members(first, end - first)), end - first
            shard_of = np.searchsorted(self._first_pack, indices, side="right") - 1
            first = np.empty_like(indices)
            end = np.empty_like(indices)
            within = indices - self._first_pack[shard_of]
            for number, (shard, pack) in enumerate(
                zip(shard_of.tolist(), within.tolist(), strict=True)
            ):
                first[number], end[number] = self._pack_offsets(shard)[pack : pack + 2]
            check_spans(first, end, np.diff(self._first)[shard_of])
            return self._ranges(shard_of, first, end), end - first

    def pack_lengths(self, indices: np.ndarray) -> np.ndarray:
        """See `Store.pack_lengths`.

        Reads the offsets of the packs and of their sequences. Raises UserError if they are damaged.
        """
        lengths = np.empty(len(indices), np.int64)
        for number, places, within in by_part(self._first_pack, np.asarray(indices, np.int64)):
            packs = self._pack_offsets(number)
            rows = self.shard(number).rows
            with self._damage():
                check_spans(packs[within], packs[within + 1], len(rows))
                first = rows.offsets[packs[within]]
                end = rows.offsets[packs[within + 1]]
            lengths[places] = end - first
        return lengths

    def _pack_offsets(self, index: int) -> np.ndarray:
        offsets = self.shard(index).pack_offsets
        assert offsets is not None, "a set without packs"
        return offsets

    def _ranges(self, shard_of: np.ndarray, first: np.ndarray, end: np.ndarray) -> Ragged:
        """Return the sequences first[i] to end[i], exclusive, of shard shard_of[i] for each i,
        concatenated; each range is one copy.
        """
        ranges = zip(shard_of.tolist(), first.tolist(), end.tolist(), strict=True)
        return Ragged.of_ranges((self.shard(index).rows, low, high) for index, low, high in ranges)

    def load(self) -> ShardSet:
        """Return the set loaded into memory as one shard, for faster gathering."""
        with self._damage():
            rows = Ragged.concatenate(list(self))
            extra = {}
        if self.num_packs:
            counts = [np.diff(self._pack_offsets(index)) for index in range(len(self._shards))]
            extra = {PACK_OFFSETS: offsets_of(np.concatenate(counts))}
        return ShardSet(self.manifest, [Shard(rows, extra)])

    def __iter__(self) -> Iterator[Ragged]:
        """Iterate over the sequences of each shard, in order."""
        return (self.shard(index).rows for index in range(len(self._shards)))


def info_of(manifest: Manifest) -> StoreInfo:
    """Return the manifest's facts in the common form of all formats."""
    return StoreInfo(
        folder=manifest.path.parent,
        kind="mlbert",
        identity=manifest.sha256,
        max_seq_length=manifest.max_seq_length,
        max_predictions=manifest.max_predictions,
        num_sequences=manifest.num_sequences,
        vocab_size=manifest.vocab_size,
        vocabulary_sha256=manifest.vocabulary_sha256,
        lower_case=manifest.lower_case,
        max_pack_tokens=manifest.max_pack_tokens,
        num_packs=manifest.num_packs or None,
    )


def _counts(shard: Shard) -> dict[str, int]:
    """Return the counts of a shard that a manifest records."""
    rows = shard.rows
    counts = {
        "num_sequences": len(rows),
        "num_tokens": len(rows.tokens),
        "num_masked": len(rows.masked_labels),
    }
    return (
        counts
        if shard.pack_offsets is None
        else {**counts, "num_packs": len(shard.pack_offsets) - 1}
    )


def matching_shard(manifest: Manifest, index: int) -> Shard:
    """Map shard ``index`` and check that it is the one in the manifest, reading only its header.

    Raises UserError if it is missing, damaged, or belongs to another set.
    """
    entry = manifest.shards[index]
    path = manifest.path.parent / entry.file
    shard = map_file(path)
    checksums.check_size(path, entry)
    if entry.content_sha256 not in (None, shard.content_sha256):
        raise UserError(
            "data.mixed", path, "does not belong to the same set as the manifest", REMAKE
        )
    if manifest.max_pack_tokens is not None and shard.pack_offsets is None:
        raise UserError("data.damaged", path, "has no packs, although the manifest says so", REMAKE)
    for key, count in _counts(shard).items():
        if count != (listed := getattr(entry, key)):
            raise UserError(
                "data.damaged", path, f"{key} is {count}, but the manifest says {listed}", REMAKE
            )
    return shard


def verified_shard(
    manifest: Manifest, index: int, expected: checksums.FileSum | None = None
) -> Shard:
    """Map shard ``index`` as `matching_shard`, and check its checksum and every value.

    ``expected`` is its `file_sums` entry, if already known.
    Raises UserError naming the file and the first bad sequence.
    """
    expected = expected or checksums.file_sums(manifest)[index]
    if expected.path.exists():
        checksums.check_size(expected.path, manifest.shards[index])
        if problem := expected.problem():
            raise problem
    shard = matching_shard(manifest, index)
    wrong = first_problem(shard.rows, info_of(manifest), shard.pack_offsets)
    if wrong is not None:
        raise UserError("data.damaged", expected.path, wrong, "Prepare the data again")
    return shard
