"""Run the checks that no official tool makes on the logs of one system.

Each check is a function of a `ResultSet` that yields complaints. If there are none, the table shows the first line of
the function's docstring. Only a broken rule is an error. Properties that only this code's logs have (provenance, call
sites, one seed, one writer) are required only of them: see `mlaudit.logs.Log.is_ours`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

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
from mlaudit.findings import Complaints, Finding, finding_of
from mlaudit.result_set import Check, ResultSet

CHECKS: Mapping[str, Check] = {
    "program": check_program,
    "lines": check_lines,
    "division": check_division,
    "status": pace.check_status,
    "order of events": check_order,
    "time stamps": pace.check_time,
    "clock": pace.check_clock,
    "runs apart": pace.check_overlap,
    "speed": pace.check_pace,
    "evaluation time": pace.check_evaluation_time,
    "same settings": check_same_settings,
    "plain numbers": check_numbers,
    "seeds": check_seeds,
    "series": check_series,
    "copies": check_copies,
    "evaluations": check_evaluations,
    "accuracies": check_accuracies,
    "rules": check_rules,
    "values": check_values,
    "single lines": check_single_lines,
    "configuration": check_configuration,
    "event types": check_event_types,
    "writer": check_writer,
    "code": check_code,
}
TREE_CHECKS: Mapping[str, Check] = {
    "call sites": check_call_sites,
    "submitter": check_submitter,
    "filed under": check_whose,
    "system description": check_description,
    "machine": check_machine,
}


def run_checks(results: ResultSet, subject: str) -> list[Finding]:
    """Return one row for each check: its docstring if it passed, else all its complaints with the worst outcome.

    A log without events is reported by `check_lines` and skipped by the other checks.
    """
    checks = CHECKS if results.system is None else {**CHECKS, **TREE_CHECKS}
    readable = replace(results, logs=[log for log in results.logs if log.events])
    rows = []
    for name, check in checks.items():
        seen = results if check is check_lines else readable
        if seen.logs:
            rows.append(check_row(name, subject, check, seen))
    return rows


def check_row(name: str, subject: str, check: Callable[..., Complaints], *given: Any) -> Finding:
    """Return the row of a check: the first line of its docstring if it passed, else what it found."""
    return finding_of(
        f"own: {name}", subject, list(check(*given)), (check.__doc__ or "").partition("\n")[0]
    )
