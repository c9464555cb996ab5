"""Checks for what no official tool looks at, on the logs of one system.

Each check is a function of a `ResultSet` that yields complaints. Without any, the table says the first line of the
function's docstring.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlbert.core.rules import NUM_EVAL_SAMPLES, NUM_RESULT_FILES, eval_interval
from mlbert.submission.call_sites import Sources
from mlbert.submission.findings import Finding, Outcome
from mlbert.submission.keys import is_hyperparameter, is_numeric
from mlbert.submission.logs import Log

_NUMBERS = ("seed", "train_samples", "eval_samples", "eval_accuracy")
_SAME_IN_ALL = (
    *("submission_benchmark", "submission_org", "submission_platform", "eval_samples"),
    *("recipe", "config_file_sha256", "model_shape_sha256", "train_data", "eval_data", "commit"),
)
_MAX_COMPLAINTS = 6
_MISREAD_TEXTS = ("eval_accuracy", "eval_error", "global_batch_size")


@dataclass(frozen=True)
class ResultSet:
    """The logs of one system, in the order of their names."""

    logs: Sequence[Log]
    system: Mapping[str, Any] | None = None  # systems/<system>.json; None outside a tree, as is the next but one
    division: str | None = None  # that the user named
    tree: Path | None = None  # its folder, with its history if it has one

    @property
    def wanted_division(self) -> object:
        """What every log should say: the user's word, else the system's, else the first log's."""
        if self.division is not None:
            return self.division
        if self.system is not None:
            return self.system.get("division")
        return self.logs[0].value("submission_division")


Complaints = Iterator[tuple[Outcome, str]]
Check = Callable[[ResultSet], Complaints]


def run_checks(results: ResultSet, subject: str) -> list[Finding]:
    """One row for each check: what it made sure of, or all its complaints with the worst outcome."""
    findings = []
    checks = CHECKS if results.system is None else {**CHECKS, **TREE_CHECKS}
    for name, check in checks.items():
        complaints = list(check(results))
        outcome, words = Outcome.PASS, (check.__doc__ or "").partition("\n")[0]
        if complaints:
            outcome = Outcome.FAIL if any(mark is Outcome.FAIL for mark, _ in complaints) else Outcome.WARN
            words = _join(complaints)
        findings.append(Finding(f"own: {name}", subject, outcome, words))
    return findings


def check_lines(results: ResultSet) -> Complaints:
    """Every line is JSON with metadata, and no line is misread by the official convergence checker."""
    for log in results.logs:
        for text in log.broken:
            yield _fail(log, text)
    for log in results.logs:
        for event in log.events:
            if event.metadata is None:
                yield _fail(log, f"line {event.line}: {event.key} has no metadata")
            for text in _MISREAD_TEXTS:
                if text in event.text and event.key != text:
                    yield _fail(log, f"line {event.line}: {event.key} contains the text {text}")


def check_division(results: ResultSet) -> Complaints:
    """Logs, system description and command line name one division."""
    wanted = results.wanted_division
    if wanted not in ("open", "closed"):
        yield Outcome.FAIL, f"division {wanted!r} is neither open nor closed"
    if results.system is not None and results.system.get("division") != wanted:
        yield Outcome.FAIL, f"the system description says {results.system.get('division')!r}"
    for log in results.logs:
        if (said := log.value("submission_division")) != wanted:
            yield _fail(log, f"says {said!r}, not {wanted!r}")


def check_status(results: ResultSet) -> Complaints:
    """Every run ended in success; of ten, one that did not is dropped by the scoring."""
    bad = [log for log in results.logs if log.status != "success"]
    is_tolerated = len(bad) == 1 and len(results.logs) == NUM_RESULT_FILES
    for log in bad:
        yield Outcome.WARN if is_tolerated else Outcome.FAIL, f"{log.path.name}: run_stop status is {log.status!r}"


def check_time(results: ResultSet) -> Complaints:
    """Time stamps never go back, run_stop is after run_start, and no run was continued from a checkpoint."""
    for log in results.logs:
        if log.all("resumed_from_step"):
            outcome = Outcome.WARN if results.system is None else Outcome.FAIL
            yield outcome, f"{log.path.name}: continued from a checkpoint, so its time is no result"
        for before, after in itertools.pairwise(log.events):
            if after.time_ms < before.time_ms:
                yield _fail(log, f"line {after.line}: time goes back at {after.key}")
                break
        if log.minutes is not None and log.minutes <= 0:
            yield _fail(log, "run_stop is not after run_start")


def check_same_settings(results: ResultSet) -> Complaints:
    """Hyper-parameters, code and data, and what is submitted by whom, are the same in all logs."""
    first, *others = results.logs
    logged = dict.fromkeys(event.key for log in results.logs for event in log.events)
    for key in (*filter(is_hyperparameter, logged), *_SAME_IN_ALL):
        for log in others:
            if log.value(key) != first.value(key):
                yield _fail(log, f"{key} is {log.value(key)!r}, in {first.path.name} {first.value(key)!r}")


def check_numbers(results: ResultSet) -> Complaints:
    """What should be a number is a plain, finite one; sample counts are integers."""
    for log in results.logs:
        for event in log.events:
            if (event.key in _NUMBERS or is_numeric(event.key)) and not _is_number(event.value):
                yield _fail(log, f"line {event.line}: {event.key} {event.value!r} is not a plain number")
        for samples, _ in log.evaluations:
            if type(samples) is not int:
                yield _fail(log, f"eval_accuracy has epoch_num {samples!r}, not a count of samples")
        for key in ("train_samples", "eval_samples", "global_batch_size"):
            value = log.value(key)
            if _is_number(value) and value <= 0:
                yield _fail(log, f"{key} is {value}")


def check_seeds(results: ResultSet) -> Complaints:
    """Each log names one seed, and no two the same."""
    names_of: dict[Any, list[str]] = defaultdict(list)
    for log in results.logs:
        seeds = log.all("seed")
        if len(seeds) != 1:
            yield _fail(log, f"logs {len(seeds)} seeds, not one")
        if seeds:
            names_of[seeds[0].value].append(log.path.name)
    for seed, names in names_of.items():
        if len(names) > 1:
            yield Outcome.FAIL, f"seed {seed} is in {', '.join(names)}"


def check_evaluations(results: ResultSet) -> Complaints:
    """Evaluations come in order, up to the end of training; in closed on the grid of the rules, on 10,000 samples."""
    for log in results.logs:
        points = [samples for samples, _ in log.evaluations if _is_number(samples)]
        if any(after <= before for before, after in itertools.pairwise(points)):
            yield _fail(log, "evaluations are not in the order of samples")
        trained = log.value("train_samples")
        if points and _is_number(trained) and points[-1] > trained:
            yield _fail(log, f"evaluated at {points[-1]} samples but trained on {trained}")
        if results.wanted_division == "closed":
            yield from _off_grid(log, points)


def check_call_sites(results: ResultSet) -> Complaints:
    """Every file:lineno of a log is in the tree, and in the logs of this code it is the call that logged the key."""
    assert results.tree is not None
    for log in results.logs:
        sources = Sources(results.tree, log)
        is_ours = log.first("configuration") is not None  # of other code we know no more than that it has such a line
        if is_ours and sources.gap:
            yield Outcome.WARN, f"{log.path.name}: {sources.gap}, so its lines are looked up in the tree"
        for event in log.events:
            if event.call_site is None:
                yield Outcome.WARN, f"{log.path.name}: {event.key} names no file and line"
                continue
            name, number = event.call_site
            if sources.line(name, number) is None:
                yield Outcome.WARN, f"{name}:{number} is not in the tree"
            elif is_ours and sources.call_of(name, number, event.key) is None:
                yield Outcome.WARN if sources.gap else Outcome.FAIL, f"{name}:{number} does not log {event.key}"


def check_submitter(results: ResultSet) -> Complaints:
    """The system description names the submitter that the logs name, and counts are numbers in text."""
    assert results.system is not None
    submitter = results.system.get("submitter")
    for log in results.logs:
        said = log.value("submission_org")
        if said is not None and said != submitter:
            yield Outcome.WARN, f"{log.path.name}: submission_org {said!r}, in the system {submitter!r}"
    for key in ("number_of_nodes", "host_processors_per_node", "accelerators_per_node"):
        if not str(results.system.get(key, "")).isdecimal():
            yield Outcome.FAIL, f"{key} is {results.system.get(key)!r}, not a number"


CHECKS: Mapping[str, Check] = {
    "lines": check_lines,
    "division": check_division,
    "status": check_status,
    "time stamps": check_time,
    "same settings": check_same_settings,
    "plain numbers": check_numbers,
    "seeds": check_seeds,
    "evaluations": check_evaluations,
}
TREE_CHECKS: Mapping[str, Check] = {"call sites": check_call_sites, "submitter": check_submitter}


def _join(complaints: Sequence[tuple[Outcome, str]]) -> str:
    """The complaints, each once, the worst first, and no more than a reader takes in."""
    texts = list(dict.fromkeys(text for _, text in sorted(complaints, key=lambda item: item[0] is not Outcome.FAIL)))
    shown = "; ".join(texts[:_MAX_COMPLAINTS])
    return shown if len(texts) <= _MAX_COMPLAINTS else f"{shown}; and {len(texts) - _MAX_COMPLAINTS} more"


def _fail(log: Log, text: str) -> tuple[Outcome, str]:
    return Outcome.FAIL, f"{log.path.name}: {text}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _off_grid(log: Log, points: Sequence[float]) -> Complaints:
    """Complaints about a schedule that is not the closed division's; a point may miss the grid by one batch."""
    batch = log.value("global_batch_size")
    if not _is_number(batch):
        return
    interval = eval_interval(int(batch))
    for index, samples in enumerate((point for point in points if point > 0), start=1):
        if abs(samples - index * interval) > batch:
            yield _fail(log, f"evaluation {index} is at {samples} samples, the grid says {index * interval}")
            break
    evaluated = log.value("eval_samples")
    if _is_number(evaluated) and evaluated < NUM_EVAL_SAMPLES:
        yield _fail(log, f"eval_samples is {evaluated}, the rules say {NUM_EVAL_SAMPLES}")
