"""Audit every result of a round: one row for each system, with its score and its findings.

Each result is read and checked in a separate process, and so are the copies between systems.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mlaudit.check import check
from mlaudit.checks.duplicate_runs import check_copies_between
from mlaudit.checks.evaluation import check_grid
from mlaudit.findings import Finding, Outcome
from mlaudit.general import result_set_of
from mlaudit.logs import Log, is_number, read_log
from mlaudit.own_checks import check_row, run_checks
from mlaudit.report.results import Result, read_result
from mlaudit.report.runs import read_systems
from mlaudit.result_folders import ResultFolder, find_results
from mlaudit.result_set import ResultSet, counts_samples, evaluations_of
from mlaudit.rules import BENCHMARK, eval_interval
from mlaudit.scratch_copy import RESULT_PATTERN
from mlbert.host.errors import UserError
from mlbert.host.progress import Progress

_MINUTE = 60.0
_PLURALS = {Outcome.ERROR: "ERRORs", Outcome.WARN: "warnings"}
_COPIES = "copies between systems"


@dataclass(frozen=True)
class RoundRow:
    """What a round's table says of one result; None is unknown.

    Attributes:
        submitter, system, benchmark, division: as described, or as the folders are named.
        round: by whose rules it is judged; the last with BERT for later ones.
        score_minutes: the official score: olympic mean of the times to train, times the factor for
            fewer samples than the reference (closed division of BERT).
        minutes: the olympic mean itself.
        runs, converged: number of logs, and of those that reached the target.
        accelerators, accelerator: number over all nodes, and model.
        batch: sequences per step.
        samples_to_target: olympic mean.
        samples_per_second: of one accelerator, without evaluations if the log times them.
        grid: samples between evaluations, and those of the rules if they differ.
        errors, warnings, notes: number of findings.
        findings: all rows of the check.
    """

    submitter: str
    system: str
    benchmark: str
    round: str
    division: str
    score_minutes: float | None
    minutes: float | None
    runs: int
    converged: int
    accelerators: int | None
    accelerator: str
    batch: float | None
    samples_to_target: float | None
    samples_per_second: float | None
    grid: str
    findings: tuple[Finding, ...]

    @property
    def findings_in_words(self) -> str:
        """Return how many checks found an error or only a warning; a dash if none did."""
        words = []
        for outcome, plural in _PLURALS.items():
            number = self.counts[outcome]
            if number:
                words.append(f"{number} {outcome.value if number == 1 else plural}")
        return ", ".join(words) or "-"

    @property
    def counts(self) -> Counter[Outcome]:
        """Return the number of findings by outcome."""
        return Counter(finding.outcome for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain values, its findings as `mlaudit.findings.Finding.as_json`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["errors"] = self.counts[Outcome.ERROR]
        values["warnings"] = self.counts[Outcome.WARN]
        values["notes"] = self.counts[Outcome.NOTE]
        values["findings"] = [finding.as_json() for finding in self.findings]
        return values


@dataclass(frozen=True)
class AuditedRound:
    """The results of a round.

    Attributes:
        rows: by submitter and system.
        copies: findings about runs that are filed under several systems.
        others: results of other benchmarks that were left out, by benchmark.
    """

    rows: tuple[RoundRow, ...]
    copies: tuple[Finding, ...]
    others: Counter[str]

    @property
    def has_failed(self) -> bool:
        """Return True if a finding is an error."""
        found = [finding for row in self.rows for finding in row.findings]
        return any(finding.outcome is Outcome.ERROR for finding in (*found, *self.copies))


def audit_round(
    paths: Sequence[Path],
    progress: Progress,
    *,
    official: bool = False,
    general: bool = False,
) -> AuditedRound:
    """Audit the results of submissions, or of folders of submissions.

    Args:
        paths: the submissions.
        progress: shows how many results are done.
        official: also run the official tools on results of BERT.
        general: include results of every benchmark.

    Raises:
        UserError: a path does not exist, or contains no result of BERT (or none at all).
    """
    found = _results_at(paths)
    others = Counter(_benchmark_named(results) for results in found)
    del others[BENCHMARK]
    chosen = found if general else [r for r in found if _benchmark_named(r) == BENCHMARK]
    if not chosen:
        named = ", ".join(sorted(others))
        raise UserError(
            "log.other-benchmark",
            paths[0],
            f"contains results of {named}; this table is for {BENCHMARK}",
            "Give --general to include every benchmark",
        )
    by_benchmark: dict[str, list[tuple[Path, ...]]] = defaultdict(list)
    for results in chosen:
        by_benchmark[_benchmark_named(results)].append(results.logs)
    # Processes that are forked while another thread shows the progress could wait for its locks.
    context = multiprocessing.get_context("spawn")
    workers = min(len(os.sched_getaffinity(0)), len(chosen))
    with (
        progress.task("auditing", len(chosen), "results") as advance,
        ProcessPoolExecutor(workers, context) as pool,
    ):
        copies = [
            pool.submit(_copies_between, benchmark, logs)
            for benchmark, logs in by_benchmark.items()
            if len(logs) > 1
        ]
        rows = [pool.submit(audit_result, results, official) for results in chosen]
        try:
            for _ in as_completed(rows):
                advance(1)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return AuditedRound(_in_order(rows), tuple(future.result() for future in copies), others)


def _in_order(rows: Iterable[Future[RoundRow]]) -> tuple[RoundRow, ...]:
    found = [future.result() for future in rows]
    return tuple(sorted(found, key=lambda row: (row.submitter.casefold(), row.system)))


def _results_at(paths: Sequence[Path]) -> list[ResultFolder]:
    found: dict[Path, ResultFolder] = {}
    for path in paths:
        remedy = "Name submitters' trees, or a folder of such trees"
        if not path.exists():
            raise UserError("file.missing", path, "does not exist", remedy)
        results = find_results(path)
        if not results:
            raise UserError("log.missing", path, f"contains no {RESULT_PATTERN}", remedy)
        found |= {one.folder: one for one in results}
    return list(found.values())


def _benchmark_named(results: ResultFolder) -> str:
    """Return the name of the folder in a submission, else what the first readable log says."""
    if results.tree is not None:
        return results.folder.name
    try:
        return read_log(results.logs[0]).benchmark
    except UserError:
        return BENCHMARK


def audit_result(results: ResultFolder, official: bool) -> RoundRow:
    """Return the row of one result. A log that cannot be read is an error in its row."""
    try:
        return _row(results, official)
    except UserError as error:
        words = str(error)
        problem = Finding("own: lines", results.folder.name, Outcome.ERROR, words)
        return RoundRow(
            submitter=_tree_name(results),
            system=_system_name(results),
            benchmark=_benchmark_named(results),
            round="-",
            division="-",
            score_minutes=None,
            minutes=None,
            runs=len(results.logs),
            converged=0,
            accelerators=None,
            accelerator="",
            batch=None,
            samples_to_target=None,
            samples_per_second=None,
            grid="",
            findings=(problem,),
        )


def _row(results: ResultFolder, official: bool) -> RoundRow:
    (system,) = read_systems(results.logs)
    result = read_result(system)
    judged = result_set_of(results, [run.source.log for run in result.runs])
    seconds = result.olympic_seconds
    minutes = None
    if seconds is not None and seconds < float("inf"):
        minutes = seconds / _MINUTE
    factor = result.scaling
    facts = judged.system or {}
    return RoundRow(
        submitter=str(facts.get("submitter") or _tree_name(results)),
        system=_system_name(results),
        benchmark=judged.benchmark,
        round=judged.round.name,
        division=str(judged.wanted_division),
        score_minutes=minutes if minutes is None or factor is None else minutes * factor,
        minutes=minutes,
        runs=len(results.logs),
        converged=result.num_converged,
        accelerators=result.accelerators or None,
        accelerator=str(facts.get("accelerator_model_name") or ""),
        batch=result.batch,
        samples_to_target=result.mean_samples,
        samples_per_second=_speed_of_one(result),
        grid=_grid(judged),
        findings=tuple(_findings(results, judged, official)),
    )


def _findings(results: ResultFolder, judged: ResultSet, official: bool) -> list[Finding]:
    subject = _system_name(results)
    if official and judged.is_bert:
        found = check(results.folder)
    else:
        found = run_checks(judged, subject)
    return sorted(found, key=lambda finding: -finding.severity)


def _tree_name(results: ResultFolder) -> str:
    return "" if results.tree is None else results.tree.name


def _system_name(results: ResultFolder) -> str:
    return results.folder.name if results.tree is None else results.folder.parent.name


def _speed_of_one(result: Result) -> float | None:
    speed = result.training_speed or result.samples_per_second
    if speed is None or not result.accelerators:
        return None
    return speed / result.accelerators


def _grid(judged: ResultSet) -> str:
    """Return the samples between evaluations, and those of the rules if a log contradicts them."""
    if not judged.is_bert:
        return ""
    batch = judged.logs[0].value("global_batch_size")
    if not is_number(batch) or batch < 1 or not all(map(counts_samples, judged.logs)):
        return ""
    wanted = eval_interval(int(batch))
    has_grid = judged.round.has_grid
    if has_grid and not any(_is_off_the_grid(log, int(batch)) for log in judged.logs):
        return f"{wanted:,}"
    distances = [apart for log in judged.logs for apart in _distances(log)]
    if not distances:
        return "none"
    usual = f"{statistics.median(distances):,.0f}"
    return f"{usual}, rules {wanted:,}" if has_grid else usual


def _is_off_the_grid(log: Log, batch: int) -> bool:
    counted = [one for one in evaluations_of(log) if one.samples > 0]
    points = [one.samples for one in counted]
    lines = [one.event.line for one in counted]
    complaints = check_grid(batch, points, lines)
    return any(complaint.outcome is Outcome.ERROR for complaint in complaints)


def _distances(log: Log) -> list[float]:
    points = [one.samples for one in evaluations_of(log) if one.samples > 0]
    return [after - before for before, after in zip([0, *points], points, strict=False)]


def _copies_between(benchmark: str, systems: Sequence[Sequence[Path]]) -> Finding:
    """Return the row about runs that are filed under several systems of a benchmark."""
    readable = []
    for logs in systems:
        try:
            readable.append([read_log(log) for log in logs])
        except UserError:
            continue  # reported in its row
    return check_row(_COPIES, benchmark, check_copies_between, readable)
