"""Check a submission: run the official tools on a copy and our own checks at the same time."""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlaudit import official, seal
from mlaudit.checks.duplicate_runs import check_copies_between
from mlaudit.findings import ROUND, Complaint, Finding, Outcome, finding_of
from mlaudit.general import check_every_benchmark, refuse_other_benchmarks
from mlaudit.layout import check_layout, is_other_benchmark, read_system
from mlaudit.logs import Log, read_log
from mlaudit.official import Call
from mlaudit.own_checks import check_row, run_checks
from mlaudit.result_set import ResultSet, counts_samples, minutes_to_train, olympic_seconds
from mlaudit.rounds import Judged, judge, round_of_ruleset
from mlaudit.rules import BENCHMARK, NUM_RESULT_FILES
from mlaudit.ruleset_edits import edit_copy
from mlaudit.run_files import check_metrics
from mlaudit.scratch_copy import READABLE, RESULT_PATTERN, Workplace, logs_at, logs_in
from mlaudit.tree_export import check_source, export_tree, is_checkout, is_export
from mlbert.host.errors import UserError

_PARTS = ("systems", "results", f"benchmarks/{BENCHMARK}")  # of a checkout that are copied
_LINE = re.compile(r"line \d+")  # in what a tool says of a log
_DROPPED = "the one of ten that the scoring drops: "


Progress = Callable[[str], None]


@dataclass(frozen=True)
class _Group:
    """Runs of one tool whose findings are reported together."""

    calls: Sequence[Call]
    sum_up: Callable[[list[Finding]], list[Finding]] = list


def check(
    path: Path,
    division: str | None = None,
    progress: Progress = lambda step: None,
    *,
    general: bool = False,
    ruleset: str | None = None,
) -> list[Finding]:
    """Check a submission tree, one system's results in it, a folder of result files, or one log.

    Works on a temporary copy and changes nothing below ``path``. Of a git checkout,
    its export is checked.

    Args:
        path: the tree, folder or log.
        division: "open" or "closed" to require that division.
        progress: called with the name of each step that starts or finishes.
        general: check results of every benchmark, without the official tools.
        ruleset: whose rules count, such as 2.1.0; those of the logs' round if None.

    Raises:
        UserError: the path is none of these, or holds results of other benchmarks only, or the
            ruleset has no BERT.
    """
    if not os.path.exists(path):
        reason = "does not exist"
        raise UserError(
            "file.missing",
            path,
            reason,
            "Name a submission tree, a folder with result_*.txt, or one log",
        )
    if ruleset is not None:
        round_of_ruleset(ruleset)  # raises if it has no BERT
    if general:
        return check_every_benchmark(path, division, progress)
    refuse_other_benchmarks(path)
    with tempfile.TemporaryDirectory(prefix="mlbert-check-") as temporary:
        copy = Path(temporary) / "submission"
        scratch = Path(temporary) / "scratch"
        copy.mkdir()
        scratch.mkdir()
        if (path / "systems").is_dir() or (path / "results").is_dir():
            place = Workplace(path, copy, scratch)
            return _check_tree(place, _copy_tree(place), division, progress, ruleset)
        if (system := _system_in_a_tree(path)) is not None:
            place = Workplace(system.parents[1], copy, scratch)
            description = place.given / "systems" / f"{system.name}.json"
            layout = _layout(place, place.take([description, system]))
            return _check_tree(place, layout, division, progress, ruleset)
        names = logs_at(path)
        if not names:
            reason = f"contains neither systems/ and results/ nor {RESULT_PATTERN}"
            raise UserError("log.missing", path, reason, "Name one that does")
        if names == [path]:
            read_log(path)  # raises if the log is unreadable
        place = Workplace(names[0].parent, copy, scratch, is_tree=False)
        return _check_logs(place, place.take(names), division, progress, ruleset)


def _system_in_a_tree(path: Path) -> Path | None:
    """Return ``results/<system>`` if the path is that folder of a tree or its benchmark folder,
    else None.
    """
    folder = path.resolve()
    folder = folder.parent if folder.name == BENCHMARK else folder
    is_in_tree = folder.parent.name == "results" and (folder.parents[1] / "systems").is_dir()
    return folder if is_in_tree and folder.is_dir() else None


def _copy_tree(place: Workplace) -> list[Finding]:
    """Copy a tree and return findings about its files.

    If a checkout cannot be exported, copy it as it is.
    """
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
    rows = [check_row("layout", ".", check_layout, place, left_out)]
    if is_export(place.given):
        rows.append(check_row("source", ".", check_source, place.given))
    return rows


def _check_tree(
    place: Workplace,
    findings: list[Finding],
    division: str | None,
    progress: Progress,
    ruleset: str | None,
) -> list[Finding]:
    tree = place.copy
    _leave_out_other_benchmarks(tree)
    logs_of: dict[Path, list[Log]] = {}
    for folder in sorted(
        path for path in (tree / "results").glob(f"*/{BENCHMARK}") if path.is_dir()
    ):
        logs = [read_log(log) for log in logs_in(folder) if log.is_file()]
        if logs:
            logs_of[folder] = logs
    facts_of = {
        folder: read_system(tree / "systems" / f"{folder.parent.name}.json") for folder in logs_of
    }
    all_logs = [log for logs in logs_of.values() for log in logs]
    judged = judge(all_logs, place.given, next(iter(facts_of.values()), None), ruleset)
    rules = judged.round.ruleset
    result_sets = [
        (folder, ResultSet(logs, facts_of[folder], division, place.given, round=judged.round))
        for folder, logs in logs_of.items()
    ]
    descriptions = sorted(tree.glob("systems/*.json"))
    findings = _round_rows(judged, all_logs, descriptions) + findings
    groups = []
    for folder, results in result_sets:
        groups.append(_convergence(folder, results, place))
        groups.append(_compliance(results.logs, place, rules))
    systems = [
        official.system_desc_checker(path, place.name(path), rules)
        for path in descriptions
        if judged.round.checks_descriptions
    ]
    counts_epochs = any(_counts_epochs(results) for _, results in result_sets)
    package = [
        official.package_checker(tree, rules, counts_epochs=counts_epochs),
        official.result_summarizer(tree, place.scratch / "summary.csv", rules),
    ]
    repository = [official.repo_checker(tree)]
    groups = [_Group(package), *groups, _Group(systems), _Group(repository)]

    def own() -> list[Finding]:
        rows = []
        if len(result_sets) > 1:
            logs = [results.logs for _, results in result_sets]
            rows.append(
                check_row(
                    "copies between systems",
                    place.name(tree / "results"),
                    check_copies_between,
                    logs,
                )
            )
        for folder, results in result_sets:
            rows += _own_rows(results, place.name(folder))
            if (folder.parent / seal.SUMS).exists() or results.own_logs:
                rows.append(
                    check_row("seal", place.name(folder.parent), seal.check_seal, folder.parent)
                )
        return rows

    return [*findings, *_run(groups, own, place, progress)]


def _leave_out_other_benchmarks(tree: Path) -> None:
    """Delete the other benchmarks' results from a copy of a tree, and systems with nothing else.

    The official tools judge all benchmarks of a folder together, so a fault of another one, or one
    that their ruleset does not know, would be a fault of BERT's.
    """
    for system in tree.glob("results/*/"):
        others = [folder for folder in system.iterdir() if is_other_benchmark(folder)]
        if others and not (system / BENCHMARK).is_dir():
            others = [system]
        for folder in others:
            shutil.rmtree(folder)


def _round_rows(judged: Judged, logs: Sequence[Log], systems: Sequence[Path]) -> list[Finding]:
    """Report the round, and what of it its ruleset does not know any more: the copy gets that."""
    if not logs:
        return []
    ruleset = judged.round.ruleset
    words = f"{judged.sentence} (ruleset {ruleset})"
    rows = [Finding(ROUND, ".", Outcome.PASS, words, ruleset=ruleset)]
    changes = [Complaint(Outcome.NOTE, text) for text in edit_copy(judged.round, logs, systems)]
    if changes:
        rows.append(finding_of("ruleset", ".", changes, ""))
    return rows


def _counts_epochs(results: ResultSet) -> bool:
    """Return True if no run of a result says in `epoch_num` how many samples it trained, as rounds
    up to v1.1 allow.
    """
    return not results.round.counts_samples and not any(map(counts_samples, results.logs))


def _check_logs(
    place: Workplace,
    left_out: Sequence[Complaint],
    division: str | None,
    progress: Progress,
    ruleset: str | None,
) -> list[Finding]:
    """Check a folder of logs, or one log, outside a tree."""
    rows = [finding_of("own: layout", ".", left_out, "")] if left_out else []
    names = sorted(path for path in place.copy.iterdir() if path.is_file())
    if not names:
        return rows
    logs = [read_log(place.given / path.name) for path in names]
    judged = judge(logs, place.given, ruleset=ruleset)
    results = ResultSet(logs, None, division, round=judged.round)
    copies = [replace(log, path=place.copy / log.path.name) for log in logs]
    rows += _round_rows(judged, copies, [])
    subject = names[0].name if len(names) == 1 else f"{len(names)} logs"
    groups = [_compliance(copies, place, judged.round.ruleset)]
    groups.append(_convergence(place.copy, results, place))
    rows += _run(groups, lambda: _own_rows(results, subject), place, progress)
    return [*rows, _time_to_train(results.logs, subject)]


def _own_rows(results: ResultSet, subject: str) -> list[Finding]:
    rows = run_checks(results, subject)
    if results.own_logs:
        rows.append(check_row("metrics", subject, check_metrics, results))
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


def _compliance(logs: Sequence[Log], place: Workplace, ruleset: str) -> _Group:
    """Report failing logs in a row for each reason and all passing logs in one. Of ten, scoring
    drops one failing log.
    """

    def sum_up(findings: list[Finding]) -> list[Finding]:
        bad = [finding for finding in findings if finding.outcome is not Outcome.PASS]
        num_good = len(findings) - len(bad)
        if len(bad) == 1 and len(findings) == NUM_RESULT_FILES:
            complaints = tuple(
                complaint._replace(outcome=Outcome.WARN) for complaint in bad[0].complaints
            )
            words = _DROPPED + bad[0].words
            bad = [replace(bad[0], outcome=Outcome.WARN, words=words, complaints=complaints)]
        bad = _one_row_for_each_reason(bad)
        if not num_good:
            return bad
        subject = findings[0].subject
        if len(logs) > 1:
            subject = f"{place.name(logs[0].path.parent)}: {num_good} of {len(logs)} logs"
        return [Finding("compliance_checker", subject, Outcome.PASS, "SUCCESS"), *bad]

    return _Group(
        [official.compliance_checker(log.path, place.name(log.path), ruleset) for log in logs],
        sum_up,
    )


def _one_row_for_each_reason(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings of several logs that differ in their line numbers only."""
    same: dict[str, list[Finding]] = {}
    for finding in findings:
        same.setdefault(_LINE.sub("", finding.words), []).append(finding)
    rows = []
    for first, *others in same.values():
        more = f" and {len(others)} more" if others else ""
        complaints = [complaint for one in (first, *others) for complaint in one.complaints]
        rows.append(
            replace(
                first,
                subject=first.subject + more,
                complaints=tuple(dict.fromkeys(complaints)),
            )
        )
    return rows


def _convergence(folder: Path, results: ResultSet, place: Workplace) -> _Group:
    subject = place.name(folder)
    reason = ""
    if not results.round.has_reference_points:
        reason = f"round {results.round.name} was not compared with the reference"
    elif results.wanted_division != "closed":
        reason = "only the closed division is compared with the reference"
    elif len(results.logs) != NUM_RESULT_FILES:
        reason = f"compares {NUM_RESULT_FILES} logs, found {len(results.logs)}"
    if reason:
        return _Group([], lambda findings: [Finding("rcp_checker", subject, Outcome.SKIP, reason)])
    call = official.rcp_checker(
        folder, subject, results.round.ruleset, counts_epochs=_counts_epochs(results)
    )
    return _Group([call])


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
