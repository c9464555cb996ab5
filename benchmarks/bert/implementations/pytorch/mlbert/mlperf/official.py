"""The official tools of mlperf-logging: how each is called, and how its words are judged: most always exit with 0.

Ruleset 5.0.0 is always given: the defaults of the tools are rulesets without BERT.
"""

from __future__ import annotations

import csv
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlbert.mlperf import tools
from mlbert.mlperf.findings import Complaint, Finding, Outcome, finding_of
from mlbert.mlperf.rules import BENCHMARK, RULESET
from mlbert.mlperf.tools import Answer, Job

_COMPLAINT = re.compile(
    r"^(Required |CHECK for |failed test|Failed checks|Log lines had|.*\bERROR\b|.*[A-Za-z]Error\b|.*CRITICAL)"
)
# A file's name may hold a line that says the opposite.
_FAILED = re.compile(r"^\w+ - +(CHECKS FAILED|PACKAGE CHECKER FOUND ERRORS|System description checker failed)", re.M)
_EMPTY_COMPLAINTS = ("ERROR - FAILED", "ERROR - System description file checker failed")


@dataclass(frozen=True)
class Call:
    """One run of a tool, and what its answer means."""

    tool: str
    arguments: Sequence[str]
    judge: Callable[[Answer], list[Finding]]
    after: str = ""  # the tool that must be finished before


def compliance_checker(log: Path, subject: str) -> Call:
    """On one log."""
    arguments = ["--usage", "training", "--ruleset", RULESET, str(log)]
    return _call("compliance_checker", arguments, subject, r"SUCCESS\b")


def system_desc_checker(system: Path, subject: str) -> Call:
    """On one ``systems/<system>.json``."""
    arguments = [str(system), "training", RULESET]
    return _call("system_desc_checker", arguments, subject, r"  System description checker passed for.*")


def rcp_checker(folder: Path, subject: str) -> Call:
    """On one folder of ten logs: not faster to the target than the reference can be."""
    arguments = ["--rcp_usage", "training", "--rcp_version", RULESET, str(folder)]
    return _call("rcp_checker", arguments, subject, r".*RCP test PASSED.*")


def package_checker(tree: Path) -> Call:
    """On a whole tree. Writes ``scaling.json`` into result folders, which `result_summarizer` reads."""
    arguments, passed = [str(tree), "training", RULESET], "PACKAGE CHECKER FOUND NO ERRORS, SUCCESS !"
    return _call("package_checker", arguments, ".", passed, but="accepting this under olympic scoring")


def repo_checker(tree: Path) -> Call:
    """On a whole tree: names, sizes and links."""
    return _call("repo_checker", [str(tree), "training", RULESET], ".", "ALL CHECKS PASSED")


def result_summarizer(tree: Path, table: Path) -> Call:
    """On a whole tree: one finding for each system, with its score in minutes. ``table``: a .csv to be written."""

    def judge(answer: Answer) -> list[Finding]:
        complaints = _complaints(answer.words)
        if answer.status != 0 or complaints or not table.is_file():
            return [_refused("result_summarizer", ".", complaints or [_last_line(answer.words)])]
        with table.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
        return [_score(row) for row in rows] or [_refused("result_summarizer", ".", ["found no result"])]

    arguments = [str(tree), "training", RULESET, "--csv", str(table)]
    return Call("result_summarizer", arguments, judge, after="package_checker")


def run(call: Call) -> list[Finding]:
    """Runs one tool and judges it."""
    with (
        tempfile.TemporaryDirectory(prefix="mlbert-tool-") as scratch,
        tools.started(jobs([call]), Path(scratch)) as answers,
    ):
        return call.judge(answers(lambda step: None)[0])


def jobs(calls: Sequence[Call]) -> list[Job]:
    """What the worker is asked for."""
    return [
        Job(call.tool, call.arguments, [i for i, other in enumerate(calls) if other.tool == call.after])
        for call in calls
    ]


def _call(tool: str, arguments: list[str], subject: str, passed: str, but: str = "") -> Call:
    """A tool that passes when it exits with 0 and says ``passed`` (a pattern) in a line; one with ``but`` warns."""

    def judge(answer: Answer) -> list[Finding]:
        said = re.search(rf"^(?:INFO - )?({passed})", answer.words, re.MULTILINE)
        if answer.status != 0 or said is None or _FAILED.search(answer.words):
            return [_refused(tool, subject, _complaints(answer.words) or [_last_line(answer.words)])]
        verdict = said[1].strip()
        tolerated = [line.strip() for line in answer.words.splitlines() if but and but in line]
        if tolerated:
            return [finding_of(tool, subject, [Complaint(Outcome.WARN, f"{verdict} But: {tolerated[0]}")], "")]
        return [Finding(tool, subject, Outcome.PASS, verdict)]

    return Call(tool, arguments, judge)


def _refused(tool: str, subject: str, lines: Sequence[str]) -> Finding:
    return finding_of(tool, subject, [Complaint(Outcome.ERROR, line) for line in lines], "")


def _score(row: dict[str, str]) -> Finding:
    score, system = row.get(BENCHMARK) or "", row.get("system", ".")
    if not re.fullmatch(r"\d+(\.\d+)?(e-?\d+)?", score) or float(score) <= 0:
        return _refused("result_summarizer", system, ["gives no score"])
    return Finding("result_summarizer", system, Outcome.PASS, f"{float(score):.4g} minutes ({row['division']})")


def _complaints(words: str) -> list[str]:
    """The lines in which a tool says what is wrong, each once."""
    found: dict[str, None] = {}
    for line in words.splitlines():
        text = line.strip().removeprefix("WARNING - ").strip()
        if text and _COMPLAINT.match(text) and text not in _EMPTY_COMPLAINTS:
            found[text.removeprefix("ERROR - ").strip()] = None
    return list(found)


def _last_line(words: str) -> str:
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return lines[-1] if lines else "said nothing"
