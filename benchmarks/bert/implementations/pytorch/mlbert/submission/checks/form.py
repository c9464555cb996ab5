"""The form of logs: which program wrote them, lines that can be read, one division, plain numbers."""

from __future__ import annotations

from mlbert.submission.findings import Complaint, Complaints, Outcome
from mlbert.submission.keys import is_numeric
from mlbert.submission.result_set import LOG_FORMAT, ONE_SETTING, SAMPLE_COUNTS, ResultSet, error, is_number, is_ours

_NUMBERS = ("seed", "train_samples", "eval_samples", "eval_accuracy")
OURS = ("configuration", "recipe")
_WHOSE = ("submission_org", "submission_platform")
_SAME_IN_ALL = (
    *("submission_benchmark", "eval_samples", *_WHOSE),
    *("recipe", "config_file_sha256", "model_shape_sha256", "train_data", "eval_data", "commit"),
)
_MISREAD_TEXTS = ("eval_accuracy", "eval_error", "global_batch_size")
_MISREAD = "rcp_checker takes any line with the text for the line of that key"
_ONE_DIVISION = "rules: a result is of one division, closed or open"


def check_program(results: ResultSet) -> Complaints:
    """The logs name the recipe and the configuration that made them, so this code's own form is asked of them."""
    others = [log.path.name for log in results.logs if not is_ours(log)]
    if len(others) == len(results.logs):
        yield Complaint(Outcome.NOTE, "another program wrote the logs, so they are judged by the rules only")
    elif others:
        text = f"{', '.join(others)}: no configuration and no recipe, which the other logs have"
        yield Complaint(Outcome.ERROR, text, ONE_SETTING)


def check_lines(results: ResultSet) -> Complaints:
    """Every line is JSON with metadata, and no line is misread by the official convergence checker."""
    for log in results.logs:
        for text in log.broken:
            yield error(log, text, LOG_FORMAT)
    for log in results.logs:
        for event in log.events:
            if event.metadata is None:
                yield error(log, f"line {event.line}: {event.key} has no metadata", LOG_FORMAT)
            for text in _MISREAD_TEXTS:
                if text in event.text and event.key != text:
                    yield error(log, f"line {event.line}: {event.key} contains the text {text}", _MISREAD)


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
            yield error(log, f"says {said!r}, not {wanted!r}", _ONE_DIVISION)


def check_numbers(results: ResultSet) -> Complaints:
    """What should be a number is a plain, finite one; sample counts are integers."""
    for log in results.logs:
        for event in log.events:
            if (event.key in _NUMBERS or is_numeric(event.key)) and not is_number(event.value):
                text = f"{log.path.name}: line {event.line}: {event.key} {event.value!r} is not a plain number"
                is_asked = is_ours(log) or event.key in _NUMBERS
                yield Complaint(Outcome.ERROR if is_asked else Outcome.WARN, text, LOG_FORMAT if is_asked else "")
        for samples, _ in log.evaluations:
            if not is_number(samples) or samples != int(samples):
                yield error(log, f"eval_accuracy has epoch_num {samples!r}, not a count of samples", SAMPLE_COUNTS)
        for key in ("train_samples", "eval_samples", "global_batch_size"):
            value = log.value(key)
            if is_number(value) and value <= 0:
                yield error(log, f"{key} is {value}", SAMPLE_COUNTS)
