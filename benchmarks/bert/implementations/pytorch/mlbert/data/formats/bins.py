"""A store made of several stores, one for each range of sequence lengths ("bin").

A folder of bins holds one prepared set per bin and ``bins.json``, which is written last and lists
the bins' upper edges, their folders and the sha256 of their manifests. Every training step takes
sequences from all bins, in proportion or in given numbers, so that all micro-batches have the same
mix of lengths (`mlbert.data.formats.order`).

Legend: N sequences, S requested sequences.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from mlbert.data.formats.base import BinInfo, Store, StoreInfo, by_part, gather_parts
from mlbert.data.formats.checksums import FileChecks
from mlbert.data.formats.manifest import REMAKE, Tokens, check_format, read_manifest
from mlbert.data.formats.prepared import ShardSet, info_of
from mlbert.data.formats.ragged import Ragged, offsets_of
from mlbert.host.errors import UserError
from mlbert.host.json_files import read_json
from mlbert.host.schema import Document, FileName, Sha256, parse_model

BINS = "bins.json"
BINS_FORMAT = "mlbert-bins"
BINS_VERSION = 1
BIN_COUNTS = "BIN_COUNTS"  # the setting, for messages


class BinnedStore(Store):
    """The sequences of several opened stores, bin after bin;
    a `mlbert.data.formats.base.Store` without packs.
    """

    num_packs = 0

    def __init__(self, info: StoreInfo, bins: Sequence[Store]) -> None:
        self.info = info
        self.bins = list(bins)
        self.first: np.ndarray = offsets_of([len(store) for store in bins])  # int64 [bins+1]

    def __len__(self) -> int:
        return int(self.first[-1])

    @cached_property
    def lengths(self) -> np.ndarray:
        """int32 [N], tokens of every sequence, bin after bin; read at first use."""
        return np.concatenate([np.empty(0, np.int32), *(store.lengths for store in self.bins)])

    def lengths_of(self, indices: np.ndarray) -> np.ndarray:
        """Return int64 [S], tokens of the sequences ``indices`` (int64 [S], bin after bin)."""
        lengths = np.empty(len(indices), np.int64)
        for number, places, within in by_part(self.first, indices):
            lengths[places] = self.bins[number].lengths_of(within)
        return lengths

    def expect_random_reads(self) -> None:
        """See `Store.expect_random_reads`."""
        for store in self.bins:
            store.expect_random_reads()

    def gather(self, indices: np.ndarray) -> Ragged:
        """Return the sequences ``indices`` (int64 [S], bin after bin as in `lengths`),
        in that order.
        """
        return gather_parts(
            self.first,
            np.asarray(indices, np.int64),
            lambda number, rows: self.bins[number].gather(rows),
        )


class ListedBin(Document):
    """A bin as listed in ``bins.json``."""

    folder: FileName
    manifest_sha256: Sha256


class BinsIndex(Document):
    """The contents of ``bins.json``."""

    edges: list[Tokens]  # longest sequence of each bin
    bins: Annotated[list[ListedBin], Field(min_length=1)]
    provenance: dict[str, Any]


def read_bins(folder: Path) -> BinsIndex:
    """Return the index of a folder of bins.

    Raises UserError if it is unreadable, inconsistent, or has another format.
    """
    path = folder / BINS
    document = read_json(path, REMAKE)
    check_format(path, document, BINS_FORMAT, BINS_VERSION, REMAKE)
    index = parse_model(BinsIndex, document, path, REMAKE)
    if len(index.bins) != len(index.edges) or index.edges != sorted(set(index.edges)):
        raise UserError(
            "data.damaged",
            path,
            f"names {len(index.bins)} bins and the edges {index.edges}",
            REMAKE,
        )
    if len({entry.folder for entry in index.bins}) < len(index.bins):
        raise UserError("data.damaged", path, "names a bin twice", REMAKE)
    return index


def describe_bins(folder: Path) -> StoreInfo:
    """Describe a folder of bins from its manifests.

    Raises UserError if a bin is missing or not the one listed in ``bins.json``,
    or if the bins have different vocabularies.
    """
    index = read_bins(folder)
    manifests = [read_manifest(folder / entry.folder) for entry in index.bins]
    for manifest, entry in zip(manifests, index.bins, strict=True):
        if manifest.sha256 != entry.manifest_sha256:
            raise UserError(
                "data.checksum",
                manifest.path,
                f"is not the manifest that {folder / BINS} names",
                REMAKE,
            )
        if manifest.vocabulary_sha256 != manifests[0].vocabulary_sha256:
            reason = f"names a different vocabulary than {manifests[0].path}"
            raise UserError("vocabulary.mismatch", manifest.path, reason, REMAKE)
    return replace(
        info_of(manifests[0]),
        folder=folder,
        kind="bins",
        identity=hashlib.sha256((folder / BINS).read_bytes()).hexdigest(),
        max_seq_length=max(manifest.max_seq_length for manifest in manifests),
        max_predictions=max(manifest.max_predictions for manifest in manifests),
        num_sequences=sum(manifest.num_sequences for manifest in manifests),
        bins=tuple(
            BinInfo(manifest.path.parent.name, manifest.num_sequences) for manifest in manifests
        ),
    )


def check_counts(info: StoreInfo, counts: Sequence[int], world_size: int) -> None:
    """Check that each bin has enough sequences for one step of ``world_size`` ranks; bins of
    unknown size pass. Raises UserError naming BIN_COUNTS.
    """
    if not info.bins:
        reason = f"is set, but {info.folder} has no length bins"
        raise UserError(
            "config.conflict",
            BIN_COUNTS,
            reason,
            "Cut it with `mlbert prepare bins`, or unset BIN_COUNTS",
        )
    if len(counts) != len(info.bins):
        names = ", ".join(bin.name for bin in info.bins)
        reason = f"has {len(counts)} numbers, but {info.folder} has {len(info.bins)} bins ({names})"
        raise UserError("config.conflict", BIN_COUNTS, reason, "Give one number for each bin")
    for bin, count in zip(info.bins, counts, strict=True):
        if bin.num_sequences is not None and bin.num_sequences < count * world_size:
            reason = (
                f"one step takes {count * world_size} sequences of bin {bin.name}, "
                f"which contains {bin.num_sequences}"
            )
            raise UserError(
                "data.too-small", BIN_COUNTS, reason, "Take fewer of it, or prepare more data"
            )


def open_bins(
    folder: Path, verify: bool | None = None, checks: FileChecks | None = None
) -> BinnedStore:
    """Open and check a folder of bins; see `mlbert.data.formats.prepared.ShardSet.open` for
    ``verify`` and ``checks``.
    """
    info = describe_bins(folder)
    return BinnedStore(
        info,
        [ShardSet.open(folder / entry.folder, verify, checks) for entry in read_bins(folder).bins],
    )
