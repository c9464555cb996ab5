"""When evaluations fall due in the closed division, and whether those of a log came then.

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
from mlbert.mlperf.rules import eval_interval

_RULE = "rules, BERT: evaluate every floor(0.05 x (230.23 x GBS + 3,000,000) / 25,000) x 25,000 samples; "
_ROUNDED = _RULE + "a point may be rounded up to the next batch"
_SLACK_OF_ONE = 0.01
_SLACK_OF_SUM = 0.005
_LEFT_OUT = 1.5  # intervals without an evaluation
_MIN_FOR_MEDIAN = 3


Found = Iterator[tuple[int, Complaint]]  # with the evaluation's index, from 1


class Schedule:
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
    schedule = Schedule(batch, points)
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


def _left_out(schedule: Schedule, points: Sequence[float], distances: Sequence[float]) -> Found:
    for index, (samples, apart) in enumerate(zip(points, distances, strict=True), start=1):
        if apart >= _LEFT_OUT * schedule.interval:
            text = f"evaluation {index} is at {samples} samples, the grid says {index * schedule.interval}"
            yield index, Complaint(Outcome.ERROR, text, _ROUNDED)


def _early(schedule: Schedule, points: Sequence[float], distances: Sequence[float]) -> Found:
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
