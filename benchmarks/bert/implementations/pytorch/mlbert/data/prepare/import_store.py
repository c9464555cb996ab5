"""Import any stored data set into a prepared set: NVIDIA's shards of every kind, bins, TFRecords.

Each input file becomes one shard; a set without separate files is cut into pieces. Packs stay
packs. Every sequence is checked against the vocabulary. Shards are written atomically and kept on a
rerun; the manifest is written last.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mlbert.data.formats import nvidia
from mlbert.data.formats.base import Store, StoreInfo
from mlbert.data.formats.bins import BINS
from mlbert.data.formats.checks import sequences_of
from mlbert.data.formats.checksums import check_listed
from mlbert.data.formats.manifest import (
    MANIFEST,
    Manifest,
    file_sha256,
    json_sha256,
    vocabulary_sha256,
)
from mlbert.data.formats.nvidia_index import bin_name, bins_of, check_bins, list_shards
from mlbert.data.formats.nvidia_shard import inspect
from mlbert.data.formats.open import check_vocabulary, describe, open_store
from mlbert.data.formats.padded import Widths
from mlbert.data.formats.prepared import ShardEntry, ShardWriter
from mlbert.data.formats.ragged import Ragged, offsets_of
from mlbert.data.formats.shard_file import map_file
from mlbert.data.formats.vocabulary_checks import another_vocabulary
from mlbert.data.formats.wordpiece import load_vocabulary
from mlbert.data.prepare.code_identity import tool_name
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.finished_output import finished_manifest, keep_apart
from mlbert.data.prepare.step_tasks import INPUTS, StepTasks, stamps
from mlbert.host.errors import UserError
from mlbert.host.files import read_plain, write_atomically
from mlbert.host.json_files import parse_json

PIECE = 32_768  # rows per shard if the input has no separate files
LISTED = 1000  # bad rows listed in the manifest; all are counted
_BLOCK = 4096
_BYTES_A_ROW = 1000  # for the estimate of a set without files
Result = TypeVar("Result")
# Good rows of a source, int64 [rows+1] offsets of its packs if it has packs,
# and a line for each skipped row.
RowsRead = tuple[Ragged, np.ndarray | None, list[str]]


@lru_cache(maxsize=1)
def opened(folder: Path) -> Store:
    """Return a set, opened once per worker."""
    return open_store(folder)


def gather_rows(store: Store, rows: np.ndarray, packed: bool) -> tuple[Ragged, np.ndarray]:
    """Return the sequences of some rows (int64 [R]), and int64 [R] sequences per row."""
    return (
        store.gather_packs(rows) if packed else (store.gather(rows), np.ones(len(rows), np.int64))
    )


def read_past_errors(
    read: Callable[[np.ndarray], Result], first: int, end: int, block: int
) -> Iterator[Result | UserError]:
    """Yield the results of ``read`` for the rows from ``first`` to ``end`` (exclusive), in order,
    at most ``block`` at a time. If it raises `UserError`, halve the rows down to single ones, and
    yield the error of each bad row instead.
    """
    for start in range(first, end, block):
        stop = min(start + block, end)
        try:
            result = read(np.arange(start, stop))
        except UserError as error:
            if stop - start == 1:
                yield error
            else:
                yield from read_past_errors(read, start, stop, (stop - start + 1) // 2)
        else:
            yield result


def make_shard(
    writer: ShardWriter, index: int, skip_bad: bool, read: Callable[[], RowsRead]
) -> tuple[ShardEntry, list[str]]:
    """Write what ``read`` returns as shard ``index`` unless an earlier run has done so.

    Return the shard's entry, and what was skipped, which is recorded next to the shards until the
    manifest lists it, because a rerun keeps shards.
    """
    record = writer.folder / f"skipped-{index:05d}.json"
    skipped = _read_record(record) if skip_bad else []
    if skipped is None or not writer.is_written(index):
        rows, pack_offsets, skipped = read()
        if skip_bad:  # before the shard is written, so that every existing shard has its record
            write_atomically(record, json.dumps(skipped))
        writer.write_shard(index, rows, pack_offsets)
    return writer.entry(index), skipped


def _read_record(path: Path) -> list[str] | None:
    """Return what was skipped in a shard, or None if that is unknown."""
    try:
        return [str(line) for line in parse_json(read_plain(path))]
    except (ValueError, TypeError):  # UserError too
        return None


def remove_records(out: Path) -> None:
    """Remove all records of what was skipped."""
    for path in out.glob("skipped-?????.json"):
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class ImportPart:
    """The source of one shard: a file, or rows first to end of a set."""

    name: str
    path: Path | None
    first: int
    end: int
    num_bytes: int


@dataclass(frozen=True)
class PartResult:
    """A finished shard."""

    source: dict[str, str]  # name and sha256 of the source
    entry: ShardEntry  # for the manifest
    skipped: list[str]  # a line for each skipped row (or file)
    info: StoreInfo | None  # limits of its source; None for a skipped file


@dataclass(frozen=True)
class NvidiaImportJob:
    """One import."""

    source: Path
    vocab_file: Path  # the vocabulary of the source
    out: Path
    parts: tuple[ImportPart, ...]  # see `parts_of`
    packed: bool  # whether rows are packs
    limits: Widths = nvidia.DEFAULT_LIMITS  # used if the data has none
    skip_bad: bool = False  # skip bad rows and unreadable files instead of stopping

    def options(self) -> dict[str, Any]:
        """Return the input and options, which are compared on a rerun."""
        return {
            "input": [[part.name, part.num_bytes] for part in self.parts],
            "vocabulary": vocabulary_sha256(self.vocab_file),
            "max_seq_length": self.limits.max_seq_length,
            "max_predictions": self.limits.max_predictions,
            "skip_bad": self.skip_bad,
        }

    def make_shard(self, index: int) -> PartResult:
        """Make shard ``index`` unless an earlier run has done so.

        Raises UserError, which names the first bad file and row, unless these are skipped.
        """
        part = self.parts[index]
        if part.path is not None:
            check_listed(part.path, self.source)
        store = self._open(part)  # refuses a damaged file before all of it is hashed
        sha256 = describe(self.source).identity if part.path is None else file_sha256(part.path)
        fingerprint = json_sha256([part.name, part.first, part.end, sha256, self.options()])
        writer = ShardWriter(self.out, len(self.parts), fingerprint)
        entry, skipped = make_shard(writer, index, self.skip_bad, lambda: _read(store, part, self))
        info = None if isinstance(store, UserError) else store.info
        return PartResult({"file": part.name, "sha256": sha256}, entry, skipped, info)

    def _open(self, part: ImportPart) -> Store | UserError:
        """Open the part's store; if bad files are skipped, return the error instead."""
        if part.path is None:
            return opened(self.source)
        try:
            store = nvidia.NvidiaStore(
                part.path, limits=self.limits, strict=not self.skip_bad, cached=False
            )
            if bool(store.num_packs) != self.packed and len(store):
                reason = (
                    f"{'does not contain' if self.packed else 'contains'} packs, "
                    "unlike the files before it"
                )
                raise UserError("data.mixed", part.path, reason, "Use one kind per folder")
        except UserError as error:
            if not self.skip_bad:
                raise
            return error
        return store


def parts_of(source: Path) -> tuple[list[ImportPart], bool]:
    """Split ``source`` into import parts; also return whether its rows are packs.

    Raises UserError: there is nothing to import.
    """
    ours = (source / MANIFEST).exists() or (source / BINS).exists()
    if not ours and (source.is_file() or (source.is_dir() and nvidia.accepts(source))):
        paths = [path for group in bins_of(source) for path in group] or list_shards(source)
        top = source.parent if source.is_file() else source
        parts = [
            ImportPart(str(path.relative_to(top)), path, 0, -1, path.stat().st_size)
            for path in paths
        ]
        return parts, _first_readable_is_packed(paths)
    store = open_store(source)
    count = store.num_packs or len(store)
    pieces = [(first, min(first + PIECE, count)) for first in range(0, count, PIECE)]
    parts = [
        ImportPart(f"rows {a} to {b - 1}", None, a, b, (b - a) * _BYTES_A_ROW) for a, b in pieces
    ]
    return parts, store.num_packs > 0


def _first_readable_is_packed(paths: list[Path]) -> bool:
    """Return whether the first readable file holds packs.

    The jobs of unreadable files report or skip them.
    """
    for path in paths:
        try:
            return inspect(path).kind == "packed"
        except UserError:
            continue
    return False


def import_store(
    source: Path,
    vocab_file: Path,
    out: Path,
    *,
    limits: Widths = nvidia.DEFAULT_LIMITS,
    skip_bad: bool = False,
    executor: Executor = Executor(),
) -> Manifest:
    """Import any stored set, or one HDF5 file, into a prepared set;
    each worker holds one shard in memory.

    Args:
        vocab_file: the vocabulary of the source; ids and the positions of [CLS]
            and [SEP] are checked against it.
        limits: maximum tokens of a row and masked tokens of a sequence, used if the data has none.
        skip_bad: skip bad rows and unreadable files, count and list them.

    Raises UserError, which names the first bad file and row;
    also if ``out`` was finished with other input or options.
    """
    keep_apart(out, [source])
    load_vocabulary(vocab_file)  # report a bad one before anything is read
    check_vocabulary(describe(source if source.is_dir() else source.parent), vocab_file)
    parts, packed = parts_of(source)
    job = NvidiaImportJob(source, vocab_file, out, tuple(parts), packed, limits, skip_bad)
    options = json.loads(json.dumps(job.options()))
    if found := finished_manifest(out, options, executor.progress):
        remove_records(out)
        return found
    plan = {**options, INPUTS: stamps([part.path for part in parts if part.path])}
    plan["source"] = None if plan[INPUTS] else describe(source).identity
    tasks = StepTasks(out, plan, executor)
    if executor.share.merges:
        ShardWriter(out, len(parts), "").clear_leftovers()
    results = tasks.run(
        "import", job.make_shard, range(len(parts)), [part.num_bytes for part in parts]
    )
    manifest = _finish(job, results, options)
    remove_records(out)
    tasks.finish()
    count = manifest.provenance["skipped"]["count"]
    if count:
        executor.progress(f"{count:,} bad rows or files skipped; {out / MANIFEST} lists them")
    return manifest


def _finish(job: NvidiaImportJob, results: list[PartResult], options: dict[str, Any]) -> Manifest:
    vocabulary = load_vocabulary(job.vocab_file)
    seen: dict[str, str] = {}
    for result in results:
        content = str(result.entry.values["content_sha256"])
        name = result.source["file"]
        if result.entry.values["num_sequences"] and seen.setdefault(content, name) != name:
            reason = f"contains the same sequences as {seen[content]}"
            raise UserError(
                "prepare.other-options", job.source / name, reason, "Remove one of them"
            )
    _check_bins(job, results)
    skipped = [line for result in results for line in result.skipped]
    infos = [result.info for result in results if result.info]
    if not seen:
        reason = (
            f"contains no good sequence; first: {skipped[0]}" if skipped else "contains no sequence"
        )
        raise UserError("data.empty", job.source, reason, "Check the data and the vocabulary")
    return ShardWriter(job.out, len(job.parts), "").finish(
        vocabulary={"sha256": options["vocabulary"], "size": len(vocabulary)},
        max_seq_length=max(info.max_seq_length for info in infos),
        max_predictions=max(info.max_predictions for info in infos),
        provenance={
            "tool": tool_name(),
            "options": options,
            "sources": [result.source for result in results],
            "skipped": {"count": len(skipped), "first": skipped[:LISTED]},
        },
        packs=_packs(job, infos) if job.packed else None,
        entries=[result.entry for result in results],
    )


def _check_bins(job: NvidiaImportJob, results: list[PartResult]) -> None:
    """Check that files of several folders are length bins of one set."""
    found: dict[str, list[int]] = {}
    for part, result in zip(job.parts, results, strict=True):
        if part.path is not None:
            found.setdefault(bin_name(part.path), []).extend(
                np.flatnonzero(result.entry.histogram).tolist()
            )
    lengths = {name: values for name, values in found.items() if values}
    check_bins(job.source, {name: (min(values), max(values)) for name, values in lengths.items()})


def _packs(job: NvidiaImportJob, infos: list[StoreInfo]) -> dict[str, int]:
    writer = ShardWriter(job.out, len(job.parts), "")
    offsets = [map_file(writer.path(index)).pack_offsets for index in range(len(job.parts))]
    most = max(
        (int(np.diff(array).max()) for array in offsets if array is not None and len(array) > 1),
        default=1,
    )
    return {"max_tokens": max(info.max_pack_tokens or 0 for info in infos), "max_sequences": most}


def _read(store: Store | UserError, part: ImportPart, job: NvidiaImportJob) -> RowsRead:
    """Return the good rows of a part, and a line for each skipped row."""
    if isinstance(store, UserError):
        return Ragged.concatenate([]), offsets_of([]) if job.packed else None, [str(store)]
    vocabulary = load_vocabulary(job.vocab_file)
    end = part.end if part.path is None else store.num_packs or len(store)
    unit = "row" if part.path else "pack" if job.packed else "sequence"

    def read(numbers: np.ndarray) -> tuple[Ragged, np.ndarray]:
        rows, counts = gather_rows(store, numbers, job.packed)
        if bad := _misfit(rows, vocabulary):
            sequence, reason = bad
            row = numbers[np.searchsorted(np.cumsum(counts), sequence, side="right")]
            remedy = "Give the data's own vocabulary, or use --skip-bad"
            raise UserError("data.row", part.path or job.source, f"{unit} {row} {reason}", remedy)
        return rows, counts

    taken: list[tuple[Ragged, np.ndarray]] = []
    skipped: list[str] = []
    for found in read_past_errors(read, part.first, end, _BLOCK):
        if not isinstance(found, UserError):
            taken.append(found)
        elif job.skip_bad:
            skipped.append(str(found))
        else:
            raise found
    rows, counts = zip(*taken, strict=True) if taken else ((), (np.empty(0, np.int64),))
    joined = Ragged.concatenate(rows)
    if problem := another_vocabulary(joined, vocabulary):
        raise UserError(
            "vocabulary.mismatch",
            part.path or job.source,
            problem,
            "Give the data's own vocabulary",
        )
    return joined, offsets_of(np.concatenate(counts)) if job.packed else None, skipped


def _misfit(rows: Ragged, vocabulary: dict[str, int]) -> tuple[int, str] | None:
    """Return the first sequence that does not fit a vocabulary, and why."""
    size = len(vocabulary)
    cls = vocabulary["[CLS]"]
    sep = vocabulary["[SEP]"]
    outside = f"outside the vocabulary of {size} entries"
    found = {
        f"has a token {outside}": sequences_of(rows.offsets, rows.tokens >= size),
        f"has a label {outside}": sequences_of(rows.masked_offsets, rows.masked_labels >= size),
        "does not begin with the vocabulary's [CLS]": np.flatnonzero(
            rows.tokens[rows.offsets[:-1]] != cls
        ),
        "does not end with the vocabulary's [SEP]": np.flatnonzero(
            rows.tokens[rows.offsets[1:] - 1] != sep
        ),
    }
    bad = [(int(sequences[0]), reason) for reason, sequences in found.items() if len(sequences)]
    return min(bad, default=None)
