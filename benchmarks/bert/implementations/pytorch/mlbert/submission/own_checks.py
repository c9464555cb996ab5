"""Checks for what no official tool looks at, on the logs of one system.

Each check is a function of a `ResultSet` that yields complaints. Without any, the table says the first line of the
function's docstring. A complaint is an error only where a rule is broken. What only this code's logs have (provenance,
call sites that can be looked up, one seed, one writer) is asked of them alone: `ResultSet.is_ours`.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlbert.core.rules import NUM_EVAL_SAMPLES, NUM_RESULT_FILES
from mlbert.submission.call_sites import Sources
from mlbert.submission.findings import Complaint, Complaints, Finding, Outcome, finding_of
from mlbert.submission.grid import check_grid
from mlbert.submission.keys import is_hyperparameter, is_numeric
from mlbert.submission.logs import Event, Log

_NUMBERS = ("seed", "train_samples", "eval_samples", "eval_accuracy")
_OURS = ("configuration", "recipe")
_WHOSE = ("submission_org", "submission_platform")
_SAME_IN_ALL = (
    *("submission_benchmark", "eval_samples", *_WHOSE),
    *("recipe", "config_file_sha256", "model_shape_sha256", "train_data", "eval_data", "commit"),
)
_MISREAD_TEXTS = ("eval_accuracy", "eval_error", "global_batch_size")
_MAX_CLOCK_SKEW_MS = 1000
_MAX_COUNT_SLACK = 0.01

_LOG_FORMAT = "log format: every line is a JSON object with metadata, without which official tools crash"
_MISREAD = "rcp_checker takes any line with the text for the line of that key"
_ONE_DIVISION = "rules: a result is of one division, closed or open"
_TEN_RUNS = "rules: ten runs, the fastest and the slowest dropped; one may miss the target, two may not"
_TIMED = "rules: the time from run_start to run_stop is the result, without a pause"
_CONTINUED = "rules: a run starts from the reference checkpoint and is timed as a whole"
_ONE_SETTING = "rules: ten runs of one system, code and set of hyper-parameters"
_SAMPLE_COUNTS = "rules, BERT: epoch_num is the number of training samples so far"
_SEED_RULE = "rules: seeds are random and logged; package_checker wants them distinct in closed"
_THOROUGH = f"rules, BERT: an evaluation is of all {NUM_EVAL_SAMPLES} samples"
_OWN_FORM = "this code's own logs"


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


Check = Callable[[ResultSet], Complaints]


def run_checks(results: ResultSet, subject: str) -> list[Finding]:
    """One row for each check: what it made sure of, or all its complaints with the worst outcome."""
    checks = CHECKS if results.system is None else {**CHECKS, **TREE_CHECKS}
    return [
        finding_of(f"own: {name}", subject, list(check(results)), (check.__doc__ or "").partition("\n")[0])
        for name, check in checks.items()
    ]


def check_program(results: ResultSet) -> Complaints:
    """The logs name the recipe and the configuration that made them, so this code's own form is asked of them."""
    others = [log.path.name for log in results.logs if not is_ours(log)]
    if len(others) == len(results.logs):
        yield Complaint(Outcome.NOTE, "another program wrote the logs, so they are judged by the rules only")
    elif others:
        text = f"{', '.join(others)}: no configuration and no recipe, which the other logs have"
        yield Complaint(Outcome.ERROR, text, _ONE_SETTING)


def check_lines(results: ResultSet) -> Complaints:
    """Every line is JSON with metadata, and no line is misread by the official convergence checker."""
    for log in results.logs:
        for text in log.broken:
            yield _error(log, text, _LOG_FORMAT)
    for log in results.logs:
        for event in log.events:
            if event.metadata is None:
                yield _error(log, f"line {event.line}: {event.key} has no metadata", _LOG_FORMAT)
            for text in _MISREAD_TEXTS:
                if text in event.text and event.key != text:
                    yield _error(log, f"line {event.line}: {event.key} contains the text {text}", _MISREAD)


def check_division(results: ResultSet) -> Complaints:
    """Logs, system description and command line name one division."""
    wanted = results.wanted_division
    if wanted not in ("open", "closed"):
        yield Complaint(Outcome.ERROR, f"division {wanted!r} is neither open nor closed", _ONE_DIVISION)
    if results.system is not None and results.system.get("division") != wanted:
        text = f"the system description says {results.system.get('division')!r}"
        yield Complaint(Outcome.ERROR, text, _ONE_DIVISION)
    for log in results.logs:
        if (said := log.value("submission_division")) != wanted:
            yield _error(log, f"says {said!r}, not {wanted!r}", _ONE_DIVISION)


def check_status(results: ResultSet) -> Complaints:
    """Every run ended in success; of ten, one that did not is dropped by the scoring."""
    bad = [log for log in results.logs if log.status != "success"]
    is_tolerated = len(bad) == 1 and len(results.logs) == NUM_RESULT_FILES
    for log in bad:
        outcome = Outcome.WARN if is_tolerated else Outcome.ERROR
        yield Complaint(outcome, f"{log.path.name}: run_stop status is {log.status!r}", _TEN_RUNS)


def check_time(results: ResultSet) -> Complaints:
    """Time stamps never go back, run_stop is after run_start, and no run was continued from a checkpoint."""
    for log in results.logs:
        if log.all("resumed_from_step"):
            outcome = Outcome.WARN if results.system is None else Outcome.ERROR
            yield Complaint(
                outcome, f"{log.path.name}: continued from a checkpoint, so its time is no result", _CONTINUED
            )
        complaints = [_goes_back(log, *pair) for pair in itertools.pairwise(log.events) if _is_back(*pair)]
        yield from sorted(complaints, key=lambda complaint: complaint.outcome is not Outcome.ERROR)[:1]
        if log.minutes is not None and log.minutes <= 0:
            yield _error(log, "run_stop is not after run_start", _TIMED)


def _is_back(before: Event, after: Event) -> bool:
    return after.time_ms < before.time_ms


def _goes_back(log: Log, before: Event, after: Event) -> Complaint:
    """An error in the timed part; outside, several processes may write one after the other what they did before."""
    text = f"{log.path.name}: line {after.line}: time goes back at {after.key}"
    start, stop = log.first("run_start"), log.first("run_stop")
    is_timed = start is not None and start.line <= after.line and (stop is None or after.line <= stop.line)
    if is_ours(log) or (is_timed and before.time_ms - after.time_ms > _MAX_CLOCK_SKEW_MS):
        return Complaint(Outcome.ERROR, text, _TIMED)
    return Complaint(Outcome.WARN if is_timed else Outcome.NOTE, text)


def check_same_settings(results: ResultSet) -> Complaints:
    """Hyper-parameters, code and data, and what is submitted by whom, are the same in all logs."""
    first, *others = results.logs
    logged = dict.fromkeys(event.key for log in results.logs for event in log.events)
    for key in (*filter(is_hyperparameter, logged), *_SAME_IN_ALL):
        for log in others:
            if log.value(key) != first.value(key):
                text = f"{log.path.name}: {key} is {log.value(key)!r}, in {first.path.name} {first.value(key)!r}"
                is_name = key in _WHOSE and not is_ours(log)  # the system description says whose it is
                yield Complaint(Outcome.WARN if is_name else Outcome.ERROR, text, _ONE_SETTING)


def check_numbers(results: ResultSet) -> Complaints:
    """What should be a number is a plain, finite one; sample counts are integers."""
    for log in results.logs:
        for event in log.events:
            if (event.key in _NUMBERS or is_numeric(event.key)) and not _is_number(event.value):
                text = f"{log.path.name}: line {event.line}: {event.key} {event.value!r} is not a plain number"
                is_asked = is_ours(log) or event.key in _NUMBERS
                yield Complaint(Outcome.ERROR if is_asked else Outcome.WARN, text, _LOG_FORMAT if is_asked else "")
        for samples, _ in log.evaluations:
            if not _is_number(samples) or samples != int(samples):
                yield _error(log, f"eval_accuracy has epoch_num {samples!r}, not a count of samples", _SAMPLE_COUNTS)
        for key in ("train_samples", "eval_samples", "global_batch_size"):
            value = log.value(key)
            if _is_number(value) and value <= 0:
                yield _error(log, f"{key} is {value}", _SAMPLE_COUNTS)


def check_seeds(results: ResultSet) -> Complaints:
    """Each log names one seed, and no two the same."""
    names_of: dict[Any, list[str]] = defaultdict(list)
    for log in results.logs:
        seeds = log.all("seed")
        if len(seeds) != 1 and is_ours(log):
            yield _error(log, f"logs {len(seeds)} seeds, not one", _OWN_FORM)
        elif not seeds:
            outcome = Outcome.ERROR if results.wanted_division == "closed" else Outcome.WARN
            yield Complaint(outcome, f"{log.path.name}: logs no seed", _SEED_RULE)
        for event in seeds if not is_ours(log) else seeds[:1]:
            names_of[_seed_of(log, event)].append(log.path.name)
    for (seed, *_), names in names_of.items():
        if len(names) > 1:
            is_asked = results.wanted_division == "closed" or any(is_ours(log) for log in results.logs)
            text = f"seed {seed} is in {', '.join(names)}"
            yield Complaint(Outcome.ERROR if is_asked else Outcome.WARN, text, _SEED_RULE)


def _seed_of(log: Log, event: Event) -> tuple[Any, ...]:
    """What may occur once: ours is one number a run; another program's processes may each draw one at its own line."""
    return (str(event.value),) if is_ours(log) else (str(event.value), event.call_site)


def check_evaluations(results: ResultSet) -> Complaints:
    """Evaluations come in order, up to the end of training; in closed on the grid of the rules, on 10,000 samples."""
    for log in results.logs:
        points = [samples for samples, _ in log.evaluations if _is_number(samples)]
        if any(after <= before for before, after in itertools.pairwise(points)):
            yield _error(log, "evaluations are not in the order of samples", _SAMPLE_COUNTS)
        trained = log.value("train_samples")
        if points and _is_number(trained) and points[-1] > trained:
            is_near = points[-1] <= trained * (1 + _MAX_COUNT_SLACK) and not is_ours(log)  # nominal and real samples
            text = f"{log.path.name}: evaluated at {points[-1]} samples but trained on {trained}"
            yield Complaint(Outcome.WARN if is_near else Outcome.ERROR, text, _SAMPLE_COUNTS)
        if results.wanted_division == "closed":
            yield from _closed_evaluations(log, points)


def _closed_evaluations(log: Log, points: Sequence[float]) -> Complaints:
    batch, evaluated = log.value("global_batch_size"), log.value("eval_samples")
    if _is_number(batch) and batch >= 1:
        for complaint in check_grid(int(batch), [samples for samples in points if samples > 0]):
            yield complaint._replace(text=f"{log.path.name}: {complaint.text}")
    if _is_number(evaluated) and evaluated < NUM_EVAL_SAMPLES:
        yield _error(log, f"eval_samples is {evaluated}, the rules say {NUM_EVAL_SAMPLES}", _THOROUGH)


def check_call_sites(results: ResultSet) -> Complaints:
    """Every file:lineno of this code's logs is in the tree, and is the call that logged the key."""
    assert results.tree is not None
    for log in filter(is_ours, results.logs):
        sources = Sources(results.tree, log)
        if sources.gap:
            text = f"{log.path.name}: {sources.gap}, so its lines are looked up in the tree"
            yield Complaint(Outcome.WARN, text, _OWN_FORM)
        for event in log.events:
            if event.call_site is None:
                yield Complaint(Outcome.WARN, f"{log.path.name}: {event.key} names no file and line", _OWN_FORM)
                continue
            name, number = event.call_site
            if sources.line(name, number) is None:
                yield Complaint(Outcome.WARN, f"{name}:{number} is not in the tree", _OWN_FORM)
            elif sources.call_of(name, number, event.key) is None:
                outcome = Outcome.WARN if sources.gap else Outcome.ERROR
                yield Complaint(outcome, f"{name}:{number} does not log {event.key}", _OWN_FORM)


def check_submitter(results: ResultSet) -> Complaints:
    """The system description names the submitter that the logs name, and counts are numbers in text."""
    assert results.system is not None
    submitter = results.system.get("submitter")
    for said in dict.fromkeys(str(log.value("submission_org")) for log in results.logs if log.first("submission_org")):
        if said.casefold() != str(submitter).casefold():
            yield Complaint(Outcome.WARN, f"submission_org {said!r}, in the system {submitter!r}")
    for key in ("number_of_nodes", "host_processors_per_node", "accelerators_per_node"):
        if not str(results.system.get(key, "")).strip().isdecimal():
            text = f"{key} is {results.system.get(key)!r}, not a number"
            yield Complaint(Outcome.ERROR, text, "result_summarizer reads a number there")


def is_ours(log: Log) -> bool:
    """Whether this code wrote a log: then it tells its recipe or its configuration."""
    return any(log.first(key) is not None for key in _OURS)


CHECKS: Mapping[str, Check] = {
    "program": check_program,
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


def _error(log: Log, text: str, rule: str) -> Complaint:
    return Complaint(Outcome.ERROR, f"{log.path.name}: {text}", rule)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
