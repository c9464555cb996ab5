"""Several stores seen as one, cut by the length of their sequences.

A folder of bins holds one prepared set per bin and ``bins.json``, written last: the bins' upper edges, their folders
and the sha256 of each one's manifest. Training takes from all bins at every step, in proportion or in given numbers, so
that every rank's micro-batches hold the same mix of lengths (`mlbert.store.order`).

Legend: N sequences, S sequences asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mlbert.core.errors import UserError
from mlbert.core.files import read_plain
from mlbert.store.base import BinInfo, Store, StoreInfo
from mlbert.store.checksums import FileChecks
from mlbert.store.documents import SHA256, judging, parse_document
from mlbert.store.manifest import MAX_TOKENS, REMAKE, read_manifest
from mlbert.store.prepared import ShardSet, info_of
from mlbert.store.ragged import Ragged, offsets_of

BINS = "bins.json"
BINS_FORMAT = "mlbert-bins"
BINS_VERSION = 1
BIN_COUNTS = "BIN_COUNTS"  # the setting, for messages


class BinnedStore:
    """The sequences of several opened stores, bin after bin; a `mlbert.store.base.Store` without packs."""

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
        """int64 [S], tokens of the sequences ``indices`` (int64 [S], bin after bin)."""
        lengths = np.empty(len(indices), np.int64)
        bin_of = np.searchsorted(self.first, indices, side="right") - 1
        for number in np.unique(bin_of).tolist():
            mine = bin_of == number
            lengths[mine] = self.bins[number].lengths_of(indices[mine] - self.first[number])
        return lengths

    def gather(self, indices: np.ndarray) -> Ragged:
        """The sequences ``indices`` (int64 [S], bin after bin as in `lengths`), in that order."""
        indices = np.asarray(indices, np.int64)
        bin_of = np.searchsorted(self.first, indices, side="right") - 1
        by_bin = np.argsort(bin_of, kind="stable")
        parts = []
        for number in np.unique(bin_of):
            wanted = by_bin[bin_of[by_bin] == number]
            parts.append(self.bins[number].gather(indices[wanted] - self.first[number]))
        return Ragged.concatenate(parts).take(np.argsort(by_bin, kind="stable"))

    def gather_packs(self, indices: np.ndarray) -> tuple[Ragged, np.ndarray]:
        """Bins hold single sequences."""
        raise AssertionError("bins hold no packs")


def read_bins(folder: Path) -> dict[str, Any]:
    """What ``bins.json`` says: edges, bins (folder, manifest_sha256), provenance. Raises UserError: unreadable, or
    another format."""
    path = folder / BINS
    content = read_plain(path)
    with judging(path, "is not the index of a folder of bins", REMAKE):
        document = parse_document(content)
        kind = f"{document.text('format')} version {document.any('version')}"
        if kind != (read := f"{BINS_FORMAT} version {BINS_VERSION}"):
            raise UserError(path, f"is {kind}, this program reads {read}", REMAKE)
        bins = [
            {"folder": entry.file("folder"), "manifest_sha256": entry.text("manifest_sha256", SHA256)}
            for entry in document.parts("bins")
        ]
        edges = document.numbers("edges", 1, MAX_TOKENS)
        if len(bins) != len(edges) or edges != sorted(set(edges)):
            raise UserError(path, f"names {len(bins)} bins and the edges {edges}", REMAKE)
        if len({entry["folder"] for entry in bins}) < len(bins):
            raise UserError(path, "names a bin twice", REMAKE)
        return {"edges": edges, "bins": bins, "provenance": document.part("provenance").values()}


def describe_bins(folder: Path) -> StoreInfo:
    """What is known of a folder of bins from its manifests alone. Raises UserError: a bin is missing or not the one
    that ``bins.json`` names, or bins do not fit each other."""
    index = read_bins(folder)
    manifests = [read_manifest(folder / entry["folder"]) for entry in index["bins"]]
    for manifest, entry in zip(manifests, index["bins"], strict=True):
        if manifest.sha256 != entry["manifest_sha256"]:
            raise UserError(manifest.path, f"is not the manifest that {folder / BINS} names", REMAKE)
        if manifest.vocabulary_sha256 != manifests[0].vocabulary_sha256:
            raise UserError(manifest.path, f"names another vocabulary than {manifests[0].path}", REMAKE)
    return replace(
        info_of(manifests[0]),
        folder=folder,
        kind="bins",
        identity=hashlib.sha256((folder / BINS).read_bytes()).hexdigest(),
        max_seq_length=max(manifest.max_seq_length for manifest in manifests),
        max_predictions=max(manifest.max_predictions for manifest in manifests),
        num_sequences=sum(manifest.num_sequences for manifest in manifests),
        bins=tuple(BinInfo(manifest.path.parent.name, manifest.num_sequences) for manifest in manifests),
    )


def check_counts(info: StoreInfo, counts: Sequence[int], world_size: int) -> None:
    """Make sure that a set has bins to take so many sequences from, for each of ``world_size`` ranks; a bin whose size
    is not known passes. Raises UserError naming BIN_COUNTS."""
    if not info.bins:
        reason = f"is set, and {info.folder} has no length bins"
        raise UserError(BIN_COUNTS, reason, "Cut it with `mlbert prepare bins`, or unset BIN_COUNTS")
    if len(counts) != len(info.bins):
        names = ", ".join(bin.name for bin in info.bins)
        reason = f"has {len(counts)} numbers, {info.folder} has {len(info.bins)} bins ({names})"
        raise UserError(BIN_COUNTS, reason, "Give one number for each bin")
    for bin, count in zip(info.bins, counts, strict=True):
        if bin.num_sequences is not None and bin.num_sequences < count * world_size:
            reason = f"one step takes {count * world_size} sequences of bin {bin.name}, which holds {bin.num_sequences}"
            raise UserError(BIN_COUNTS, reason, "Take fewer of it, or prepare more data")


def open_bins(folder: Path, verify: bool | None = None, checks: FileChecks | None = None) -> BinnedStore:
    """Open and check a folder of bins; see `mlbert.store.prepared.ShardSet.open` for ``verify`` and ``checks``."""
    info = describe_bins(folder)
    entries = read_bins(folder)["bins"]
    return BinnedStore(info, [ShardSet.open(folder / entry["folder"], verify, checks) for entry in entries])
