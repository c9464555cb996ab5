"""Bins: the sequences of a set cut by length into prepared sets, each shuffled by itself.

A folder ``bin-001-128``, ``bin-129-256`` ... for every bin and ``bins.json``, written last. The shards of a bin differ
by one sequence at most. See `mlbert.data.prepare.shuffle` for how it is done in bounded memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mlbert.data.formats.bins import BINS, BINS_FORMAT, BINS_VERSION, read_bins
from mlbert.data.formats.manifest import MAX_TOKENS, Manifest, read_manifest, write_json
from mlbert.data.formats.open import describe, open_store
from mlbert.data.prepare import shuffle
from mlbert.data.prepare.finished import check_options, is_whole, tool_name, whole_shards
from mlbert.data.prepare.jobs import SILENT, Progress, run_jobs
from mlbert.host.errors import UserError

EDGES = (128, 256, 384, 512)


@dataclass(frozen=True)
class Counting:
    """Counts the sequences of every bin in a piece; picklable."""

    source: Path
    identity: str
    edges: tuple[int, ...]

    def count(self, piece: shuffle.Piece) -> list[int]:
        """Sequences of the piece in every bin; after the bins, those longer than the last edge."""
        lengths = shuffle.piece_rows(shuffle.opened(self.source, self.identity), piece).lengths
        bin_of = np.searchsorted(self.edges, lengths, side="left")
        return np.bincount(bin_of, minlength=len(self.edges) + 1).tolist()


def check_edges(edges: Sequence[int]) -> tuple[int, ...]:
    """The edges. Raises UserError: they do not ascend from 1 or more, to what a sequence may have."""
    if len(edges) > MAX_TOKENS or max(edges, default=0) > MAX_TOKENS:
        raise UserError(
            "config.range", "--edges", f"goes beyond {MAX_TOKENS} tokens", "Use for example 128,256,384,512"
        )
    if not edges or edges[0] < 1 or any(low >= high for low, high in itertools.pairwise(edges)):
        raise UserError(
            "config.value", "--edges", f"{','.join(map(str, edges))} does not ascend", "Use for example 128,256,384,512"
        )
    return tuple(edges)


def ranges_of(edges: Sequence[int]) -> list[tuple[int, int]]:
    """Shortest and longest sequence of each bin, tokens."""
    return [(low + 1, high) for low, high in itertools.pairwise((0, *edges))]


def make_bins(
    source: Path,
    out: Path,
    *,
    edges: Sequence[int] = EDGES,
    num_shards: int | None = None,
    seed: int = 0,
    workers: int = 1,
    progress: Progress = SILENT,
) -> list[Manifest]:
    """Cut any kind of store that knows its vocabulary into bins; returns the manifest of each. Same input, edges and
    seed, same bytes.

    Args:
        edges: longest sequence of each bin, tokens, ascending.
        num_shards: of each bin; None: one for some 300,000 sequences of the average bin.

    Raises UserError: edges or input bad, output finished with other options or not writable.
    """
    edges = check_edges(edges)
    info = shuffle.describe_input(source, out)
    size = info.num_sequences or len(open_store(source, verify=False))
    shards = num_shards or shuffle.default_shards(size // len(edges))
    options = {"step": "bins", "input": info.identity, "edges": list(edges), "shards": shards, "seed": seed}
    if found := _finished(out, options, progress):
        return found

    store = open_store(source, verify=False)
    shuffle.say_what_is_undone(info, progress)
    pieces = shuffle.make_pieces(store)
    sizes = [piece.end - piece.first for piece in pieces]
    counting = Counting(source, info.identity, edges)
    common: dict[str, Any] = {"where": out, "sizes": sizes, "unit": "sequences", "workers": workers}
    counts = np.asarray(run_jobs(counting.count, pieces, name="counting", progress=progress, **common), np.int64)
    counts = counts.reshape(len(pieces), len(edges) + 1)
    if counts[:, -1].any():
        reason = f"{counts[:, -1].sum()} sequences are longer than the last edge {edges[-1]}"
        raise UserError("data.too-long", source, reason, f"Use --edges up to {info.max_seq_length}")
    shuffle.check_shards(shards, int(counts.sum(axis=0).max()), " in the fullest bin")
    before = np.concatenate([np.zeros((1, len(edges)), np.int64), np.cumsum(counts[:, :-1], axis=0)])
    pieces = [replace(piece, before=tuple(before[piece.number].tolist())) for piece in pieces]
    names = {high: f"bin-{low:03d}-{high:03d}" for low, high in ranges_of(edges)}
    targets = tuple(shuffle.Target(out / names[high], shards, low, high) for low, high in ranges_of(edges))
    job = shuffle.Shuffle(source, info.identity, out, targets, tuple(before[-1].tolist()), seed)
    made = zip(targets, shuffle.run_shuffle(job, pieces, workers=workers, progress=progress), strict=True)
    manifests = [
        shuffle.finish(writer, store, options, max_seq_length=target.longest, entries=entries)
        for target, (writer, entries) in made
    ]
    made_by = {"tool": tool_name(), "options": options}
    bins = [{"folder": manifest.path.parent.name, "manifest_sha256": manifest.sha256} for manifest in manifests]
    index = {"format": BINS_FORMAT, "version": BINS_VERSION, "edges": list(edges), "bins": bins, "provenance": made_by}
    write_json(out / BINS, index)
    shuffle.remove_spill(out)
    return manifests


def _finished(out: Path, options: dict[str, Any], progress: Progress) -> list[Manifest]:
    """The manifests of ``out`` when it was finished with the same options; none when it was not finished, or a
    file is not as it was made."""
    if not (out / BINS).exists():
        return []
    found = read_bins(out)
    check_options(out, found.provenance, options)
    describe(out)
    manifests = [read_manifest(out / entry.folder) for entry in found.bins]

    if not is_whole(out, lambda: whole_shards(*manifests), progress):
        return []
    shuffle.remove_spill(out)
    return manifests
