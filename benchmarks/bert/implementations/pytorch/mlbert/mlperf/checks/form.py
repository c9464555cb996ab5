"""The form of logs: which program wrote them, lines that can be read, one division, plain numbers."""

from __future__ import annotations

import math

from mlbert.mlperf.findings import Complaint, Complaints, Outcome
from mlbert.mlperf.keys import CLOSED_KEYS, is_numeric
from mlbert.mlperf.logs import Event
from mlbert.mlperf.result_set import LOG_FORMAT, ONE_SETTING, SAMPLE_COUNTS, ResultSet, error, is_number, is_ours, where

_NUMBERS = (
    "seed",
    "train_samples",
    "eval_samples",
    "eval_accuracy",
    "global_batch_size",
    "gradient_accumulation_steps",
)
_MISREAD_TEXTS = ("eval_accuracy", "eval_error", "global_batch_size")
_MISREAD = "rcp_checker takes any line with the text for the line of that key"
_ONE_DIVISION = "rules: a result is of one division, closed or open"


def check_program(results: ResultSet) -> Complaints:
    """This code wrote the logs, so its own form is asked of them."""
    others = [log.path.name for log in results.logs if not is_ours(log)]
    if len(others) == len(results.logs):
        yield Complaint(Outcome.NOTE, "another program wrote the logs, so they are judged by the rules only")
    elif others:
        text = f"{', '.join(others)}: another program wrote it, this code the other logs"
        yield Complaint(Outcome.ERROR, text, ONE_SETTING)


def check_lines(results: ResultSet) -> Complaints:
    """Every line is JSON with metadata, and no line is misread by the official convergence checker."""
    for log in results.logs:
        for text in log.broken:
            yield error(log, text, LOG_FORMAT)
        if not log.events:
            yield error(log, "holds no line of an MLPerf log", LOG_FORMAT)
    for log in results.logs:
        for event in log.events:
            if event.metadata is None:
                yield error(log, f"{event.key} has no metadata", LOG_FORMAT, event)
            for text in _MISREAD_TEXTS:
                if text in event.text and event.key != text:
                    yield error(log, f"{event.key} contains the text {text}", _MISREAD, event)


def check_division(results: ResultSet) -> Complaints:
    """Logs, system description and command line name one division."""
    wanted = results.wanted_division
    if wanted not in ("open", "closed"):
        yield Complaint(Outcome.ERROR, f"division {wanted!r} is neither open nor closed", _ONE_DIVISION)
    if results.system is not None and results.system.get("division") != wanted:
        text = f"the system description says {results.system.get('division')!r}"
        yield Complaint(Outcome.ERROR, text, _ONE_DIVISION)
    for log in results.logs:
        event = log.first("submission_division")
        if event is None or event.value != wanted:
            yield error(log, f"says {event and event.value!r}, not {wanted!r}", _ONE_DIVISION, event)


def check_numbers(results: ResultSet) -> Complaints:
    """What should be a number is a plain, finite one; sample counts are integers."""
    for log in results.logs:
        for event in log.events:
            if (event.key in _NUMBERS or is_numeric(event.key)) and not is_number(event.value):
                text = f"{where(log, event)}{event.key} {event.value!r} is not a plain number"
                is_asked = is_ours(log) or event.key in _NUMBERS or _is_no_number(event)
                yield Complaint(Outcome.ERROR if is_asked else Outcome.WARN, text, LOG_FORMAT if is_asked else "")
        for event in log.all("eval_accuracy"):
            samples = (event.metadata or {}).get("epoch_num")
            if not is_number(samples) or samples != int(samples):
                text = f"eval_accuracy has epoch_num {samples!r}, not a count of samples"
                yield error(log, text, SAMPLE_COUNTS, event)


def _is_no_number(event: Event) -> bool:
    """Whether a value is none in any spelling: NaN, or what is not even a number's text where closed wants one."""
    return isinstance(event.value, float) or (event.key in CLOSED_KEYS and not _is_text_of_number(event.value))


def _is_text_of_number(value: object) -> bool:
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False
