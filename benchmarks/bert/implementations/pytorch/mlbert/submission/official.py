"""The official tools of mlperf-logging, run as programs and judged by their words: most of them always exit with 0.

Every tool writes a log file into the current folder, so each runs in a scratch folder. Ruleset 5.0.0 is always given:
the defaults of the tools are rulesets without BERT.
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

from mlbert.core.rules import BENCHMARK, RULESET
from mlbert.submission.findings import Finding, Outcome

_TIME_LIMIT_SECONDS = 600
_COMPLAINT = re.compile(
    r"^(Required |CHECK for |failed test|Failed checks|Log lines had|.*\bERROR\b|.*[A-Za-z]Error\b|.*CRITICAL)"
)
_EMPTY_COMPLAINTS = ("ERROR - FAILED", "ERROR - System description file checker failed")
_MAX_WORDS = 400


def check_compliance(log: Path, subject: str, scratch: Path) -> Finding:
    """compliance_checker on one log."""
    arguments = ["--usage", "training", "--ruleset", RULESET, str(log)]
    return _judge("compliance_checker", arguments, subject, scratch, r"\bSUCCESS\b")


def check_system(system: Path, subject: str, scratch: Path) -> Finding:
    """system_desc_checker on one ``systems/<system>.json``."""
    arguments = [str(system), "training", RULESET]
    return _judge("system_desc_checker", arguments, subject, scratch, r".*checker passed for.*")


def check_convergence(folder: Path, subject: str, scratch: Path) -> Finding:
    """rcp_checker on one folder of ten logs: not faster to the target than the reference can be."""
    arguments = ["--rcp_usage", "training", "--rcp_version", RULESET, str(folder)]
    return _judge("rcp_checker", arguments, subject, scratch, r".*RCP test PASSED.*")


def check_package(tree: Path, scratch: Path) -> Finding:
    """package_checker on a whole tree. Writes ``scaling.json`` into result folders, so it runs before the summary."""
    arguments, passed = [str(tree), "training", RULESET], "PACKAGE CHECKER FOUND NO ERRORS, SUCCESS !"
    return _judge("package_checker", arguments, ".", scratch, passed, but="accepting this under olympic scoring")


def check_repository(tree: Path, scratch: Path) -> Finding:
    """repo_checker on a whole tree: names, sizes and links."""
    return _judge("repo_checker", [str(tree), "training", RULESET], ".", scratch, "ALL CHECKS PASSED")


def _judge(tool: str, arguments: list[str], subject: str, scratch: Path, passed: str, but: str = "") -> Finding:
    """Runs a tool, which passes when it exits with 0 and says ``passed`` (a pattern); a line with ``but`` warns."""
    exit_code, words = _run(tool, arguments, scratch)
    said = re.search(passed, words)
    if exit_code != 0 or said is None:
        return Finding(tool, subject, Outcome.ERROR, _complaints(words) or _last_line(words))
    verdict = said[0].removeprefix("INFO -").strip()
    tolerated = [line.strip() for line in words.splitlines() if but and but in line]
    if tolerated:
        return Finding(tool, subject, Outcome.WARN, f"{verdict} But: {tolerated[0]}")
    return Finding(tool, subject, Outcome.PASS, verdict)


def summarize(tree: Path, scratch: Path) -> list[Finding]:
    """result_summarizer on a whole tree: one finding for each system, with its score in minutes."""
    table = scratch / "summary.csv"
    table.unlink(missing_ok=True)
    exit_code, words = _run("result_summarizer", [str(tree), "training", RULESET, "--csv", str(table)], scratch)
    complaints = _complaints(words)
    if exit_code != 0 or complaints or not table.is_file():
        return [Finding("result_summarizer", ".", Outcome.ERROR, complaints or _last_line(words))]
    with table.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    findings = []
    for row in rows:
        score = row.get(BENCHMARK) or ""
        good = bool(re.fullmatch(r"\d+(\.\d+)?(e-?\d+)?", score)) and float(score) > 0
        words = f"{float(score):.4g} minutes ({row['division']})" if good else "gives no score"
        outcome = Outcome.PASS if good else Outcome.ERROR
        findings.append(Finding("result_summarizer", row.get("system", "."), outcome, words))
    return findings or [Finding("result_summarizer", ".", Outcome.ERROR, "found no result")]


def _run(tool: str, arguments: list[str], scratch: Path) -> tuple[int, str]:
    """Exit code and everything that the tool printed."""
    command = [sys.executable, "-m", f"mlperf_logging.{tool}", *arguments]
    limit = _TIME_LIMIT_SECONDS
    try:
        done = subprocess.run(
            command, cwd=scratch, stdout=PIPE, stderr=STDOUT, text=True, errors="replace", timeout=limit
        )
    except subprocess.TimeoutExpired:
        return 1, f"ERROR no answer within {limit} seconds"
    return done.returncode, done.stdout


def _complaints(words: str) -> str:
    """The lines in which a tool says what is wrong, each once."""
    found: dict[str, None] = {}
    for line in words.splitlines():
        text = line.strip().removeprefix("WARNING - ").strip()
        if text and _COMPLAINT.match(text) and text not in _EMPTY_COMPLAINTS:
            found[text.removeprefix("ERROR - ").strip()] = None
    joined = "; ".join(found)
    return joined if len(joined) <= _MAX_WORDS else joined[:_MAX_WORDS] + " ..."


def _last_line(words: str) -> str:
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return lines[-1] if lines else "said nothing"
