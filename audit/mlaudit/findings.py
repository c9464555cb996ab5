"""Results of checks: each `Finding` is one row of the final table and holds `Complaint`s.

`write_json` writes them for programs: one JSON object with the verdict,
the checkers' versions and all complaints.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from mlaudit.advice import Advice, advice_of
from mlbert.host.files import writing
from mlbert.host.provenance import package_versions

_MAX_COMPLAINTS = 6
_PLACE = re.compile(r"^\S+\.txt: (line \d+: )?")  # where a complaint was found
_MAX_CHARACTERS = 300  # of a complaint in the table
STANDARD_OUTPUT = Path("-")
ROUND = "round"  # the row that says by which round's rules the others judge


class Outcome(StrEnum):
    """Result of one check, mildest first. Only ERROR makes the overall check fail."""

    PASS = "pass"
    SKIP = "skipped"
    NOTE = "note"  # worth knowing, no action needed
    WARN = "warning"  # unusual, or wrong but not against a rule
    ERROR = "ERROR"  # a rule is broken, or an official tool rejects it


class LogLine(NamedTuple):
    """One line of a log."""

    file: str
    number: int  # from 1
    text: str


class Complaint(NamedTuple):
    """One thing that a check found."""

    outcome: Outcome
    text: str
    rule: str = ""  # short name of the rule that is broken; empty if there is none
    lines: tuple[LogLine, ...] = ()  # of the log that show it
    honest: str = ""  # an honest explanation; empty for that of the check
    settle: str = ""  # what would settle it; empty for that of the check


Complaints = Iterator[Complaint]


@dataclass(frozen=True)
class Finding:
    """One row of the final table."""

    check: str  # name of the official tool, or "own: ..." for our own checks
    subject: str  # what was checked, relative to the given folder
    outcome: Outcome
    words: str  # the tool's message, or the reason, or the first complaints
    complaints: tuple[Complaint, ...] = ()  # all of them, the worst first
    ruleset: str = ""  # of the official tools, in the row `ROUND`

    @property
    def advice(self) -> Advice:
        """Return the advice of the worst complaint or, if it has none, of the check."""
        usual = advice_of(self.check)
        if not self.complaints:
            return usual
        worst = self.complaints[0]
        return Advice(worst.honest or usual.honest, worst.settle or usual.settle)

    @property
    def severity(self) -> int:
        """Return 0 for a check that passed, and higher numbers for worse outcomes."""
        return list(Outcome).index(self.outcome)

    def as_json(self) -> dict[str, object]:
        """Return the row as plain values, with all complaints."""
        complaints = [
            {
                "severity": c.outcome.value,
                "text": c.text,
                "rule": c.rule,
                "lines": [line._asdict() for line in c.lines],
                "honest_explanation": c.honest or self.advice.honest,
                "would_settle_it": c.settle or self.advice.settle,
            }
            for c in self.complaints
        ]
        outcome = self.outcome.value
        row = {
            "check": self.check,
            "subject": self.subject,
            "outcome": outcome,
            "words": self.words,
        }
        return {**row, "complaints": complaints}


def finding_of(check: str, subject: str, complaints: Sequence[Complaint], passed: str) -> Finding:
    """Return one row for a check: its complaints with the worst outcome,
    or ``passed`` if there are none.
    """
    if not complaints:
        return Finding(check, subject, Outcome.PASS, passed)
    by_severity = sorted(complaints, key=lambda complaint: -list(Outcome).index(complaint.outcome))
    distinct = tuple(dict.fromkeys(by_severity))
    return Finding(check, subject, distinct[0].outcome, _join(distinct), distinct)


def without_place(text: str) -> str:
    """Return the text of a complaint without the file and line that it begins with."""
    return _PLACE.sub("", text)


def _join(complaints: Sequence[Complaint]) -> str:
    """Join up to `_MAX_COMPLAINTS` complaints, merging equal ones of several logs,
    with their rules.
    """
    same: dict[Complaint, list[str]] = {}
    for complaint in complaints:
        same.setdefault(
            complaint._replace(text=without_place(complaint.text), lines=()), []
        ).append(complaint.text)
    rules: dict[tuple[Outcome, str], list[str]] = {}
    for common, texts in itertools.islice(same.items(), _MAX_COMPLAINTS):
        more = f" (and in {len(texts) - 1} more places)" if len(texts) > 1 else ""
        rules.setdefault((common.outcome, common.rule), []).append(_shown(texts[0]) + more)
    has_several = len({outcome for outcome, _ in rules}) > 1
    parts = []
    for (outcome, rule), texts in rules.items():
        severity = f"{outcome.value}: " if has_several else ""
        parts.append(severity + "; ".join(texts) + (f" [{rule}]" if rule else ""))
    left_out = len(same) - _MAX_COMPLAINTS
    return "; ".join(parts) + (f"; and {left_out} more" if left_out > 0 else "")


def _shown(text: str) -> str:
    """Return a text without control characters, cut to `_MAX_CHARACTERS`."""
    plain = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
    return plain if len(plain) <= _MAX_CHARACTERS else plain[:_MAX_CHARACTERS] + " ..."


def failed(findings: Iterable[Finding]) -> bool:
    """Return True if any finding is an error."""
    return any(finding.outcome is Outcome.ERROR for finding in findings)


def write_json(target: Path, checked: Mapping[Path, Sequence[Finding]]) -> None:
    """Write the findings of each path as JSON, or print them for `STANDARD_OUTPUT`.

    Raises UserError on failure.
    """
    versions = package_versions()
    found = {
        "verdict": "failed" if any(failed(findings) for findings in checked.values()) else "passed",
        "versions": {name: versions.get(name) for name in ("mlbert", "mlperf-logging")}
        | {"ruleset": _rulesets(checked)},
        "findings": [
            {"path": str(path), **row.as_json()} for path, rows in checked.items() for row in rows
        ],
    }
    text = json.dumps(found, indent=2) + "\n"
    if target == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
    with writing(target, "Name another file"):
        target.write_text(text, encoding="utf-8")


def _rulesets(checked: Mapping[Path, Sequence[Finding]]) -> str:
    """Return the rulesets that judged, joined; the paths may be of several rounds."""
    used = {row.ruleset for rows in checked.values() for row in rows if row.check == ROUND}
    return ", ".join(sorted(used))
