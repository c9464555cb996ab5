"""What a check says: one `Finding` a row of the final table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """Result of one check, mildest first. Only FAIL makes the whole check fail."""

    INFO = "info"
    PASS = "pass"
    SKIP = "skipped"
    WARN = "warning"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """One row of the final table."""

    check: str  # name of the official tool, or "own: ..." for what no official tool looks at
    subject: str  # what was looked at, relative to the folder given
    outcome: Outcome
    words: str  # the tool's own, or the reason


def failed(findings: Iterable[Finding]) -> bool:
    """Whether any of them fails."""
    return any(finding.outcome is Outcome.FAIL for finding in findings)
