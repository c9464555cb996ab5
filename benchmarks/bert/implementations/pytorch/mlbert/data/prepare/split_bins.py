"""Split a set by sequence length into bins.

`make_bins` writes our format: a shuffled prepared set ``bin-001-128``, ``bin-129-256`` ... per bin,
and ``bins.json`` last. Shard sizes within a bin differ by at most one sequence.
`mlbert.data.prepare.shuffle` describes how it works in bounded memory.

`make_hdf5_bins` writes folders of HDF5 shards for NVIDIA-style trainers: ``128``, ``256`` ... hold
the sequences of up to that many tokens. `mlbert.data.formats.nvidia` reads them too. Sequences keep
the order of their source, which is read once from front to back in bounded memory. Shards are first
written next to the output folder and renamed when complete, so the output folder is complete or
absent, and a rerun resumes.

Legend: N sequences of the source, S sequences of a shard.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlbert.data.formats.bins import BINS, BINS_FORMAT, BINS_VERSION, read_bins
from mlbert.data.formats.manifest import (
    MAX_TOKENS,
    Manifest,
    make_folder,
    read_manifest,
    write_json,
)
from mlbert.data.formats.open import describe, open_store
from mlbert.data.prepare import shuffle
from mlbert.data.prepare.code_identity import tool_name
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.export_nvidia import (
    ROWS_A_FILE,
    NvidiaExportFile,
    NvidiaExportJob,
    check_layout,
    shard_name,
)
from mlbert.data.prepare.finished_output import check_options, is_whole, whole_shards
from mlbert.data.prepare.step_tasks import StepTasks
from mlbert.host.errors import UserError
from mlbert.host.progress import Progress

EDGES = (128, 256, 384, 512)  # tokens: the longest sequence of each bin
LAYOUTS = ("fixed", "variable")  # of HDF5 shards


def _count(
    source: Path, identity: str, edges: tuple[int, ...], piece: shuffle.ShufflePiece
) -> list[int]:
    """Return the number of the piece's sequences in every bin,
    then the number longer than the last edge.
    """
    lengths = shuffle.piece_rows(shuffle.opened(source, identity), piece).lengths
    bin_of = np.searchsorted(edges, lengths, side="left")
    return np.bincount(bin_of, minlength=len(edges) + 1).tolist()


def check_edges(edges: Sequence[int]) -> tuple[int, ...]:
    """Return the edges as a tuple.

    Raises UserError: they do not ascend within 1 and the maximum sequence length.
    """
    if len(edges) > MAX_TOKENS or max(edges, default=0) > MAX_TOKENS:
        reason = f"goes beyond {MAX_TOKENS} tokens"
        raise UserError("config.range", "--edges", reason, "Use for example 128,256,384,512")
    if not edges or edges[0] < 1 or any(low >= high for low, high in itertools.pairwise(edges)):
        reason = f"{','.join(map(str, edges)) or 'an empty list'} is not ascending"
        raise UserError("config.value", "--edges", reason, "Use for example 128,256,384,512")
    return tuple(edges)


def ranges_of(edges: Sequence[int]) -> list[tuple[int, int]]:
    """Return the shortest and longest sequence length of each bin, in tokens."""
    return [(low + 1, high) for low, high in itertools.pairwise((0, *edges))]


def make_bins(
    source: Path,
    out: Path,
    *,
    edges: Sequence[int] = EDGES,
    num_shards: int | None = None,
    seed: int = 0,
    executor: Executor = Executor(),
) -> list[Manifest]:
    """Split any store that names its vocabulary into bins; return the manifest of each.

    The same input, edges and seed produce the same bytes.

    Args:
        edges: longest sequence of each bin, tokens, ascending.
        num_shards: shards per bin (None: one per 300,000 sequences of the average bin).

    Raises UserError: edges or input bad, output finished with other options or not writable.
    """
    edges = check_edges(edges)
    info = shuffle.describe_input(source, out)
    size = info.num_sequences or len(open_store(source, verify=False))
    shards = num_shards or shuffle.default_shards(size // len(edges))
    options = {
        "step": "bins",
        "input": info.identity,
        "edges": list(edges),
        "shards": shards,
        "seed": seed,
    }
    if found := _finished(out, options, executor.progress):
        return found

    store = open_store(source, verify=False)
    shuffle.say_what_is_undone(info, executor.progress)
    pieces = shuffle.make_pieces(store)
    sizes = [piece.end - piece.first for piece in pieces]
    count = partial(_count, source, info.identity, edges)
    tasks = StepTasks(out, options, executor)
    found_counts = tasks.run(
        "counting", count, pieces, sizes, unit="sequences", is_last=False, keep=True
    )
    counts = np.asarray(found_counts, np.int64).reshape(len(pieces), len(edges) + 1)
    if counts[:, -1].any():
        reason = f"{counts[:, -1].sum()} sequences are longer than the last edge {edges[-1]}"
        raise UserError("data.too-long", source, reason, f"Use --edges up to {info.max_seq_length}")
    shuffle.check_shards(shards, int(counts.sum(axis=0).max()), " in the fullest bin")
    before = np.concatenate(
        [np.zeros((1, len(edges)), np.int64), np.cumsum(counts[:, :-1], axis=0)]
    )
    pieces = [replace(piece, before=tuple(before[piece.number].tolist())) for piece in pieces]
    targets = tuple(
        shuffle.Target(out / f"bin-{low:03d}-{high:03d}", low, high)
        for low, high in ranges_of(edges)
    )
    job = shuffle.Shuffle(
        source, info.identity, out, targets, shards, tuple(before[-1].tolist()), seed
    )
    manifests = shuffle.run_shuffle(job, pieces, tasks, store, options)
    made_by = {"tool": tool_name(), "options": options}
    bins = [
        {"folder": manifest.path.parent.name, "manifest_sha256": manifest.sha256}
        for manifest in manifests
    ]
    index = {
        "format": BINS_FORMAT,
        "version": BINS_VERSION,
        "edges": list(edges),
        "bins": bins,
        "provenance": made_by,
    }
    write_json(out / BINS, index)
    shuffle.remove_spill(out)
    tasks.finish()
    return manifests


def _finished(out: Path, options: dict[str, Any], progress: Progress) -> list[Manifest]:
    """Return the manifests of ``out`` if it was finished with the same options; none if it was not
    finished or a file is damaged.
    """
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


def make_hdf5_bins(
    source: Path,
    out: Path,
    *,
    edges: Sequence[int] = EDGES,
    layout: str = "fixed",
    executor: Executor = Executor(),
) -> dict[str, int]:
    """Split any stored set into a folder of HDF5 shards per bin;
    return the number of sequences by folder.

    Args:
        edges: longest sequence of each bin, tokens, ascending; they name the folders.
        layout: "fixed" (rows as wide as the bin's edge) or "variable".

    Raises UserError: options or input bad, a bin would be empty, the output is not writable, or it
    belongs to another source or options.
    """
    edges = check_edges(edges)
    check_layout(layout, LAYOUTS)
    if source.resolve() in (out.resolve(), *out.resolve().parents):
        raise UserError(
            "file.in-input", out, "is the input folder or inside it", "Choose another output folder"
        )
    shards = plan_shards(source, layout, open_store(source).lengths, edges)
    sizes = {
        str(edge): sum(shard.num_rows for shard in shards if shard.longest == edge)
        for edge in edges
    }
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not all(map(NvidiaExportJob(source, out, layout).is_written, shards)):
            reason = "is not empty and does not contain these bins"
            raise UserError("file.in-the-way", out, reason, "Choose another output folder")
        executor.progress(f"{out} is finished with these options: nothing to do")
        return sizes
    unfinished = out.with_name(f"{out.name}.unfinished")
    _clear(unfinished, {shard.name for shard in shards})
    for edge in edges:
        make_folder(unfinished / str(edge))
    NvidiaExportJob(source, unfinished, layout).run(shards, "bins", executor)
    try:
        os.replace(unfinished, out)  # replaces an empty folder
    except OSError as error:
        reason = f"cannot be replaced by {unfinished.name} ({error.strerror})"
        raise UserError("file.in-the-way", out, reason, "Choose another output folder") from None
    return sizes


def _clear(unfinished: Path, wanted: Set[str]) -> None:
    """Remove shards of other options and partial ones.

    Raises UserError: the folder holds something else.
    """
    for path in sorted(unfinished.rglob("*"), reverse=True):  # a folder's content before the folder
        if path.is_dir() and path.parent == unfinished and path.name.isdecimal():
            with suppress(OSError):  # not empty
                path.rmdir()
        elif not (path.is_file() and path.name.startswith("part_")):
            remedy = f"Remove {unfinished}, or choose another output folder"
            raise UserError("file.in-the-way", path, "is not a shard", remedy)
        elif path.relative_to(unfinished).as_posix() not in wanted:
            path.unlink()


def plan_shards(
    source: Path, layout: str, lengths: np.ndarray, edges: Sequence[int]
) -> list[NvidiaExportFile]:
    """Return shards of about 36,280 sequences, of equal size within a bin; ``lengths``: int32 [N].

    Raises UserError: a sequence is longer than the last edge, or a bin would be empty.
    """
    identity = describe(source).identity
    if longer := int((lengths > edges[-1]).sum()):
        reason = f"{longer} sequences are longer than the last edge {edges[-1]}"
        raise UserError("data.too-long", source, reason, f"Use --edges up to {int(lengths.max())}")
    shards = []
    for low, high in ranges_of(edges):
        places = np.flatnonzero((lengths >= low) & (lengths <= high))
        if not len(places):
            raise UserError(
                "data.empty",
                source,
                f"has no sequence of {low} to {high} tokens",
                "Use other --edges",
            )
        num_files = max(1, round(len(places) / ROWS_A_FILE))
        for index, part in enumerate(np.array_split(places, num_files)):
            name = f"{high}/{shard_name(index, num_files)}"
            first = int(part[0])
            end = int(part[-1]) + 1
            fingerprint = (identity, layout, name, low, high, first, end)
            shards.append(NvidiaExportFile(name, first, end, len(part), fingerprint, high, low))
    return shards
