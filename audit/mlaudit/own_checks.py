"""Run the checks that no official tool makes on the logs of one system.

Each check is a function of a `ResultSet` that yields complaints. If there are none, the table shows
the first line of the function's docstring. Only a broken rule is an error. Properties that only
this code's logs have (provenance, call sites, one seed, one writer) are required only of them: see
`mlaudit.logs.Log.is_ours`. Logs of other benchmarks than BERT get the checks that do not know BERT.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlaudit.advice import OWN
from mlaudit.checks import pace
from mlaudit.checks.accuracy import check_accuracies
from mlaudit.checks.code_provenance import check_event_types, check_writer
from mlaudit.checks.configuration import check_configuration
from mlaudit.checks.duplicate_runs import check_copies
from mlaudit.checks.evaluation import check_evaluations
from mlaudit.checks.event_order import check_division, check_lines, check_numbers, check_order
from mlaudit.checks.run_identity import check_call_sites, check_code, check_whose
from mlaudit.checks.same import check_program, check_same_settings, check_seeds, check_series
from mlaudit.checks.system_file import check_description, check_machine, check_submitter
from mlaudit.checks.values import check_rules, check_single_lines, check_values
from mlaudit.findings import (
    Complaint,
    Complaints,
    Finding,
    Outcome,
    finding_of,
    without_place,
)
from mlaudit.registered_check import OwnCheck, Scope
from mlaudit.result_set import ResultSet

_FEWEST_WITH_A_HABIT = 3  # logs
_NUMBER = re.compile(r"\d[\d.,e+-]*")

CHECKS: Mapping[str, OwnCheck] = {
    "program": OwnCheck(check_program, Scope.EVERY),
    "lines": OwnCheck(check_lines, Scope.EVERY),
    "division": OwnCheck(check_division, Scope.EVERY),
    "status": OwnCheck(pace.check_status, Scope.EVERY),
    "order of events": OwnCheck(check_order, Scope.MEASURED_ON_BERT),
    "time stamps": OwnCheck(pace.check_time, Scope.EVERY),
    "clock": OwnCheck(pace.check_clock, Scope.EVERY),
    "runs apart": OwnCheck(pace.check_overlap, Scope.EVERY),
    "speed": OwnCheck(pace.check_pace, Scope.MEASURED_ON_BERT),
    "evaluation time": OwnCheck(pace.check_evaluation_time, Scope.MEASURED_ON_BERT),
    "same settings": OwnCheck(check_same_settings, Scope.EVERY),
    "plain numbers": OwnCheck(check_numbers, Scope.BERT),
    "seeds": OwnCheck(check_seeds, Scope.EVERY),
    "series": OwnCheck(check_series, Scope.EVERY),
    "copies": OwnCheck(check_copies, Scope.EVERY),
    "evaluations": OwnCheck(check_evaluations, Scope.BERT),
    "accuracies": OwnCheck(check_accuracies, Scope.BERT),
    "rules": OwnCheck(check_rules, Scope.BERT),
    "values": OwnCheck(check_values, Scope.BERT),
    "single lines": OwnCheck(check_single_lines, Scope.BERT),
    "configuration": OwnCheck(check_configuration, Scope.EVERY),
    "event types": OwnCheck(check_event_types, Scope.EVERY),
    "writer": OwnCheck(check_writer, Scope.EVERY),
    "code": OwnCheck(check_code, Scope.EVERY),
    "call sites": OwnCheck(check_call_sites, Scope.EVERY, needs_system=True),
    "submitter": OwnCheck(check_submitter, Scope.EVERY, needs_system=True),
    "filed under": OwnCheck(check_whose, Scope.EVERY, needs_system=True),
    "system description": OwnCheck(check_description, Scope.EVERY, needs_system=True),
    "machine": OwnCheck(check_machine, Scope.EVERY, needs_system=True),
}


def run_checks(results: ResultSet, subject: str) -> list[Finding]:
    """Return one row for each check that applies: its docstring if it passed, else all its
    complaints with the worst outcome.

    A log without events is reported by `check_lines` and skipped by the other checks.
    """
    readable = replace(results, logs=[log for log in results.logs if log.events])
    rows = []
    for name, check in CHECKS.items():
        if check.needs_system and results.system is None:
            continue
        if check.scope is Scope.BERT and not results.is_bert:
            continue
        seen = results if check.function is check_lines else readable
        if seen.logs:
            rows.append(_row(name, subject, check, seen))
    return rows


def _row(name: str, subject: str, check: OwnCheck, results: ResultSet) -> Finding:
    return _finding(name, subject, check.function, complaints_of(check, results))


def complaints_of(check: OwnCheck, results: ResultSet) -> list[Complaint]:
    """Return what a check finds, each as severe as its scope allows."""
    complaints = list(check.function(results))
    if check.scope is not Scope.MEASURED_ON_BERT:
        return complaints
    if results.is_bert:
        return _without_habits(complaints, results)
    return [_at_most_a_warning(complaint) for complaint in complaints]


def _without_habits(complaints: Sequence[Complaint], results: ResultSet) -> list[Complaint]:
    """Make a warning of an error that most logs of another program have: it is how it logs.

    Order and times were measured on a few programs. What somebody changed by hand is in few logs.
    """
    if results.own_logs:
        return list(complaints)
    files_with: defaultdict[str, set[str]] = defaultdict(set)
    for complaint in complaints:
        if complaint.outcome is Outcome.ERROR:
            files_with[_shape(complaint)] |= {line.file for line in complaint.lines}
    kept = []
    for complaint in complaints:
        number = len(files_with[_shape(complaint)])
        is_habit = number >= _FEWEST_WITH_A_HABIT and 2 * number > len(results.logs)
        if complaint.outcome is Outcome.ERROR and is_habit:
            honest = f"{number} of {len(results.logs)} logs have it: the program logs so"
            complaint = complaint._replace(outcome=Outcome.WARN, honest=honest)
        kept.append(complaint)
    return kept


def _shape(complaint: Complaint) -> str:
    """Return the text of a complaint without its place and numbers."""
    return _NUMBER.sub("#", without_place(complaint.text))


def _at_most_a_warning(complaint: Complaint) -> Complaint:
    if complaint.outcome is not Outcome.ERROR:
        return complaint
    return complaint._replace(outcome=Outcome.WARN)


def check_row(name: str, subject: str, check: Callable[..., Complaints], *given: Any) -> Finding:
    """Return the row of a check: the first line of its docstring if it passed, else what it
    found.
    """
    return _finding(name, subject, check, check(*given))


def _finding(
    name: str, subject: str, check: Callable[..., Complaints], complaints: Iterable[Complaint]
) -> Finding:
    first, _, _ = (check.__doc__ or "").partition("\n\n")
    passed = " ".join(first.split())
    return finding_of(f"{OWN}{name}", subject, list(complaints), passed)
