"""Evaluations: when they come, on how many samples, and how much was trained in all.

Other programs' train_samples may be what was planned (tinygrad) or the whole set (MosaicML), so it may exceed the last
evaluation's, and epoch_stop may count epochs; where the other runs of a set give the samples of their last evaluation,
a run that does not contradicts itself. This code
evaluates after the first step that reaches the configured count, and no step trains more than 3 nominal batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from mlbert.mlperf.findings import Complaint, Complaints, Outcome
from mlbert.mlperf.grid import check_grid
from mlbert.mlperf.logs import Log
from mlbert.mlperf.result_set import SAMPLE_COUNTS, ResultSet, error, is_number, is_ours
from mlbert.mlperf.rules import NUM_EVAL_SAMPLES
from mlbert.mlperf.run_view import Evaluation, evaluations_of, is_continued, samples_of, setting

_MAX_COUNT_SLACK = 0.01
_LARGEST_STEP = 3  # nominal batches
_MEAN_STEP = 1.5  # nominal batches: packs may hold more than their set's factor says
_MIN_EXACT = 4  # other runs whose train_samples are those of their last evaluation
_THOROUGH = f"rules, BERT: an evaluation is of all {NUM_EVAL_SAMPLES} samples"
_AS_CONFIGURED = "a run does what its configuration says"


def check_evaluations(results: ResultSet) -> Complaints:
    """Evaluations come in order, up to the end of training; in closed on the grid of the rules, on 10,000 samples."""
    needed = max(_MIN_EXACT, len(results.logs) - 1)
    are_exact = [sum(map(told, results.logs)) >= needed for told in (_trains_exactly, _stops_exactly)]
    for log in results.logs:
        evaluations = evaluations_of(log)
        yield from _order(log, evaluations)
        yield from _trained(log, evaluations, are_exact[0])
        if are_exact[1] and log.status == "success" and not _stops_exactly(log) and not is_ours(log):
            yield from _stopped_elsewhere(log)
        if is_ours(log):
            yield from _configured(log, evaluations)
        if results.wanted_division == "closed":
            yield from _closed_evaluations(log, evaluations)


def _order(log: Log, evaluations: Sequence[Evaluation]) -> Complaints:
    if not is_ours(log) and len(evaluations) > 1 and len({one.samples for one in evaluations}) == 1:
        text = f"{log.path.name}: {evaluations[1].where}: every evaluation has epoch_num {evaluations[0].samples}"
        yield Complaint(Outcome.WARN, text, SAMPLE_COUNTS)
        return
    for before, after in itertools.pairwise(evaluations):
        if after.samples <= before.samples:
            text = f"{after.where}: evaluations are not in the order of samples: {after.samples} after {before.samples}"
            yield error(log, text, SAMPLE_COUNTS)
            return
    if evaluations and evaluations[-1].samples <= 0:
        yield error(log, f"{evaluations[-1].where}: the last evaluation comes before any training", SAMPLE_COUNTS)


def _trains_exactly(log: Log) -> bool:
    evaluations, trained = evaluations_of(log), log.value("train_samples")
    return bool(evaluations) and is_number(trained) and evaluations[-1].samples == trained


def _stops_exactly(log: Log) -> bool:
    evaluations, stops = evaluations_of(log), log.all("epoch_stop")
    return bool(evaluations) and bool(stops) and samples_of(stops[-1]) == evaluations[-1].samples


def _stopped_elsewhere(log: Log) -> Complaints:
    for stop in log.all("epoch_stop")[-1:]:
        text = f"line {stop.line}: epoch_stop has epoch_num {(stop.metadata or {}).get('epoch_num')!r}"
        yield error(log, f"{text}, the last evaluation another; in the other logs they agree", SAMPLE_COUNTS)


def _trained(log: Log, evaluations: Sequence[Evaluation], others_are_exact: bool) -> Complaints:
    event = log.first("train_samples")
    if not evaluations or event is None or not is_number(event.value):
        return
    last, trained = max(one.samples for one in evaluations), event.value
    if last > trained:
        is_near = last <= trained * (1 + _MAX_COUNT_SLACK) and not is_ours(log)  # nominal and real samples
        text = f"{log.path.name}: line {event.line}: evaluated at {last} samples but trained on {trained}"
        yield Complaint(Outcome.WARN if is_near else Outcome.ERROR, text, SAMPLE_COUNTS)
    elif last < trained and log.status == "success" and (is_ours(log) or others_are_exact):
        text = f"line {event.line}: trained on {trained} samples, the last evaluation is at {last}"
        yield error(log, f"{text}; a run ends with one", SAMPLE_COUNTS)


def _configured(log: Log, evaluations: Sequence[Evaluation]) -> Complaints:
    """This code's evaluations come when and on what the configuration says, and no later than it lets training go."""
    wanted, told = setting(log, "NUM_EVAL_EXAMPLES"), log.first("eval_samples")
    if is_number(wanted) and told is not None and told.value != wanted:
        text = f"line {told.line}: eval_samples is {told.value!r}, NUM_EVAL_EXAMPLES {wanted}"
        yield error(log, text, _AS_CONFIGURED)
    batch = log.value("global_batch_size")
    if not is_number(batch) or batch < 1 or is_continued(log) or not evaluations:
        return
    slack = _LARGEST_STEP * batch
    yield from _due(log, evaluations, slack)
    steps, limit = setting(log, "MAX_STEPS"), setting(log, "MAX_SAMPLES_TERMINATION")
    # A log that counts its steps tells it better: `checks.configuration`.
    can_tell = is_number(steps) and log.first("steps") is None
    ends = [steps * _MEAN_STEP * batch + slack if can_tell else None, limit + slack if is_number(limit) else None]
    for end, name in zip(ends, ("MAX_STEPS", "MAX_SAMPLES_TERMINATION"), strict=True):
        if end is not None and evaluations[-1].samples > end:
            text = f"{evaluations[-1].where}: {evaluations[-1].samples} samples, more than {name} allows"
            yield error(log, text, _AS_CONFIGURED)


def _due(log: Log, evaluations: Sequence[Evaluation], slack: float) -> Complaints:
    """The first evaluation that came early (the last one may, at a limit) or later than a step behind its time."""
    due, every = setting(log, "EVAL_ITER_START_SAMPLES"), setting(log, "EVAL_ITER_SAMPLES")
    if not is_number(due) or not is_number(every) or every < 1:
        return
    for one in evaluations:
        is_early = one.samples < due and one is not evaluations[-1]
        if is_early or one.samples > due + slack:
            yield error(log, f"{one.where}: evaluated at {one.samples} samples, due at {due}", _AS_CONFIGURED)
            return
        due += max(0, (one.samples - due) // every + 1) * every


def _closed_evaluations(log: Log, evaluations: Sequence[Evaluation]) -> Complaints:
    batch, told = log.value("global_batch_size"), log.first("eval_samples")
    counted = [one for one in evaluations if one.samples > 0]
    if is_number(batch) and batch >= 1:
        lines = [one.event.line for one in counted]
        for complaint in check_grid(int(batch), [one.samples for one in counted], lines):
            yield complaint._replace(text=f"{log.path.name}: {complaint.text}")
    if told is not None and is_number(told.value) and told.value < NUM_EVAL_SAMPLES:
        text = f"line {told.line}: eval_samples is {told.value}, the rules say {NUM_EVAL_SAMPLES}"
        yield error(log, text, _THOROUGH)
