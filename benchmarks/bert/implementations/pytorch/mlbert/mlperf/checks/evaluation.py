"""Evaluations: when they come, on how many samples, and how much was trained in all.

Other programs' train_samples may be what was planned (tinygrad) or the whole set (MosaicML), so it may exceed the last
evaluation's, and epoch_stop may count epochs; where the other runs of a set give the samples of their last evaluation,
a run that does not contradicts itself. This code
evaluates after the first step that reaches the configured count, and no step trains more than 3 nominal batches.

When evaluations fall due in the closed division, and whether those of a log came then.

The rules ask for one every `mlbert.mlperf.rules.eval_interval` samples and let it wait for the end of its step. Which
step that is, programs count in three ways: up from the grid, up from the evaluation before, or down; so evaluations are
apart by the interval in whole steps, rounded down or up. A log counts samples, not steps, and with packing a step of G
nominal samples trains a few more or fewer. A log in which every count is whole steps of G is taken as not packed, and
gets no slack. Otherwise the slack is `_SLACK_OF_ONE` of the interval for one distance, in which the noise of steps
shows, and `_SLACK_OF_SUM` for the sum of all since the start, in which noise averages out and the packing rate shows.
In 120 published packed logs of v5.0 distances are off by at most 0.7 % and sums by at most 0.15 %.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence

from mlbert.mlperf.findings import Complaint, Complaints, Outcome
from mlbert.mlperf.logs import Log
from mlbert.mlperf.result_set import (
    SAMPLE_COUNTS,
    LoggedEvaluation,
    ResultSet,
    error,
    evaluations_of,
    is_continued,
    is_number,
    is_ours,
    samples_of,
    setting,
)
from mlbert.mlperf.rules import NUM_EVAL_SAMPLES, eval_interval

_RULE = "rules, BERT: evaluate every floor(0.05 x (230.23 x GBS + 3,000,000) / 25,000) x 25,000 samples; "
_ROUNDED = _RULE + "a point may be rounded up to the next batch"
_SLACK_OF_ONE = 0.01
_SLACK_OF_SUM = 0.005
_LEFT_OUT = 1.5  # intervals without an evaluation
_MIN_FOR_MEDIAN = 3


Found = Iterator[tuple[int, Complaint]]  # with the evaluation's index, from 1


class EvaluationSchedule:
    """The samples between which evaluations fall due at one batch size.

    Args:
        batch: global batch size in nominal samples.
        points: samples of a log's evaluations, without the one at 0.
    """

    def __init__(self, batch: int, points: Sequence[float]) -> None:
        self.batch = batch
        self.interval = eval_interval(batch)
        self.is_packed = any(samples % batch for samples in points)
        self._down = math.floor(self.interval / batch) * batch
        self._up = math.ceil(self.interval / batch) * batch
        slack = _SLACK_OF_ONE * self.interval if self.is_packed else 0
        # Either end of a distance may be counted one step early or late.
        self.shortest = self._down - batch - slack
        self.longest = self._up + batch + slack
        # Of many distances the steps at the ends cancel, so their median is bound to the interval.
        self.longest_median = self._up + slack

    def earliest(self, index: int) -> float:
        """The fewest samples at which evaluation ``index``, from 1, may fall due."""
        slack = _SLACK_OF_SUM * self.interval if self.is_packed else 0
        return index * (self._down - slack) - self.batch


def check_grid(batch: int, points: Sequence[float], lines: Sequence[int]) -> Complaints:
    """Complaints about the evaluations of one log, which stand in these lines; the first one only of each kind.

    An error is an evaluation left out, one that came early, and another interval. A late one is a warning: it costs its
    submitter time, and published results have it.
    """
    schedule = EvaluationSchedule(batch, points)
    distances = [after - before for before, after in zip([0, *points], points, strict=False)]
    found = [*_first(_left_out(schedule, points, distances)), *_first(_early(schedule, points, distances))]
    if len(points) >= _MIN_FOR_MEDIAN and (usual := statistics.median(distances)) > schedule.longest_median:
        text = f"evaluations are {usual:.0f} samples apart, the grid says {schedule.interval}"
        found.append((1, Complaint(Outcome.ERROR, text, _ROUNDED)))
    elif late := [
        n for n, apart in enumerate(distances, 1) if schedule.longest < apart < _LEFT_OUT * schedule.interval
    ]:
        text = f"evaluation {late[0]} is late, {distances[late[0] - 1]} samples after {_before(late[0])}"
        found.append((late[0], Complaint(Outcome.WARN, text, _ROUNDED)))
    for index, complaint in found:
        yield complaint._replace(text=f"line {lines[index - 1]}: {complaint.text}")


def _left_out(schedule: EvaluationSchedule, points: Sequence[float], distances: Sequence[float]) -> Found:
    for index, (samples, apart) in enumerate(zip(points, distances, strict=True), start=1):
        if apart >= _LEFT_OUT * schedule.interval:
            text = f"evaluation {index} is at {samples} samples, the grid says {index * schedule.interval}"
            yield index, Complaint(Outcome.ERROR, text, _ROUNDED)


def _early(schedule: EvaluationSchedule, points: Sequence[float], distances: Sequence[float]) -> Found:
    """Early against the start, or against the evaluation before unless that was as much late."""
    before: float = schedule.interval
    for index, (samples, apart) in enumerate(zip(points, distances, strict=True), start=1):
        is_short = apart < schedule.shortest and before + apart < 2 * schedule.shortest
        if is_short or samples < schedule.earliest(index):
            text = f"evaluation {index} is at {samples} samples, {apart} after {_before(index)}"
            yield index, Complaint(Outcome.ERROR, f"{text}; the grid says {index * schedule.interval}", _ROUNDED)
        before = apart


def _before(index: int) -> str:
    return "the start" if index == 1 else "the one before"


def _first(found: Found) -> list[tuple[int, Complaint]]:
    return list(itertools.islice(found, 1))


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


def _order(log: Log, evaluations: Sequence[LoggedEvaluation]) -> Complaints:
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


def _trained(log: Log, evaluations: Sequence[LoggedEvaluation], others_are_exact: bool) -> Complaints:
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


def _configured(log: Log, evaluations: Sequence[LoggedEvaluation]) -> Complaints:
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


def _due(log: Log, evaluations: Sequence[LoggedEvaluation], slack: float) -> Complaints:
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


def _closed_evaluations(log: Log, evaluations: Sequence[LoggedEvaluation]) -> Complaints:
    batch, told = log.value("global_batch_size"), log.first("eval_samples")
    counted = [one for one in evaluations if one.samples > 0]
    if is_number(batch) and batch >= 1:
        lines = [one.event.line for one in counted]
        for complaint in check_grid(int(batch), [one.samples for one in counted], lines):
            yield complaint._replace(text=f"{log.path.name}: {complaint.text}")
    if told is not None and is_number(told.value) and told.value < NUM_EVAL_SAMPLES:
        text = f"line {told.line}: eval_samples is {told.value}, the rules say {NUM_EVAL_SAMPLES}"
        yield error(log, text, _THOROUGH)
