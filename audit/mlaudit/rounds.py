"""The rounds of MLPerf Training that had BERT, and which of them logs are of."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from mlaudit.logs import Log
from mlaudit.round_rules import Round
from mlbert.host.errors import UserError
from mlbert.host.system_description import STATUSES

_FIRST_LOGS = date(2020, 1, 1)  # earlier stamps are of a clock that was not set
# A folder above the logs that names their round: training_results_v2.1, v2.1 or v2.1_submitters.
_FOLDER = re.compile(r"(training_results_)?v(\d\.\d)(_.*)?")
# What rounds up to v4.0 call the statuses of a system, besides the words of today.
_EARLIER_STATUSES = {
    "available": "onprem",
    "available onprem": "onprem",
    "available on-prem": "onprem",
    "available on premise": "onprem",
    "available on-premise": "onprem",
    "available cloud": "cloud",
    "available in cloud": "cloud",
    "research": "research",
    "rdi": "research",
    **{name: name for name in ("onprem", "cloud", "preview")},
}
ROUNDS: tuple[Round, ...] = (
    Round((0, 7), date(2020, 7, 29)),
    Round((1, 0), date(2021, 6, 30)),
    Round((1, 1), date(2021, 12, 1)),
    Round((2, 0), date(2022, 6, 29)),
    Round((2, 1), date(2022, 11, 9)),
    Round((3, 0), date(2023, 6, 27)),
    Round((3, 1), date(2023, 11, 8)),
    Round((4, 0), date(2024, 6, 12)),
    Round((4, 1), date(2024, 11, 13)),
    Round((5, 0), date(2025, 6, 4)),
)
LATEST = ROUNDS[-1]
_BY_RULESET = {one.ruleset: one for one in ROUNDS}
_LAST_WITH_STATUS = _BY_RULESET["4.0.0"]  # of logs
_LAST_WITH_EPSILON = _BY_RULESET["2.1.0"]  # opt_epsilon without opt_lamb_epsilon


@dataclass(frozen=True)
class Judged:
    """The round by whose rules logs are judged, and the sentence that says why."""

    round: Round
    sentence: str


def round_of_ruleset(name: str) -> Round:
    """Return the round of a ruleset, such as 2.1.0. Raises UserError if BERT is not in it."""
    if name not in _BY_RULESET:
        reason = f"is {name}, which has no BERT"
        raise UserError("config.choice", "--ruleset", reason, "Give a different one", _BY_RULESET)
    return _BY_RULESET[name]


def round_of_date(day: date) -> Round:
    """Return the first round whose results were published on a day or later, else the last one."""
    return next((one for one in ROUNDS if day <= one.published), LATEST)


def round_of_log(log: Log) -> Round:
    """Return the round of one log."""
    return judge([log]).round


def judge(
    logs: Sequence[Log],
    folder: Path | None = None,
    system: Mapping[str, Any] | None = None,
    ruleset: str | None = None,
) -> Judged:
    """Find the round of logs by their dates; without dates, by words that only some rounds have.

    Args:
        logs: of one round.
        folder: where they are. If its path names a later round than their dates, it is that.
        system: the description of their system.
        ruleset: the ruleset that the user asks for.

    Raises:
        UserError: the ruleset is unknown.
    """
    days = sorted(day for log in logs if (day := _day(log)) is not None)
    subject = f"logs of {_months(days)}" if days else "logs without dates"
    if ruleset is not None:
        given = round_of_ruleset(ruleset)
        return Judged(given, f"{subject}: judged as round {given.name}, as --ruleset asks")
    if any(log.is_ours for log in logs):
        return Judged(LATEST, f"{subject}, of this code: round {LATEST.name}")
    if not days:
        found = _round_of_words(logs, system)
        return Judged(found, f"{subject}: judged as round {found.name} by their words")
    middle = statistics.median_low(days)
    found = round_of_date(middle)
    named = _round_of_folder(folder)
    # Two results of v5.0 are of runs from before v3.1; no run is of a round that was over.
    if named is not None and named > found:
        return Judged(named, f"{subject}: round {named.name}, as their folder says")
    if middle > found.published:
        return Judged(found, f"{subject}: judged as round {found.name}, the last with BERT")
    return Judged(found, f"{subject}: round {found.name}")


def earlier_status(text: str) -> str | None:
    """Return the status of today for one in the words of rounds up to v4.0, or None."""
    name = _EARLIER_STATUSES.get(" ".join(text.casefold().split()))
    return None if name is None else STATUSES[name]


def _day(log: Log) -> date | None:
    event = log.first("run_start") or next(iter(log.events), None)
    if event is None:
        return None
    try:
        day = datetime.fromtimestamp(event.time_ms / 1000, tz=UTC).date()
    except (ValueError, OverflowError, OSError):
        return None
    return day if day >= _FIRST_LOGS else None


def _months(days: Sequence[date]) -> str:
    first = days[0]
    last = days[-1]
    if (first.year, first.month) == (last.year, last.month):
        return f"{last:%B %Y}"
    begin = f"{first:%B}" if first.year == last.year else f"{first:%B %Y}"
    return f"{begin} to {last:%B %Y}"


def _round_of_folder(folder: Path | None) -> Round | None:
    names = reversed(folder.resolve().parts) if folder is not None else ()
    for name in names:
        match = _FOLDER.fullmatch(name)
        if match is not None and f"{match[2]}.0" in _BY_RULESET:
            return _BY_RULESET[f"{match[2]}.0"]
    return None


def _round_of_words(logs: Sequence[Log], system: Mapping[str, Any] | None) -> Round:
    has_old_epsilon = any(
        log.first("opt_epsilon") and not log.first("opt_lamb_epsilon") for log in logs
    )
    if has_old_epsilon:
        return _LAST_WITH_EPSILON
    has_status = any(log.first("submission_status") for log in logs)
    if has_status or earlier_status(str((system or {}).get("status"))) is not None:
        return _LAST_WITH_STATUS
    return LATEST
