"""Check that the accuracies of a log are plausible and match its status.

In 140 published v5.0 logs, accuracy begins at 0.35 to 0.38 and grows by at most 0.18 from one
evaluation to the next (0.05 in this code's small runs). The last evaluation adds at most 0.001 and
is at most 0.001 above the target. No two in a row are equal, no log is rounded to four digits, and
no run continues past the target. This code's accuracy is a fraction of the same number of
predictions at every evaluation: 18,304 in all 272 evaluations of its small runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

from mlaudit.findings import Complaints, Outcome
from mlaudit.logs import Log, is_number
from mlaudit.result_set import (
    LoggedEvaluation,
    ResultSet,
    evaluations_of,
    significant_digits,
    target_of,
)
from mlaudit.round_rules import Round
from mlaudit.rules import INITIAL_MLM_ACCURACY

_JUMP = 0.3
_BEYOND = 0.02  # above the target when a run ends
_SAME = 1e-6  # two accuracies on one line, perhaps as float32
_ROUNDED = 4  # digits of all accuracies of a log
_MIN_ROUNDED = 8  # accuracies, the fewest to judge by
_FLAT = 3
_MIN_DIGITS = 4
_MANY_SAMPLES = 1000
_TRIVIAL_TARGET = 0.1
_MAX_PREDICTIONS = 10**6
_MIN_SHARES = 8
_SHARE_FIT = 1e-6
_MOST = 0.8  # of the accuracies must fit, to infer the number of predictions
_SHARE = "rules, BERT: masked-token accuracy is correct predictions / predictions"
_ENDS_AT_TARGET = "rules: a run ends when an evaluation reaches the target"
_RUNS_DIFFER = "rules, BERT: an evaluation measures the model as trained so far"
_RANGE = "rules, BERT: masked-token accuracy is between 0 and 1"


def check_accuracies(results: ResultSet) -> Complaints:
    """Accuracies are plausible, and runs end in success when the last one reaches the target."""
    for log in results.logs:
        evaluations = evaluations_of(log)
        yield from _range(log, evaluations)
        yield from _jumps(log, evaluations)
        if results.wanted_division == "closed" and evaluations:
            yield from _unlike_the_reference(log, evaluations, results.round)
        yield from _other_accuracy(log, evaluations)
        yield from _flat(log, evaluations)
        yield from _rounded(log, evaluations)
        yield from _target(log, results.wanted_division == "closed", results.round)
        yield from _end(log, evaluations, results.round)
        yield from _guessed(log, evaluations)
    yield from _shares(results.own_logs)


def _range(log: Log, evaluations: Sequence[LoggedEvaluation]) -> Complaints:
    for one in evaluations:
        if not 0 <= one.accuracy < 1:
            yield log.error(f"eval_accuracy is {one.accuracy}", _RANGE, one.event)
        elif one.accuracy == 0:
            text = "eval_accuracy is 0, not one token right"
            evaluated = log.value("eval_samples")
            # A diverged run may have it, or a trial with few samples.
            is_wrong = (
                log.status == "success" and is_number(evaluated) and evaluated >= _MANY_SAMPLES
            )
            yield log.error_if(is_wrong, text, _RANGE if is_wrong else "", one.event)


def _jumps(log: Log, evaluations: Sequence[LoggedEvaluation]) -> Complaints:
    for before, after in itertools.pairwise(evaluations):
        if after.accuracy - before.accuracy > _JUMP:
            text = f"accuracy jumps from {before.accuracy:.4g} to {after.accuracy:.4g}"
            yield log.warning(f"{text} in one evaluation", event=after.event)


def _unlike_the_reference(
    log: Log, evaluations: Sequence[LoggedEvaluation], judged: Round
) -> Complaints:
    """Find a run of the closed division that begins far above its checkpoint or ends far above its
    target.
    """
    first = evaluations[0]
    last = evaluations[-1]
    # Without a grid, the first evaluation comes late in training.
    if judged.has_grid and first.accuracy - INITIAL_MLM_ACCURACY > _JUMP:
        text = (
            f"the first accuracy is {first.accuracy:.4g}, the checkpoint has {INITIAL_MLM_ACCURACY}"
        )
        yield log.warning(text, event=first.event)
    target = judged.target(log.value("global_batch_size"))
    if last.accuracy > target + _BEYOND:
        text = f"the last accuracy is {last.accuracy:.4g}, the target {target}"
        yield log.warning(text, event=last.event)


def _other_accuracy(log: Log, evaluations: Sequence[LoggedEvaluation]) -> Complaints:
    for one in evaluations:
        for name, value in (one.event.metadata or {}).items():
            if "accuracy" in name and is_number(value) and abs(value - one.accuracy) > _SAME:
                yield log.error(
                    f"eval_accuracy is {one.accuracy!r}, its {name} {value!r}",
                    _RUNS_DIFFER,
                    one.event,
                )


def _rounded(log: Log, evaluations: Sequence[LoggedEvaluation]) -> Complaints:
    if len(evaluations) >= _MIN_ROUNDED and all(
        significant_digits(one.accuracy) <= _ROUNDED for one in evaluations
    ):
        text = f"no accuracy has more than {_ROUNDED} digits"
        yield log.warning(
            f"{text}, so it is not certain what reached the target", event=evaluations[0].event
        )


def _flat(log: Log, evaluations: Sequence[LoggedEvaluation]) -> Complaints:
    """Find an accuracy that repeats.

    That is legitimate for a model that learns nothing or has diverged.
    """
    for index in range(len(evaluations) - _FLAT + 1):
        values = {one.accuracy for one in evaluations[index : index + _FLAT]}
        accuracy = evaluations[index].accuracy
        if len(values) == 1 and significant_digits(accuracy) >= _MIN_DIGITS:
            is_wrong = log.is_ours and log.status == "success" and accuracy > _TRIVIAL_TARGET
            text = f"accuracy {accuracy!r} is that of the evaluation"
            text += " before and of the one after it, to the last digit"
            yield log.error_if(
                is_wrong, text, _RUNS_DIFFER if is_wrong else "", evaluations[index + 1].event
            )
            return


def _target(log: Log, is_closed: bool, judged: Round) -> Complaints:
    """Check that the configured target is not below that of the rules in the closed division."""
    configured = log.setting("TARGET_MLM_ACCURACY")
    event = log.first("configuration")
    if event is None or not is_number(configured):
        return
    required = judged.target(log.value("global_batch_size"))
    is_closed = is_closed or log.value("submission_division") == "closed"
    if is_closed and configured < required:
        text = f"TARGET_MLM_ACCURACY is {configured}, closed requires {required}"
        yield log.error(text, _ENDS_AT_TARGET, event)


def _end(log: Log, evaluations: Sequence[LoggedEvaluation], judged: Round) -> Complaints:
    target = target_of(log, judged)
    if not evaluations or (target is None and log.is_ours):
        return
    last = evaluations[-1]
    if target is None:
        if log.status == "success" and len(evaluations) == 1:
            yield log.warning(
                "success at the very first evaluation; the target is not known", event=last.event
            )
        return
    hits = [one for one in evaluations if one.accuracy >= target]
    # Another program may evaluate while training continues.
    sure = Outcome.ERROR if log.is_ours else Outcome.WARN
    if hits and hits[0] is not last:
        text = f"accuracy {hits[0].accuracy:.6g} is the target {target}"
        yield log.complaint(
            sure, f"{text} or more, and the run went on", _ENDS_AT_TARGET, hits[0].event
        )
    if log.status == "success" and last.accuracy < target:
        text = f"success, but the last accuracy {last.accuracy:.6g} is below {target}"
        yield log.error(text, _ENDS_AT_TARGET, last.event)
    is_first = bool(hits) and hits[0] is evaluations[0]
    if log.status == "success" and is_first and judged.has_grid:
        text = "success at the very first evaluation"
        yield log.warning(f"{text}, at {hits[0].samples:.10g} samples", event=hits[0].event)
    if log.status == "aborted" and hits:
        text = f"aborted, but {hits[0].where} reached {target}"
        yield log.complaint(sure, text, _ENDS_AT_TARGET, log.first("run_stop"))


def _guessed(log: Log, evaluations: Sequence[LoggedEvaluation]) -> Complaints:
    """Find a target or final accuracy so low that guessing the most frequent token reaches it."""
    configured = log.setting("TARGET_MLM_ACCURACY")
    logged = log.value("target_accuracy")
    for target, event in (
        (configured, log.first("configuration")),
        (logged, log.first("target_accuracy")),
    ):
        if is_number(target) and target < _TRIVIAL_TARGET and event is not None:
            yield log.warning(f"a target of {target:.4g} is reached by guessing", event=event)
            break
    if log.status == "success" and evaluations and evaluations[-1].accuracy < _TRIVIAL_TARGET:
        text = f"success at accuracy {evaluations[-1].accuracy:.4g}"
        yield log.warning(f"{text}, which guessing reaches", event=evaluations[-1].event)


def _shares(logs: Sequence[Log]) -> Complaints:
    """Find accuracies that are not a whole number of predictions, if most of them are."""
    pairs = [(log, one) for log in logs for one in evaluations_of(log) if 0 < one.accuracy < 1]
    if len(pairs) < _MIN_SHARES:
        return
    denominators = {
        Fraction(one.accuracy).limit_denominator(_MAX_PREDICTIONS).denominator for _, one in pairs
    }
    values = [one.accuracy for _, one in pairs]
    predictions = max(
        sorted(denominators), key=lambda count: sum(_is_share(value, count) for value in values)
    )
    wrong = [(log, one) for log, one in pairs if not _is_share(one.accuracy, predictions)]
    if len(wrong) <= (1 - _MOST) * len(pairs):
        for log, one in wrong:
            text = f"accuracy {one.accuracy!r} is not a whole number of {predictions} predictions"
            yield log.error(f"{text}, as the others are", _SHARE, one.event)


def _is_share(value: float, count: int) -> bool:
    return abs(value * count - round(value * count)) < _SHARE_FIT * max(
        1.0, count / _MAX_PREDICTIONS
    )
