"""Check results of any MLPerf benchmark by the rules that hold for all of them.

`mlaudit.own_checks` says which checks these are. Results of BERT get all checks here, too.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from mlaudit.benchmarks import num_runs, official_command
from mlaudit.checks.duplicate_runs import check_copies_between
from mlaudit.findings import Complaint, Complaints, Finding, Outcome
from mlaudit.layout import read_system
from mlaudit.logs import Log, read_log
from mlaudit.own_checks import check_row, run_checks
from mlaudit.result_folders import ResultFolder, find_results
from mlaudit.result_set import ResultSet
from mlaudit.rounds import judge
from mlaudit.rules import BENCHMARK
from mlaudit.scratch_copy import RESULT_PATTERN
from mlbert.host.errors import UserError

_FILED = "rules: results/<system>/<benchmark> contains the logs of that benchmark"


def refuse_other_benchmarks(path: Path) -> None:
    """Raise UserError if a path contains results of other benchmarks than BERT and none of BERT."""
    others: dict[str, Path] = {}
    for results in find_results(path):
        if results.folder.name == BENCHMARK and results.tree is not None:
            return
        for log in results.logs:
            name = read_log(log).benchmark
            if name == BENCHMARK:
                return
            others.setdefault(name, log)
    if not others:
        return
    benchmark, log = next(iter(others.items()))
    named = _as_given(log, path)
    names = ", ".join(sorted(others))
    raise UserError(
        "log.other-benchmark",
        path,
        f"contains results of {names}; these checks are for {BENCHMARK}",
        f"Run {official_command(benchmark, named)}, "
        "or give --general to run the checks that apply to every benchmark",
    )


def _as_given(log: Path, path: Path) -> Path:
    """Return the path of a log as the user would type it: relative if the given path is."""
    if path.is_absolute():
        return log
    return Path(os.path.relpath(log))


def read_result_set(results: ResultFolder, division: str | None = None) -> ResultSet:
    """Read the logs of a folder and its system description.

    Raises:
        UserError: a log cannot be read.
    """
    logs = [read_log(log) for log in results.logs]
    return result_set_of(results, logs, division)


def result_set_of(
    results: ResultFolder, logs: Sequence[Log], division: str | None = None
) -> ResultSet:
    """Return the logs of a folder with its system description, and the benchmark that they are
    judged by.
    """
    system = None
    if results.description is not None:
        system = read_system(results.description)
    judged = judge(logs, results.folder, system).round
    return ResultSet(logs, system, division, results.tree, _benchmark_of(results, logs), judged)


def _benchmark_of(results: ResultFolder, logs: Sequence[Log]) -> str:
    """Return the benchmark whose rules apply: BERT's in its folder, else what most logs name."""
    if results.tree is not None and results.folder.name == BENCHMARK:
        return BENCHMARK
    return Counter(log.benchmark for log in logs).most_common(1)[0][0]


def check_every_benchmark(
    path: Path, division: str | None, progress: Callable[[str], None]
) -> list[Finding]:
    """Run our own checks on the results of every benchmark at a path.

    Raises:
        UserError: the path contains no log, or one that cannot be read.
    """
    folders = find_results(path)
    if not folders:
        reason = f"contains no {RESULT_PATTERN}"
        raise UserError(
            "log.missing", path, reason, "Name a submission tree, a folder of logs, or a log"
        )
    findings = []
    systems: dict[str, list[Sequence[Log]]] = defaultdict(list)
    for number, folder in enumerate(folders, start=1):
        subject = _subject(folder, path)
        progress(f"{subject}, {number} of {len(folders)}")
        results = read_result_set(folder, division)
        if folder.tree is not None:
            findings.append(check_row("files", subject, check_files, folder, results))
        findings += run_checks(results, subject)
        command = official_command(results.benchmark, folder.logs[0].name)
        findings.append(
            Finding("compliance_checker", subject, Outcome.SKIP, f"not run here: {command}")
        )
        systems[results.benchmark].append(results.logs)
    for benchmark, logs in systems.items():
        if len(logs) > 1:
            findings.append(
                check_row("copies between systems", benchmark, check_copies_between, logs)
            )
    return findings


def _subject(results: ResultFolder, path: Path) -> str:
    here = path.resolve()
    if here.is_file():
        return here.name
    name = results.folder.relative_to(here)
    return str(name) if name.parts else f"{len(results.logs)} logs"


def check_files(folder: ResultFolder, results: ResultSet) -> Complaints:
    """The folder contains as many logs as its benchmark needs, and they are of this benchmark."""
    benchmark = results.benchmark
    if benchmark != folder.folder.name:
        text = f"the logs are of {benchmark}, filed under {folder.folder.name}"
        yield Complaint(Outcome.WARN, text, _FILED)
    wanted = num_runs(benchmark)
    if len(results.logs) != wanted:
        text = f"{folder.folder.name} contains {len(results.logs)} logs, not {wanted}"
        yield Complaint(Outcome.WARN, text, "rules: the number of runs of a result")
