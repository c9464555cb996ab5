"""Check evaluations: when they take place, on how many samples, and after how much training.

Closed division: the rules require an evaluation every `mlaudit.rules.eval_interval` samples, at the
end of a step. Programs choose that step in three ways: rounding up from the grid, up from the
previous evaluation, or down. So evaluations are apart by the interval in whole steps, rounded down
or up. Logs count samples, not steps, and with packing a step of G nominal samples trains a few more
or fewer. If every count of a log is a multiple of G, it is not packed and gets no slack. Otherwise
the slack of one distance is `_SLACK_OF_ONE` of the interval, because steps are noisy, and that of
the sum since the start is `_SLACK_OF_SUM`, where the noise averages out but the packing rate shows.
In 120 published packed logs of v5.0, distances are off by at most 0.7 % and sums by at most 0.15 %.

Other programs: train_samples may be the planned count (tinygrad) or the whole set (MosaicML).
Logged before training, it is ignored; logged at the end, it may exceed that of the last evaluation.
epoch_stop may count epochs. But if the other runs of a set log the samples of their last evaluation
there, a run that does not contradicts itself.

This code evaluates after the first step that reaches the configured count.
No step trains more than 3 nominal batches.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence

from mlaudit.findings import Complaint, Complaints, Outcome
from mlaudit.logs import Log, is_number
from mlaudit.result_set import (
    SAMPLE_COUNTS,
    LoggedEvaluation,
    ResultSet,
    counts_samples,
    evaluations_of,
    train_samples_event,
)
from mlaudit.rules import NUM_EVAL_SAMPLES, eval_interval

_RULE = (
    "rules, BERT: evaluate every "
    "floor(0.05 x (230.23 x GBS + 3,000,000) / 25,000) x 25,000 samples; "
)
_ROUNDED = _RULE + "a point may be rounded up to the next batch"
_SLACK_OF_ONE = 0.01
_SLACK_OF_SUM = 0.005
_LEFT_OUT = 1.5  # intervals without an evaluation mean that one was left out
_MIN_FOR_MEDIAN = 3


Found = Iterator[tuple[int, Complaint]]  # (index of the evaluation, from 1; complaint)
_MAX_COUNT_SLACK = 0.01
_LARGEST_STEP = 3  # nominal batches
_MEAN_STEP = 1.5  # nominal batches: packs may hold more than the set's packing factor
_MIN_EXACT = 4  # other runs whose train_samples equal those of their last evaluation
_THOROUGH = f"rules, BERT: an evaluation is of all {NUM_EVAL_SAMPLES} samples"
_AS_CONFIGURED = "a run does what its configuration says"


class EvaluationSchedule:
    """The range of samples in which evaluations are due at one batch size.

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
        # Each end of a distance may be one step early or late.
        self.shortest = self._down - batch - slack
        self.longest = self._up + batch + slack
        # Over many distances these steps cancel, so the median is close to the interval.
        self.longest_median = self._up + slack

    def earliest(self, index: int) -> float:
        """Return the fewest samples at which evaluation ``index`` (from 1) may be due."""
        slack = _SLACK_OF_SUM * self.interval if self.is_packed else 0
        return index * (self._down - slack) - self.batch


def check_grid(batch: int, points: Sequence[float], lines: Sequence[int]) -> Complaints:
    """Check the evaluations of one log, given their log lines.

    Yields only the first complaint of each kind.

    A missing or early evaluation and a wrong interval are errors. A late one is a warning: it only
    costs the submitter time, and published results have it.
    """
    schedule = EvaluationSchedule(batch, points)
    distances = [after - before for before, after in zip([0, *points], points, strict=False)]
    found = [
        *_first(_left_out(schedule, points, distances)),
        *_first(_early(schedule, points, distances)),
    ]
    if (
        len(points) >= _MIN_FOR_MEDIAN
        and (usual := statistics.median(distances)) > schedule.longest_median
    ):
        text = f"evaluations are {usual:.0f} samples apart, the grid says {schedule.interval}"
        found.append((1, Complaint(Outcome.ERROR, text, _ROUNDED)))
    elif late := [
        n
        for n, apart in enumerate(distances, 1)
        if schedule.longest < apart < _LEFT_OUT * schedule.interval
    ]:
        first = late[0]
        apart = distances[first - 1]
        text = f"evaluation {first} is late, {apart} samples after {_before(first)}"
        found.append((first, Complaint(Outcome.WARN, text, _ROUNDED)))
    for index, complaint in found:
        yield complaint._replace(text=f"line {lines[index - 1]}: {complaint.text}")


def _left_out(
    schedule: EvaluationSchedule, points: Sequence[float], distances: Sequence[float]
) -> Found:
    for index, (samples, apart) in enumerate(zip(points, distances, strict=True), start=1):
        if apart >= _LEFT_OUT * schedule.interval:
            expected = index * schedule.interval
            text = f"evaluation {index} is at {samples} samples, the grid says {expected}"
            yield index, Complaint(Outcome.ERROR, text, _ROUNDED)


def _early(
    schedule: EvaluationSchedule, points: Sequence[float], distances: Sequence[float]
) -> Found:
    """Find evaluations that are early from the start,
    or from the previous one unless that was as late.
    """
    before: float = schedule.interval
    for index, (samples, apart) in enumerate(zip(points, distances, strict=True), start=1):
        is_short = apart < schedule.shortest and before + apart < 2 * schedule.shortest
        if is_short or samples < schedule.earliest(index):
            text = f"evaluation {index} is at {samples} samples, {apart} after {_before(index)}"
            yield (
                index,
                Complaint(
                    Outcome.ERROR, f"{text}; the grid says {index * schedule.interval}", _ROUNDED
                ),
            )
        before = apart


def _before(index: int) -> str:
    return "the start" if index == 1 else "the one before"


def _first(found: Found) -> list[tuple[int, Complaint]]:
    return list(itertools.islice(found, 1))


def check_evaluations(results: ResultSet) -> Complaints:
    """Evaluations are in order up to the end of training. Those of the closed division are on the
    rules' grid, of 10,000 samples.
    """
    needed = max(_MIN_EXACT, len(results.logs) - 1)
    are_exact = [
        sum(map(is_exact, results.logs)) >= needed for is_exact in (_trains_exactly, _stops_exactly)
    ]
    for log in results.logs:
        evaluations = evaluations_of(log)
        counts_epochs = not results.round.counts_samples and not counts_samples(log)
        yield from _order(log, evaluations, counts_epochs)
        yield from _trained(log, evaluations, are_exact[0])
        if are_exact[1] and log.status == "success" and not _stops_exactly(log) and not log.is_ours:
            yield from _stopped_elsewhere(log)
        if log.is_ours:
            yield from _configured(log, evaluations)
        if results.wanted_division == "closed":
            yield from _eval_samples(log)
            if results.round.has_grid and not counts_epochs:
                yield from _on_grid(log, evaluations)


def _order(log: Log, evaluations: Sequence[LoggedEvaluation], counts_epochs: bool) -> Complaints:
    is_one_number = len(evaluations) > 1 and len({one.samples for one in evaluations}) == 1
    if is_one_number and not log.is_ours and not counts_epochs:
        text = f"every evaluation has epoch_num {evaluations[0].samples}"
        yield log.warning(text, SAMPLE_COUNTS, evaluations[1].event)
        return
    for before, after in itertools.pairwise(evaluations):
        is_same_epoch = counts_epochs and after.samples == before.samples
        if after.samples <= before.samples and not is_same_epoch:
            order = f"{after.samples} after {before.samples}"
            text = f"evaluations are not in the order of samples: {order}"
            # Another program may evaluate several checkpoints at once.
            yield log.error_if(log.is_ours, text, SAMPLE_COUNTS, after.event)
            return
    if evaluations and evaluations[-1].samples <= 0:
        yield log.error(
            "the last evaluation comes before any training", SAMPLE_COUNTS, evaluations[-1].event
        )


def _trains_exactly(log: Log) -> bool:
    evaluations = evaluations_of(log)
    event = train_samples_event(log)
    return bool(evaluations) and event is not None and evaluations[-1].samples == event.value


def _stops_exactly(log: Log) -> bool:
    evaluations = evaluations_of(log)
    stops = log.all("epoch_stop")
    return bool(evaluations) and bool(stops) and stops[-1].samples == evaluations[-1].samples


def _stopped_elsewhere(log: Log) -> Complaints:
    for stop in log.all("epoch_stop")[-1:]:
        text = f"epoch_stop has epoch_num {(stop.metadata or {}).get('epoch_num')!r}"
        yield log.error(
            f"{text}, but not the last evaluation; in the other logs they agree",
            SAMPLE_COUNTS,
            stop,
        )


def _trained(
    log: Log, evaluations: Sequence[LoggedEvaluation], others_are_exact: bool
) -> Complaints:
    event = train_samples_event(log)
    if not evaluations or event is None or not is_number(event.value):
        return
    last = max(one.samples for one in evaluations)
    trained = event.value
    if last > trained:
        # Nominal and real samples.
        is_near = last <= trained * (1 + _MAX_COUNT_SLACK) and not log.is_ours
        yield log.error_if(
            not is_near,
            f"evaluated at {last} samples but trained on {trained}",
            SAMPLE_COUNTS,
            event,
        )
    elif last < trained and log.status == "success" and (log.is_ours or others_are_exact):
        text = f"trained on {trained} samples, the last evaluation is at {last}"
        yield log.error(f"{text}; a run ends with one", SAMPLE_COUNTS, event)


def _configured(log: Log, evaluations: Sequence[LoggedEvaluation]) -> Complaints:
    """Check this code's evaluations against the configured schedule and end of training."""
    batch = log.value("global_batch_size")
    if not is_number(batch) or batch < 1 or log.is_continued or not evaluations:
        return
    slack = _LARGEST_STEP * batch
    if log.setting("EVAL_SCHEDULE") in (None, "steps"):
        yield from _due(log, evaluations, slack)
    steps = log.setting("MAX_STEPS")
    limit = log.setting("MAX_SAMPLES_TERMINATION")
    # If the log has a steps event, `checks.configuration` checks the steps exactly.
    can_tell = is_number(steps) and log.first("steps") is None
    ends = [
        steps * _MEAN_STEP * batch + slack if can_tell else None,
        limit + slack if is_number(limit) else None,
    ]
    for end, name in zip(ends, ("MAX_STEPS", "MAX_SAMPLES_TERMINATION"), strict=True):
        if end is not None and evaluations[-1].samples > end:
            text = f"{evaluations[-1].samples} samples, more than {name} allows"
            yield log.error(text, _AS_CONFIGURED, evaluations[-1].event)


def _due(log: Log, evaluations: Sequence[LoggedEvaluation], slack: float) -> Complaints:
    """Find the first evaluation that is early (the last may be, at a limit)
    or more than a step late.
    """
    due = log.setting("EVAL_ITER_START_SAMPLES")
    every = log.setting("EVAL_ITER_SAMPLES")
    if not is_number(due) or not is_number(every) or every < 1:
        return
    for one in evaluations:
        is_early = one.samples < due and one is not evaluations[-1]
        if is_early or one.samples > due + slack:
            yield log.error(
                f"evaluated at {one.samples} samples, due at {due}", _AS_CONFIGURED, one.event
            )
            return
        due += max(0, (one.samples - due) // every + 1) * every


def _on_grid(log: Log, evaluations: Sequence[LoggedEvaluation]) -> Complaints:
    batch = log.value("global_batch_size")
    counted = [one for one in evaluations if one.samples > 0]
    if is_number(batch) and batch >= 1:
        lines = [one.event.line for one in counted]
        for found in check_grid(int(batch), [one.samples for one in counted], lines):
            yield found._replace(text=f"{log.path.name}: {found.text}")


def _eval_samples(log: Log) -> Complaints:
    event = log.first("eval_samples")
    if event is not None and is_number(event.value) and event.value < NUM_EVAL_SAMPLES:
        yield log.error(
            f"eval_samples is {event.value}, the rules say {NUM_EVAL_SAMPLES}", _THOROUGH, event
        )
