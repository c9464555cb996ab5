"""Re-read complete data sets and report their content, their problems,
and how many samples are good.

Every file is a separate job. A sample is good if its file's checksum is right (if the set has one),
it can be read, and it breaks none of the rules of `mlbert.data.formats.checks`.

Legend: S sequences, P packs.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mlbert.data.formats import mds_files, mds_samples, nvidia, tfrecord
from mlbert.data.formats.base import StoreInfo
from mlbert.data.formats.bins import BINS, describe_bins, read_bins
from mlbert.data.formats.checks import mask_problems, pack_problems, row_problems
from mlbert.data.formats.checksums import (
    CHECKSUMS,
    check_complete,
    file_xxh3,
    read_checksums,
    write_checksums,
)
from mlbert.data.formats.index_cache import keep_digests, name_of, state_of
from mlbert.data.formats.manifest import MANIFEST, REMAKE, file_md5, file_sha256, read_manifest
from mlbert.data.formats.nvidia_index import bins_of, list_shards
from mlbert.data.formats.open import describe
from mlbert.data.formats.padded import MAX_ID, Widths
from mlbert.data.formats.prepared import ShardSet, info_of, matching_shard
from mlbert.data.formats.ragged import Ragged, offsets_of
from mlbert.data.formats.tfrecord_plain import LIST, read_list, unlisted_note
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.import_store import gather_rows, read_past_errors
from mlbert.host.errors import UserError
from mlbert.host.files import plain_size, read_plain
from mlbert.host.progress import Progress

BLOCK = 16_384  # sequences checked at a time
_MD5 = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Md5List:
    """A published list: of files in the format of ``md5sum``,
    or of token ids in the format of NVIDIA's ``*.chk`` lists.

    NVIDIA's ``hdf5_md5.py`` prints the md5 of a shard's rows: that of the text of a Python list
    ("['0cc1...', '92eb...']") which holds, for each row without padding, the md5 of the text of its
    token ids as a Python list ("[101, 2023, 102]").
    """

    path: Path
    files: dict[str, str]  # name -> md5 of the file's bytes
    rows: dict[str, str]  # name -> md5 of its rows

    @classmethod
    def read(cls, path: Path) -> Md5List:
        """Read a list; lines are ``<md5>  <name>`` for files, ``<name> <md5>`` for rows.

        Raises UserError: it cannot be read, or a line is neither.
        """
        try:
            lines = read_plain(path, "Give a list of md5 sums").decode().splitlines()
        except UnicodeDecodeError as error:
            raise UserError(
                "file.unreadable", path, f"cannot be read ({error})", "Give a list of md5 sums"
            ) from None
        files: dict[str, str] = {}
        rows: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            words = line.split(maxsplit=1)
            if not words:
                continue
            first = words[0]
            last = words[-1].strip()
            if len(words) == 2 and _MD5.fullmatch(first):
                files[Path(last.removeprefix("*")).name] = (
                    first  # md5sum's * marks a file read as bytes
                )
            elif len(words) == 2 and _MD5.fullmatch(last):
                rows[Path(first).name] = last
            else:
                reason = f"line {number} is not an md5 sum and a name"
                raise UserError("data.row", path, reason, "Give a list in md5sum's format")
        return cls(path, files, rows)


@dataclass(frozen=True)
class FileJob:
    """One file to check."""

    path: Path
    info: StoreInfo  # limits of its set
    shard: int | None = None  # its number in the manifest; None for other kinds
    xxh3: str = ""  # from the folder's list; empty if there is none
    shortest: int = 1  # minimum tokens of its sequences
    md5: str = ""  # md5 of the file and of its rows from a published list, or ""
    rows_md5: str = ""


@dataclass
class FileReport:
    """Results of a file; ``problems`` are lines without its name."""

    path: Path
    content: str = ""
    xxh3: str = ""
    sequences: int = 0
    good: int = 0
    tokens: int = 0
    masked: int = 0
    random_next: int = 0
    packs: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SetReport:
    """Results of a folder."""

    folder: Path
    info: StoreInfo | None  # properties of the set; None if they cannot be read
    files: list[FileReport]
    problems: list[str]  # one line each, with the name of the file

    def total(self, name: str) -> int:
        """Return the sum of a count over the files."""
        return sum(getattr(report, name) for report in self.files)


class _Tally:
    """Counts sequences and broken rules."""

    def __init__(self, job: FileJob) -> None:
        self.job = job
        self.report = FileReport(job.path)
        self._broken: Counter[str] = Counter()
        self._example: dict[str, int] = {}
        self._row_sums: list[str] = []

    def add(self, rows: Ragged, pack_sizes: np.ndarray | None = None) -> None:
        """Check the next sequences of the file; ``pack_sizes`` int64 [P] if they are packed."""
        report = self.report
        job = self.job
        problems = row_problems(rows, job.info) | mask_problems(rows)
        problems[f"is shorter than its bin's {job.shortest}"] = np.flatnonzero(
            rows.lengths < job.shortest
        )
        bad = [self._note(problem, np.unique(where)) for problem, where in problems.items()]
        offsets = None if pack_sizes is None else offsets_of(pack_sizes)
        if offsets is not None:
            report.packs += len(offsets) - 1
            for problem, where in pack_problems(
                rows, offsets, job.info.max_pack_tokens or 0
            ).items():
                self._note(f"begins a pack that {problem}", offsets[where])
                bad += [np.arange(offsets[pack], offsets[pack + 1]) for pack in where]
        report.sequences += len(rows)
        report.good += len(rows) - len(np.unique(np.concatenate(bad)))
        report.tokens += len(rows.tokens)
        report.masked += len(rows.masked_labels)
        report.random_next += int(np.count_nonzero(rows.next_sentence))
        if job.rows_md5:
            borders = rows.offsets if offsets is None else rows.offsets[offsets]
            self._row_sums += [
                _md5_of_text(rows.tokens[a:b].tolist())
                for a, b in itertools.pairwise(borders.tolist())
            ]

    def unreadable(self, count: int, reason: str) -> None:
        """Count ``count`` samples that cannot be read."""
        self.report.sequences += count
        self.report.problems.append(reason)

    def nothing_good(self, reason: str) -> None:
        """Mark all samples of the file as bad."""
        self.report.problems.insert(0, f"{reason}: none of its samples counts as good")
        self.report.good = 0

    def _note(self, problem: str, where: np.ndarray) -> np.ndarray:
        if len(where):
            self._broken[problem] += len(where)
            self._example.setdefault(problem, self.report.sequences + int(where[0]))
        return where

    def finish(self) -> FileReport:
        """Convert the counts to report lines."""
        for problem, count in self._broken.items():
            more = f" (and {count - 1:,} more)" if count > 1 else ""
            self.report.problems.append(f"sequence {self._example[problem]} {problem}{more}")
        if self.job.rows_md5 and (found := _md5_of_text(self._row_sums)) != self.job.rows_md5:
            self.report.problems.append(
                f"its rows have md5 {found}, the list says {self.job.rows_md5}"
            )
        return self.report


def _md5_of_text(values: list) -> str:
    return hashlib.md5(str(values).encode(), usedforsecurity=False).hexdigest()


def check_file(job: FileJob) -> FileReport:
    """Read one file completely."""
    tally = _Tally(job)
    report = tally.report
    try:
        if job.shard is not None:
            _check_shard(job, tally)
        else:
            {"tfrecord": _check_tfrecords, "mds": _check_mds}.get(job.info.kind, _check_nvidia)(
                job, tally
            )
            report.content = file_sha256(job.path)
        report.xxh3 = file_xxh3(job.path)
        if job.xxh3 not in ("", report.xxh3) and not report.problems:
            if job.shard is None:
                tally.nothing_good(f"its checksum differs from that in {CHECKSUMS}")
            else:
                report.problems.append(
                    f"matches the manifest but not {CHECKSUMS}: remove {CHECKSUMS}"
                )
        if job.md5 and (found := file_md5(job.path)) != job.md5:
            report.problems.append(f"its md5 is {found}, the list says {job.md5}")
    except UserError as error:
        report.problems.append(error.problem)
    except OSError as error:
        report.problems.append(f"cannot be read ({error.strerror or error})")
    return tally.finish()


def _check_shard(job: FileJob, tally: _Tally) -> None:
    report = tally.report
    manifest = read_manifest(job.path.parent)
    assert job.shard is not None
    entry = manifest.shards[job.shard]
    report.sequences = entry.num_sequences  # until they can be read
    shard = matching_shard(manifest, job.shard)
    sha256 = file_sha256(job.path)
    report.sequences = 0
    rows = shard.rows
    offsets = shard.pack_offsets
    if (np.diff(rows.offsets) < 0).any() or (np.diff(rows.masked_offsets) < 0).any():
        tally.unreadable(len(rows), "has decreasing offsets")
    elif offsets is None:
        for first in range(0, len(rows), BLOCK):
            tally.add(rows.slice(first, min(first + BLOCK, len(rows))))
    elif len(pack_problems(rows, offsets, 0)["is empty or does not follow the pack before it"]):
        tally.unreadable(len(rows), "has packs that do not follow each other")
        return
    else:
        for pack in range(0, len(offsets) - 1, BLOCK):
            borders = offsets[pack : pack + BLOCK + 1]
            tally.add(rows.slice(int(borders[0]), int(borders[-1])), np.diff(borders))
    if sha256 != entry.sha256:
        tally.nothing_good("its checksum differs from the manifest's")
    report.content = shard.content_sha256


def _check_tfrecords(job: FileJob, tally: _Tally) -> None:
    report = tally.report
    listed = read_list(job.path)
    entry = listed.by_name.get(job.path.name) if listed else None
    if entry is not None and plain_size(job.path) > entry.bytes:  # before all of it is read
        report.sequences = entry.num_sequences
        raise UserError("data.damaged", job.path, str(entry.size_problem(job.path, LIST)), REMAKE)
    reader = tfrecord.ExampleReader(job.path, skip_bad=True)
    for part in reader:
        tally.add(part.rows)
    for bad in reader.bad:
        tally.unreadable(1, str(bad))
    if listed and entry is not None:
        problem = listed.count_problem(
            job.path, reader.num_records, None if reader.bad else report.tokens
        )
        if problem := problem or listed.size_problem(job.path):
            report.problems.append(problem)
            # Missing samples are not good.
            report.sequences = max(report.sequences, entry.num_sequences)
            report.good = min(report.good, entry.num_sequences)


def _check_nvidia(job: FileJob, tally: _Tally) -> None:
    store = nvidia.NvidiaStore(job.path.parent, [job.path], strict=False, cached=False)
    packed = store.num_packs > 0

    def read(numbers: np.ndarray) -> tuple[Ragged, np.ndarray]:
        return gather_rows(store, numbers, packed)

    for found in read_past_errors(read, 0, store.num_packs or len(store), BLOCK):
        if isinstance(found, UserError):
            tally.unreadable(1, found.problem)
        else:
            rows, sizes = found
            tally.add(rows, sizes if packed else None)


def _check_mds(job: FileJob, tally: _Tally) -> None:
    """Check all shards of a set, whose file is its index.

    Samples are read only if the files match the index.
    """
    folder = job.path.parent
    for shard in mds_samples.read_index(folder).shards:
        stored = [
            file for file in (shard.raw, shard.zipped) if file and (folder / file.name).exists()
        ]
        try:
            for file in stored or [shard.raw]:
                mds_files.check_file(folder / file.name, file)
        except UserError as error:
            tally.unreadable(shard.num_samples, str(error))
    if tally.report.problems:
        return
    store = mds_samples.open_folder(folder)
    for first in range(0, len(store), BLOCK):
        tally.add(store.gather(np.arange(first, min(first + BLOCK, len(store)))))


def verify(
    folders: Sequence[Path], *, md5: Md5List | None = None, executor: Executor = Executor()
) -> list[SetReport]:
    """Check sets of any kind; files or their rows are compared with published sums (``md5``) by
    file name. The digests of files without a manifest are cached, see
    `mlbert.data.formats.index_cache`. Raises UserError: a folder does not exist, or holds no set.
    """
    plans = [_plan(folder, executor.progress) for folder in folders]
    jobs = [job for _, planned, _ in plans for job in planned]
    if md5:
        sums = ((md5.files.get(job.path.name, ""), md5.rows.get(job.path.name, "")) for job in jobs)
        jobs = [
            replace(job, md5=file, rows_md5=rows)
            for job, (file, rows) in zip(jobs, sums, strict=True)
        ]
    states = {job.path: state_of(job.path) for job in jobs if job.path.exists()}
    sizes = [states.get(job.path, [0])[0] for job in jobs]
    reports = iter(executor.run(check_file, jobs, name="verifying", where=folders[0], sizes=sizes))
    results = []
    for folder, (info, planned, problems) in zip(folders, plans, strict=True):
        files = [next(reports) for _ in planned]
        if info is not None and not info.is_listed and all(report.content for report in files):
            keep_digests(folder, {report.path: report.content for report in files}, states)
        problems = problems + _same_content(files)
        problems += [f"{report.path}: {problem}" for report in files for problem in report.problems]
        results.append(SetReport(folder, info, files, problems))
        _keep_sums(folder, results[-1])
    if md5:
        absent = sorted({*md5.files, *md5.rows} - {job.path.name for job in jobs})
        results[0].problems.extend(
            f"{md5.path}: lists {name}, which is not there" for name in absent
        )
    return results


def _plan(folder: Path, progress: Progress) -> tuple[StoreInfo | None, list[FileJob], list[str]]:
    """Return a set's properties, its files, and the problems found before reading any."""
    if (folder / BINS).exists():
        return _plan_bins(folder)
    if (folder / MANIFEST).exists():
        return _plan_set(folder, 1)
    if mds_samples.accepts(
        folder
    ):  # its shards may be damaged, so none is read before all are verified
        info = mds_samples.describe(folder, Widths(MAX_ID, MAX_ID))
        return info, [FileJob(folder / mds_files.INDEX, info)], []
    info = describe(folder)
    if info.kind == "tfrecord":
        if folder.is_dir() and (note := unlisted_note(folder)):
            progress(note)
        return (
            info,
            _with_sums(folder, [FileJob(path, info) for path in tfrecord.find_files(folder)]),
            [],
        )
    groups = bins_of(folder) or [list_shards(folder)]
    return info, _with_sums(folder, [FileJob(path, info) for group in groups for path in group]), []


def _with_sums(folder: Path, jobs: list[FileJob]) -> list[FileJob]:
    """Add the checksums of the folder's list to the jobs."""
    listed = read_checksums(folder) if folder.is_dir() else {}
    check_complete(folder, listed, [name_of(folder, job.path) for job in jobs])
    return [replace(job, xxh3=listed.get(name_of(folder, job.path), "")) for job in jobs]


def _keep_sums(folder: Path, result: SetReport) -> None:
    """Write the checksum lists of a good set, if it has none.

    A folder that is not writable stays without.
    """
    if result.problems or result.total("good") != result.total("sequences") or not folder.is_dir():
        return
    if result.info is not None and result.info.kind == "mds":  # its index lists the checksums
        return
    prepared = result.info is not None and result.info.is_listed
    folders: dict[Path, dict[str, str]] = {}
    for report in result.files:
        place = report.path.parent if prepared else folder
        folders.setdefault(place, {})[name_of(place, report.path)] = report.xxh3
    for place, digests in folders.items():
        if not (place / CHECKSUMS).exists():
            with contextlib.suppress(UserError):
                write_checksums(place, digests)


def _plan_set(folder: Path, shortest: int) -> tuple[StoreInfo | None, list[FileJob], list[str]]:
    try:
        manifest = read_manifest(folder)
    except UserError as error:
        return None, [], [str(error)]
    problems = []
    try:
        ShardSet.open(folder, verify=False)
    except UserError as error:
        problems.append(str(error))
    info = info_of(manifest)
    paths = [folder / entry.file for entry in manifest.shards]
    jobs = [FileJob(path, info, number, shortest=shortest) for number, path in enumerate(paths)]
    return info, _with_sums(folder, jobs), problems


def _plan_bins(folder: Path) -> tuple[StoreInfo | None, list[FileJob], list[str]]:
    try:
        index = read_bins(folder)
        info = describe_bins(folder)
    except UserError as error:
        return None, [], [str(error)]
    jobs = []
    problems = []
    shortest = 1
    for entry, edge in zip(index.bins, index.edges, strict=True):
        _, of_bin, wrong = _plan_set(folder / entry.folder, shortest)
        jobs += of_bin
        problems += wrong
        shortest = edge + 1
    return info, jobs, problems


def _same_content(files: list[FileReport]) -> list[str]:
    first: dict[str, Path] = {}
    problems = []
    for report in files:
        if report.sequences and report.content:
            other = first.setdefault(report.content, report.path)
            if other != report.path:
                problems.append(f"{report.path}: contains the same samples as {other}")
    return problems
