"""Run the checks that no official tool makes on the logs of one system.

Each check is a function of a `ResultSet` that yields complaints. If there are none, the table shows
the first line of the function's docstring. Only a broken rule is an error. Properties that only
this code's logs have (provenance, call sites, one seed, one writer) are required only of them: see
`mlaudit.logs.Log.is_ours`. Logs of other benchmarks than BERT get the checks that do not know BERT.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from mlaudit.advice import OWN
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
from mlbert.host.registry import Registry

_FEWEST_WITH_A_HABIT = 3  # logs
_NUMBER = re.compile(r"\d[\d.,e+-]*")

CHECKS = Registry(
    {
        "program": OwnCheck("mlaudit.checks.same:check_program", Scope.EVERY),
        "lines": OwnCheck("mlaudit.checks.event_order:check_lines", Scope.EVERY, reads_empty=True),
        "division": OwnCheck("mlaudit.checks.event_order:check_division", Scope.EVERY),
        "status": OwnCheck("mlaudit.checks.pace:check_status", Scope.EVERY),
        "order of events": OwnCheck(
            "mlaudit.checks.event_order:check_order", Scope.MEASURED_ON_BERT
        ),
        "time stamps": OwnCheck("mlaudit.checks.pace:check_time", Scope.EVERY),
        "clock": OwnCheck("mlaudit.checks.pace:check_clock", Scope.EVERY),
        "runs apart": OwnCheck("mlaudit.checks.pace:check_overlap", Scope.EVERY),
        "speed": OwnCheck("mlaudit.checks.pace:check_pace", Scope.MEASURED_ON_BERT),
        "evaluation time": OwnCheck(
            "mlaudit.checks.pace:check_evaluation_time", Scope.MEASURED_ON_BERT
        ),
        "same settings": OwnCheck("mlaudit.checks.same:check_same_settings", Scope.EVERY),
        "plain numbers": OwnCheck("mlaudit.checks.event_order:check_numbers", Scope.BERT),
        "seeds": OwnCheck("mlaudit.checks.same:check_seeds", Scope.EVERY),
        "series": OwnCheck("mlaudit.checks.same:check_series", Scope.EVERY),
        "copies": OwnCheck("mlaudit.checks.duplicate_runs:check_copies", Scope.EVERY),
        "evaluations": OwnCheck("mlaudit.checks.evaluation:check_evaluations", Scope.BERT),
        "accuracies": OwnCheck("mlaudit.checks.accuracy:check_accuracies", Scope.BERT),
        "rules": OwnCheck("mlaudit.checks.values:check_rules", Scope.BERT),
        "values": OwnCheck("mlaudit.checks.values:check_values", Scope.BERT),
        "single lines": OwnCheck("mlaudit.checks.values:check_single_lines", Scope.BERT),
        "configuration": OwnCheck("mlaudit.checks.configuration:check_configuration", Scope.EVERY),
        "event types": OwnCheck("mlaudit.checks.code_provenance:check_event_types", Scope.EVERY),
        "writer": OwnCheck("mlaudit.checks.code_provenance:check_writer", Scope.EVERY),
        "code": OwnCheck("mlaudit.checks.run_identity:check_code", Scope.EVERY),
        "call sites": OwnCheck(
            "mlaudit.checks.run_identity:check_call_sites", Scope.EVERY, needs_system=True
        ),
        "submitter": OwnCheck(
            "mlaudit.checks.system_file:check_submitter", Scope.EVERY, needs_system=True
        ),
        "filed under": OwnCheck(
            "mlaudit.checks.run_identity:check_whose", Scope.EVERY, needs_system=True
        ),
        "system description": OwnCheck(
            "mlaudit.checks.system_file:check_description", Scope.EVERY, needs_system=True
        ),
        "machine": OwnCheck(
            "mlaudit.checks.system_file:check_machine", Scope.EVERY, needs_system=True
        ),
    }
)


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
        seen = results if check.reads_empty else readable
        if seen.logs:
            rows.append(_row(name, subject, check, seen))
    return rows


def _row(name: str, subject: str, check: OwnCheck, results: ResultSet) -> Finding:
    return _finding(name, subject, check.load(), complaints_of(check, results))


def complaints_of(check: OwnCheck, results: ResultSet) -> list[Complaint]:
    """Return what a check finds, each as severe as its scope allows."""
    complaints = list(check.load()(results))
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
