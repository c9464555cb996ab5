"""Run the official tools of mlperf-logging in parallel and judge their output,
since most always exit with 0.

The ruleset of the logs' round is always passed: the tools' default rulesets do not include BERT.
"""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE

from mlaudit.findings import Complaint, Finding, Outcome, finding_of
from mlaudit.rules import BENCHMARK, RULESET

_WORKER = Path(__file__).with_name("tools_worker.py")
_SECONDS = 120.0  # for one tool
_MAX_CHARACTERS = 2**23  # of a tool's output

Answers = Callable[[Callable[[str], None]], list["Answer"]]
_COMPLAINT = re.compile(
    r"^(Required |CHECK for |failed test|Failed checks|Log lines had"
    r"|.*\bERROR\b|.*[A-Za-z]Error\b|.*CRITICAL)"
)
# A file name may contain a line that claims success, so failures are matched too.
_FAILED = re.compile(
    r"^\w+ - +(CHECKS FAILED|PACKAGE CHECKER FOUND ERRORS|System description checker failed)", re.M
)
_NO_RESULT = re.compile(r"CRITICAL ERROR")  # what result_summarizer says of a whole result
_EMPTY_COMPLAINTS = ("ERROR - FAILED", "ERROR - System description file checker failed")


@dataclass(frozen=True)
class Answer:
    """Result of one call."""

    status: int  # exit status; negative after a signal, 1 after a timeout
    words: str  # everything printed


@dataclass(frozen=True)
class Call:
    """One run of a tool, with the function that judges its answer."""

    tool: str
    arguments: Sequence[str]
    judge: Callable[[Answer], list[Finding]]
    after: str = ""  # the tool that must finish first


@contextmanager
def started(
    calls: Sequence[Call],
    folder: Path,
    renamed: Mapping[str, str] | None = None,
    seconds: float = _SECONDS,
) -> Iterator[Answers]:
    """Start the tools and yield a function that waits for all answers and reports the tools that
    finish.

    Args:
        calls: most urgent first.
        folder: an empty folder for the tools' own files.
        renamed: strings to replace in the tools' output, in this order.
        seconds: time limit for one tool.
    """
    names = [call.tool for call in calls]
    indices = {
        call.after: [i for i, name in enumerate(names) if name == call.after] for call in calls
    }
    asked = {
        "jobs": [
            {"tool": call.tool, "arguments": call.arguments, "after": indices[call.after]}
            for call in calls
        ],
        "folder": str(folder.resolve()),
        "seconds": seconds,
    }
    command = [sys.executable, "-P", str(_WORKER)]
    # Start a new session, so that all its processes can be killed when the check ends.
    worker = subprocess.Popen(
        command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, cwd=folder, start_new_session=True
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    reports = worker.stdout

    def collect(progress: Callable[[str], None]) -> list[Answer]:
        answers = [Answer(1, "ERROR the process of the official tools ended too early")] * len(
            calls
        )
        for number, line in enumerate(reports, 1):
            index, status = json.loads(line)
            progress(f"{names[index]}, tool {number} of {len(calls)}")
            answers[index] = _read(folder / f"{index}.txt", status, seconds, renamed or {})
        return answers

    try:
        with worker.stdin:
            worker.stdin.write(json.dumps(asked).encode())
        yield collect
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        reports.close()
        worker.wait()


def _read(path: Path, status: int | None, seconds: float, renamed: Mapping[str, str]) -> Answer:
    if status is None:
        return Answer(1, f"ERROR no answer within {seconds:.0f} seconds")
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            words = file.read(_MAX_CHARACTERS)
    except OSError as error:
        return Answer(1, f"ERROR its output cannot be read ({error.strerror})")
    for old, new in renamed.items():
        words = words.replace(old, new)
    return Answer(status, words)


def compliance_checker(log: Path, subject: str, ruleset: str = RULESET) -> Call:
    """Check one log."""
    arguments = ["--usage", "training", "--ruleset", ruleset, str(log)]
    return _call("compliance_checker", arguments, subject, r"SUCCESS\b")


def system_desc_checker(system: Path, subject: str, ruleset: str = RULESET) -> Call:
    """Check one ``systems/<system>.json``."""
    arguments = [str(system), "training", ruleset]
    return _call(
        "system_desc_checker", arguments, subject, r"  System description checker passed for.*"
    )


def rcp_checker(
    folder: Path, subject: str, ruleset: str = RULESET, *, counts_epochs: bool = False
) -> Call:
    """Check that the ten logs of a folder do not converge faster than the reference can.

    Args:
        folder: of the logs.
        subject: its name in findings.
        ruleset: its reference points.
        counts_epochs: take samples from `train_samples`, as `epoch_num` has none.
    """
    arguments = ["--rcp_usage", "training", "--rcp_version", ruleset]
    if counts_epochs:
        arguments.append("--bert_train_samples")
    arguments.append(str(folder))
    return _call("rcp_checker", arguments, subject, r".*RCP test PASSED.*")


def package_checker(tree: Path, ruleset: str = RULESET, *, counts_epochs: bool = False) -> Call:
    """Check a tree. Writes ``scaling.json`` into result folders, which `result_summarizer` reads.

    ``counts_epochs`` as for `rcp_checker`.
    """
    arguments = [str(tree), "training", ruleset]
    if counts_epochs:
        arguments.append("--rcp-bert-train-samples")
    passed = "PACKAGE CHECKER FOUND NO ERRORS, SUCCESS !"
    return _call(
        "package_checker", arguments, ".", passed, but="accepting this under olympic scoring"
    )


def repo_checker(tree: Path) -> Call:
    """Check the names, sizes and links of a tree. The tool does not know the first rulesets, and
    does the same for all.
    """
    return _call("repo_checker", [str(tree), "training", RULESET], ".", "ALL CHECKS PASSED")


def result_summarizer(tree: Path, table: Path, ruleset: str = RULESET) -> Call:
    """Score each system of a tree in minutes, one finding each. Writes the .csv file ``table``.

    The tool prints what is wrong with a log that it then drops, as the rules allow for one of ten,
    and of convergence what `rcp_checker` says: only a result without a score is a failure here.
    """

    def judge(answer: Answer) -> list[Finding]:
        if answer.status != 0 or not table.is_file():
            complaints = _complaints(answer.words) or [_last_line(answer.words)]
            return [_refused("result_summarizer", ".", complaints)]
        with table.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
        if not rows:
            return [_refused("result_summarizer", ".", ["found no result"])]
        verdicts = [line for line in _complaints(answer.words) if _NO_RESULT.search(line)]
        scored = [row for row in rows if _minutes(row) is not None]
        unscored = [row for row in rows if _minutes(row) is None]
        findings = [_score(row) for row in scored]
        if verdicts:
            findings.append(_refused("result_summarizer", ".", verdicts))
        else:
            findings += [
                _refused("result_summarizer", row.get("system", "."), ["gives no score"])
                for row in unscored
            ]
        return findings

    arguments = [str(tree), "training", ruleset, "--csv", str(table)]
    return Call("result_summarizer", arguments, judge, after="package_checker")


def run(call: Call) -> list[Finding]:
    """Run one tool and judge its answer."""
    with (
        tempfile.TemporaryDirectory(prefix="mlbert-tool-") as scratch,
        started([call], Path(scratch)) as answers,
    ):
        return call.judge(answers(lambda step: None)[0])


def _call(tool: str, arguments: list[str], subject: str, passed: str, but: str = "") -> Call:
    """Return a call that passes if it exits with 0 and a line matches ``passed``.

    A line with ``but`` is a warning.
    """

    def judge(answer: Answer) -> list[Finding]:
        match = re.search(rf"^(?:INFO - )?({passed})", answer.words, re.MULTILINE)
        if answer.status != 0 or match is None or _FAILED.search(answer.words):
            return [
                _refused(tool, subject, _complaints(answer.words) or [_last_line(answer.words)])
            ]
        verdict = match[1].strip()
        tolerated = [line.strip() for line in answer.words.splitlines() if but and but in line]
        if tolerated:
            return [
                finding_of(
                    tool, subject, [Complaint(Outcome.WARN, f"{verdict} But: {tolerated[0]}")], ""
                )
            ]
        return [Finding(tool, subject, Outcome.PASS, verdict)]

    return Call(tool, arguments, judge)


def _refused(tool: str, subject: str, lines: Sequence[str]) -> Finding:
    return finding_of(tool, subject, [Complaint(Outcome.ERROR, line) for line in lines], "")


def _score(row: Mapping[str, str]) -> Finding:
    words = f"{_minutes(row):.4g} minutes ({row['division']})"
    return Finding("result_summarizer", row.get("system", "."), Outcome.PASS, words)


def _minutes(row: Mapping[str, str]) -> float | None:
    """Return a system's score, or None if its column is empty or not a positive number."""
    score = row.get(BENCHMARK) or ""
    is_number = re.fullmatch(r"\d+(\.\d+)?(e-?\d+)?", score) is not None
    return float(score) if is_number and float(score) > 0 else None


def _complaints(words: str) -> list[str]:
    """Return the lines in which a tool reports problems, without duplicates."""
    found: dict[str, None] = {}
    for line in words.splitlines():
        text = line.strip().removeprefix("WARNING - ").strip()
        if text and _COMPLAINT.match(text) and text not in _EMPTY_COMPLAINTS:
            found[text.removeprefix("ERROR - ").strip()] = None
    return list(found)


def _last_line(words: str) -> str:
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return lines[-1] if lines else "printed nothing"
