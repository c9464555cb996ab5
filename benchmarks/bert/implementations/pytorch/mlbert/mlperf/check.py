"""Check a submission: run the official tools on a copy and our own checks at the same time.

This module also checks the names of a tree's folders and files against the rules.

Run the checks that no official tool makes on the logs of one system.

Each check is a function of a `ResultSet` that yields complaints. If there are none, the table shows the first line of
the function's docstring. Only a broken rule is an error. Properties that only this code's logs have (provenance, call
sites, one seed, one writer) are required only of them: see `mlbert.mlperf.logs.Log.is_ours`.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlbert.host.errors import UserError
from mlbert.host.json_files import read_json
from mlbert.mlperf import official, seal
from mlbert.mlperf.checks import pace
from mlbert.mlperf.checks.accuracy import check_accuracies
from mlbert.mlperf.checks.code_provenance import check_event_types, check_writer
from mlbert.mlperf.checks.configuration import check_configuration
from mlbert.mlperf.checks.duplicate_runs import check_copies, check_copies_between
from mlbert.mlperf.checks.evaluation import check_evaluations
from mlbert.mlperf.checks.event_order import check_division, check_lines, check_numbers, check_order
from mlbert.mlperf.checks.run_identity import check_call_sites, check_code, check_whose
from mlbert.mlperf.checks.same import check_program, check_same_settings, check_seeds, check_series
from mlbert.mlperf.checks.system_file import check_description, check_machine, check_submitter
from mlbert.mlperf.checks.values import check_rules, check_single_lines, check_values
from mlbert.mlperf.describe import FOLDER as TEMPLATES
from mlbert.mlperf.describe import MARK, unfilled
from mlbert.mlperf.findings import Complaint, Complaints, Finding, Outcome, finding_of
from mlbert.mlperf.logs import Log, read_log
from mlbert.mlperf.metrics import check_metrics
from mlbert.mlperf.official import Call
from mlbert.mlperf.result_set import NAMES, Check, ResultSet, minutes_to_train, olympic_seconds
from mlbert.mlperf.rules import BENCHMARK, NUM_RESULT_FILES
from mlbert.mlperf.scratch_copy import READABLE, RESULT_PATTERN, Workplace, logs_at, logs_in
from mlbert.mlperf.tree_export import check_source, export_tree, is_checkout, is_export

CHECKS: Mapping[str, Check] = {
    "program": check_program,
    "lines": check_lines,
    "division": check_division,
    "status": pace.check_status,
    "order of events": check_order,
    "time stamps": pace.check_time,
    "clock": pace.check_clock,
    "runs apart": pace.check_overlap,
    "speed": pace.check_pace,
    "evaluation time": pace.check_evaluation_time,
    "same settings": check_same_settings,
    "plain numbers": check_numbers,
    "seeds": check_seeds,
    "series": check_series,
    "copies": check_copies,
    "evaluations": check_evaluations,
    "accuracies": check_accuracies,
    "rules": check_rules,
    "values": check_values,
    "single lines": check_single_lines,
    "configuration": check_configuration,
    "event types": check_event_types,
    "writer": check_writer,
    "code": check_code,
}
TREE_CHECKS: Mapping[str, Check] = {
    "call sites": check_call_sites,
    "submitter": check_submitter,
    "filed under": check_whose,
    "system description": check_description,
    "machine": check_machine,
}
_RESULT_NAMES = frozenset(f"result_{index}.txt" for index in range(NUM_RESULT_FILES))
_TOOL_FILES = frozenset({"scaling.json"})
_RUN_FILE = re.compile(rf"run_.+\.({'|'.join(map(re.escape, NAMES))})")
_NAMES = "rules: results/<system>/bert/result_0.txt to result_9.txt, systems/<system>.json"

_PARTS = ("systems", "results", f"benchmarks/{BENCHMARK}")
_DROPPED = "the one of ten that the scoring drops: "


def run_checks(results: ResultSet, subject: str) -> list[Finding]:
    """Return one row for each check: its docstring if it passed, else all its complaints with the worst outcome.

    A log without events is reported by `check_lines` and skipped by the other checks.
    """
    checks = CHECKS if results.system is None else {**CHECKS, **TREE_CHECKS}
    readable = replace(results, logs=[log for log in results.logs if log.events])
    rows = []
    for name, check in checks.items():
        seen = results if check is check_lines else readable
        if seen.logs:
            rows.append(_row(name, subject, check, seen))
    return rows


def _row(name: str, subject: str, check: Callable[..., Complaints], *given: Any) -> Finding:
    return finding_of(
        f"own: {name}", subject, list(check(*given)), (check.__doc__ or "").partition("\n")[0]
    )


def check_layout(place: Workplace, left_out: Sequence[Complaint]) -> Complaints:
    """Folders and files are named as the rules require, and every result has its system description."""
    yield from left_out
    for name in ("systems", "results"):
        if not (place.copy / name).is_dir():
            yield _wrong(f"{name}/ is missing")
    folders = _entries(place.copy / "results")
    descriptions = [path for path in _entries(place.copy / "systems") if path.name != TEMPLATES]
    systems = {path.stem for path in descriptions if path.suffix == ".json"}
    for name in sorted(systems - {folder.name for folder in folders}):
        yield Complaint(Outcome.WARN, f"systems/{name}.json has no results/{name}", _NAMES)
    for path in descriptions:
        if path.suffix != ".json":
            yield Complaint(Outcome.WARN, f"{place.name(path)} is not a .json", _NAMES)
        if fields := unfilled(read_system(path)):
            yield _wrong(f"{place.name(path)} still says {MARK} in {', '.join(fields)}")
    if not (place.given / "benchmarks" / BENCHMARK / "implementations").is_dir():
        text = f"benchmarks/{BENCHMARK}/implementations is missing, so the code is not checked"
        yield Complaint(Outcome.WARN, text, "rules: the code of a result is submitted with it")
    for folder in folders:
        yield from _check_folder(folder, systems, place)
    if not folders:
        yield _wrong("results/ holds no system")


def _check_folder(folder: Path, systems: Iterable[str], place: Workplace) -> Complaints:
    """Check the contents of ``results/<system>``."""
    if not folder.is_dir():
        yield Complaint(Outcome.WARN, f"{place.name(folder)} is not a folder of a system", _NAMES)
        return
    if folder.name not in systems:
        yield _wrong(f"systems/{folder.name}.json is missing")
    for path in _entries(folder):
        if (
            path.name != BENCHMARK
            and path.name not in seal.FILES
            and not _RUN_FILE.fullmatch(path.name)
        ):
            text = f"{place.name(path)} is not the benchmark {BENCHMARK}"
            yield Complaint(Outcome.NOTE, f"{text}; only the official tools look at it")
    yield from _check_result_names(folder / BENCHMARK, place)


def _wrong(text: str) -> Complaint:
    return Complaint(Outcome.ERROR, text, _NAMES)


def _entries(folder: Path) -> list[Path]:
    """List a folder without README.md, which is allowed because the official tools ignore files here."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name != "README.md")


def _check_result_names(folder: Path, place: Workplace) -> Complaints:
    """Expect ten logs. package_checker reads any result_*.txt, but the rules name them result_0 to result_9."""
    if not folder.is_dir():
        is_other = folder.parent.is_dir() and any(path.is_dir() for path in _entries(folder.parent))
        outcome = (
            Outcome.NOTE if is_other else Outcome.ERROR
        )  # a system may have only other benchmarks
        yield Complaint(outcome, f"{place.name(folder)} is missing", "" if is_other else _NAMES)
        return
    logs = {path.name for path in folder.glob(RESULT_PATTERN) if path.is_file()}
    others = sorted(
        {path.name for path in folder.iterdir()} - logs - _TOOL_FILES - {"power", "README.md"}
    )
    for name in others:
        yield Complaint(Outcome.WARN, f"{place.name(folder / name)} is unknown", _NAMES)
    if len(logs) != NUM_RESULT_FILES:
        missing = ", ".join(sorted(_RESULT_NAMES - logs)) if logs < _RESULT_NAMES else ""
        text = f"{place.name(folder)} holds {len(logs)} logs, not {NUM_RESULT_FILES}"
        yield _wrong(text + (f": {missing} is missing" if missing else ""))
    elif logs != _RESULT_NAMES:
        extra = ", ".join(sorted(logs - _RESULT_NAMES))
        text = f"{place.name(folder)} holds {extra}, which the official tools take for results too"
        yield Complaint(Outcome.NOTE, text, _NAMES)


def read_system(path: Path) -> dict[str, Any]:
    """Return the system description, or {} if it is unreadable (the tools and the division check report that)."""
    try:
        return read_json(path, "")
    except UserError:
        return {}


Progress = Callable[[str], None]


@dataclass(frozen=True)
class _Group:
    """Runs of one tool whose findings are reported together."""

    calls: Sequence[Call]
    sum_up: Callable[[list[Finding]], list[Finding]] = list


def check(
    path: Path, division: str | None = None, progress: Progress = lambda step: None
) -> list[Finding]:
    """Check a submission tree, one system's results in it, a folder of result files, or one log.

    Works on a temporary copy and changes nothing below ``path``. Of a git checkout, its export is checked.

    Args:
        path: the tree, folder or log.
        division: "open" or "closed" to require that division.
        progress: called with the name of each step that starts or finishes.

    Raises:
        UserError: the path is none of these.
    """
    if not os.path.exists(path):
        reason = "does not exist"
        raise UserError(
            "file.missing",
            path,
            reason,
            "Name a submission tree, a folder with result_*.txt, or one log",
        )
    with tempfile.TemporaryDirectory(prefix="mlbert-check-") as temporary:
        copy = Path(temporary) / "submission"
        scratch = Path(temporary) / "scratch"
        copy.mkdir()
        scratch.mkdir()
        if (path / "systems").is_dir() or (path / "results").is_dir():
            place = Workplace(path, copy, scratch)
            return _check_tree(place, _copy_tree(place), division, progress)
        if (system := _system_in_a_tree(path)) is not None:
            place = Workplace(system.parents[1], copy, scratch)
            description = place.given / "systems" / f"{system.name}.json"
            return _check_tree(
                place, _layout(place, place.take([description, system])), division, progress
            )
        names = logs_at(path)
        if not names:
            reason = f"holds neither systems/ and results/ nor {RESULT_PATTERN}"
            raise UserError("log.missing", path, reason, "Name one that does")
        if names == [path]:
            read_log(path)  # raises if the log is unreadable
        place = Workplace(names[0].parent, copy, scratch, is_tree=False)
        return _check_logs(place, place.take(names), division, progress)


def _system_in_a_tree(path: Path) -> Path | None:
    """Return ``results/<system>`` if the path is that folder of a tree or its benchmark folder, else None."""
    folder = path.resolve()
    folder = folder.parent if folder.name == BENCHMARK else folder
    is_in_tree = folder.parent.name == "results" and (folder.parents[1] / "systems").is_dir()
    return folder if is_in_tree and folder.is_dir() else None


def _copy_tree(place: Workplace) -> list[Finding]:
    """Copy a tree and return findings about its files. If a checkout cannot be exported, copy it as it is."""
    tree = place.given
    if not is_checkout(tree):
        return _layout(place, place.take([tree]))
    try:
        export_tree(tree, place.copy)
        return _layout(place, [])
    except UserError as error:
        problem = finding_of(
            "own: export", ".", [Complaint(Outcome.ERROR, str(error), READABLE)], ""
        )
    shutil.rmtree(place.copy)
    place.copy.mkdir()
    # A checkout may contain data that does not belong to the submission.
    return [problem, *_layout(place, place.take(tree / name for name in _PARTS))]


def _layout(place: Workplace, left_out: Sequence[Complaint]) -> list[Finding]:
    rows = [_row("layout", ".", check_layout, place, left_out)]
    if is_export(place.given):
        rows.append(_row("source", ".", check_source, place.given))
    return rows


def _check_tree(
    place: Workplace, findings: list[Finding], division: str | None, progress: Progress
) -> list[Finding]:
    tree = place.copy
    result_sets = []
    groups = []
    for folder in sorted(
        path for path in (tree / "results").glob(f"*/{BENCHMARK}") if path.is_dir()
    ):
        logs = [read_log(log) for log in logs_in(folder) if log.is_file()]
        if logs:
            facts = read_system(tree / "systems" / f"{folder.parent.name}.json")
            results = ResultSet(logs, facts, division, place.given)
            result_sets.append((folder, results))
            groups += [_convergence(folder, results, place), _compliance(results.logs, place)]
    systems = [
        official.system_desc_checker(path, place.name(path))
        for path in sorted(tree.glob("systems/*.json"))
    ]
    package = [
        official.package_checker(tree),
        official.result_summarizer(tree, place.scratch / "summary.csv"),
    ]
    groups = [_Group(package), *groups, _Group(systems), _Group([official.repo_checker(tree)])]

    def own() -> list[Finding]:
        rows = []
        if len(result_sets) > 1:
            logs = [results.logs for _, results in result_sets]
            rows.append(
                _row(
                    "copies between systems",
                    place.name(tree / "results"),
                    check_copies_between,
                    logs,
                )
            )
        for folder, results in result_sets:
            rows += _own_rows(results, place.name(folder))
            if (folder.parent / seal.SUMS).exists() or results.own_logs:
                rows.append(_row("seal", place.name(folder.parent), seal.check_seal, folder.parent))
        return rows

    return [*findings, *_run(groups, own, place, progress)]


def _check_logs(
    place: Workplace, left_out: Sequence[Complaint], division: str | None, progress: Progress
) -> list[Finding]:
    """Check a folder of logs, or one log, outside a tree."""
    rows = [finding_of("own: layout", ".", left_out, "")] if left_out else []
    names = sorted(path for path in place.copy.iterdir() if path.is_file())
    if not names:
        return rows
    results = ResultSet([read_log(place.given / path.name) for path in names], None, division)
    subject = names[0].name if len(names) == 1 else f"{len(names)} logs"
    groups = [
        _compliance([replace(log, path=place.copy / log.path.name) for log in results.logs], place)
    ]
    groups.append(_convergence(place.copy, results, place))
    rows += _run(groups, lambda: _own_rows(results, subject), place, progress)
    return [*rows, _time_to_train(results.logs, subject)]


def _own_rows(results: ResultSet, subject: str) -> list[Finding]:
    rows = run_checks(results, subject)
    if results.own_logs:
        rows.append(_row("metrics", subject, check_metrics, results))
    return rows


def _run(
    groups: Sequence[_Group], own: Callable[[], list[Finding]], place: Workplace, progress: Progress
) -> list[Finding]:
    """Run the tools, and our own checks while they run."""
    calls = [call for group in groups for call in group.calls]
    renamed = {str(place.copy): str(place.given), f"{place.scratch}/": ""}
    with official.started(calls, place.scratch, renamed) as answers:
        progress("own checks")
        own_findings = own()
        progress("official tools")
        results = iter(answers(progress))
    findings = []
    for group in groups:
        findings += group.sum_up(
            [finding for call in group.calls for finding in call.judge(next(results))]
        )
    return [*findings, *own_findings]


def _compliance(logs: Sequence[Log], place: Workplace) -> _Group:
    """Report each failing log in its own row and all passing logs in one. Of ten, scoring drops one failing log."""

    def sum_up(findings: list[Finding]) -> list[Finding]:
        bad = [finding for finding in findings if finding.outcome is not Outcome.PASS]
        num_good = len(findings) - len(bad)
        if len(bad) == 1 and len(findings) == NUM_RESULT_FILES:
            complaints = tuple(
                complaint._replace(outcome=Outcome.WARN) for complaint in bad[0].complaints
            )
            words = _DROPPED + bad[0].words
            bad = [replace(bad[0], outcome=Outcome.WARN, words=words, complaints=complaints)]
        if not num_good:
            return bad
        subject = findings[0].subject
        if len(logs) > 1:
            subject = f"{place.name(logs[0].path.parent)}: {num_good} of {len(logs)} logs"
        return [Finding("compliance_checker", subject, Outcome.PASS, "SUCCESS"), *bad]

    return _Group(
        [official.compliance_checker(log.path, place.name(log.path)) for log in logs], sum_up
    )


def _convergence(folder: Path, results: ResultSet, place: Workplace) -> _Group:
    subject = place.name(folder)
    reason = ""
    if results.wanted_division != "closed":
        reason = "only the closed division is compared with the reference"
    elif len(results.logs) != NUM_RESULT_FILES:
        reason = f"compares {NUM_RESULT_FILES} logs, found {len(results.logs)}"
    if reason:
        return _Group([], lambda findings: [Finding("rcp_checker", subject, Outcome.SKIP, reason)])
    return _Group([official.rcp_checker(folder, subject)])


def _time_to_train(logs: Sequence[Log], subject: str) -> Finding:
    minutes = [value for log in logs if (value := minutes_to_train(log)) is not None]
    if not minutes:
        return Finding("time to train", subject, Outcome.SKIP, "no run succeeded")
    mean = olympic_seconds(logs)
    if mean is None:
        words = f"{', '.join(f'{value:.4g}' for value in minutes)} minutes"
    elif math.isinf(mean):
        words = f"no result: only {len(minutes)} of {len(logs)} runs reached the target"
    else:
        words = f"{mean / 60:.4g} minutes (olympic mean of {len(logs)} runs)"
    return Finding("time to train", subject, Outcome.NOTE, words)
