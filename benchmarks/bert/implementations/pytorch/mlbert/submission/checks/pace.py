"""Whether samples, evaluations and runs took a time that they can have taken.

A pace is samples per millisecond from one evaluation to the next. Among 140 published v5.0 logs of 14 systems no run
has an interval more than 1.02 times as fast as the fastest of the other nine runs, and this code's 30 on shared CPUs
none more than 1.08 times: training cannot be hurried. Slow intervals are honest (a first one 0.63 of the median, one of
this code's 0.17 while another job had the cores), and so are slow runs, so nothing slow is more than a note. The
shortest evaluations take 0.87 of the median (0.59 on shared CPUs).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mlbert.submission.checks.clock import has_plausible_stamps
from mlbert.submission.findings import Complaint, Complaints, Outcome
from mlbert.submission.logs import Log
from mlbert.submission.result_set import ResultSet, error, is_ours
from mlbert.submission.run_view import Evaluation, evaluations_of

_TIMED = "rules: the time from run_start to run_stop is the result, without a pause"
_UNUSUAL = 1.25  # times the fastest interval of the other runs
_IMPOSSIBLE, _IMPOSSIBLE_SHARED = 1.6, 2.0  # this code's demos share their CPUs with other jobs
_IMPOSSIBLE_HERE = 1.5  # where the run's own intervals say the same
_NOISE = 1.25  # of a run's own intervals against their median
_IMPOSSIBLE_ALONE = 3.0  # times the run's own median, without other runs
_PAUSE = 3.0  # times the usual interval
_MIN_INTERVALS = 4
_BEFORE = ("start", "evaluation before")
_MIN_EVALUATION_MS = 20  # below, the clock's resolution shows
_SHORT, _TOO_SHORT, _TOO_SHORT_OTHERS = 0.4, 0.25, 0.1  # of the median evaluation


class _Interval(NamedTuple):
    where: str
    samples: float
    ms: float

    @property
    def pace(self) -> float:
        return self.samples / self.ms if self.ms > 0 else math.inf


def check_pace(results: ResultSet) -> Complaints:
    """No interval between evaluations is faster than the machine can be, none a long pause."""
    intervals = {log.path: _intervals(log) for log in results.logs if has_plausible_stamps(log)}
    for log in results.logs:
        own = intervals.get(log.path, [])
        fastest = [
            max(one.pace for one in other) for path, other in intervals.items() if path != log.path and len(other) > 1
        ]
        # The second fastest run: the fastest may itself be the one that cannot be.
        limit = sorted(fastest)[-2] if len(fastest) > 1 else max(fastest, default=None)
        yield from _too_fast(log, own, limit)
        yield from _pauses(log, own)


def _intervals(log: Log) -> list[_Interval]:
    start = log.first("run_start")
    if start is None:
        return []
    intervals = []
    samples, time_ms = 0.0, start.time_ms
    for one in evaluations_of(log):
        if one.samples > samples:
            intervals.append(_Interval(one.where, one.samples - samples, one.event.time_ms - time_ms))
            samples, time_ms = one.samples, one.event.time_ms
    return intervals


def _too_fast(log: Log, own: Sequence[_Interval], limit: float | None) -> Complaints:
    """The first interval that cannot be, else the first unusual one."""
    usual = statistics.median(one.pace for one in own) if own else math.inf
    found: Complaint | None = None
    for index, one in enumerate(own):
        outcome = _judge(log, one, usual if len(own) >= _MIN_INTERVALS else math.inf, limit)
        if outcome is not None and (found is None or found.outcome is not Outcome.ERROR):
            reference = f"{1000 * (limit or usual):.4g} a second {'in other runs at most' if limit else 'usually'}"
            text = f"{log.path.name}: {one.where}: {one.samples:.10g} samples in {one.ms / 1000:.4g} s"
            text += f" since the {_BEFORE[index > 0]}, {reference}"
            if found is None or outcome is Outcome.ERROR:
                found = Complaint(outcome, text, _TIMED if outcome is Outcome.ERROR else "")
    if found is not None:
        yield found


def _judge(log: Log, one: _Interval, usual: float, limit: float | None) -> Outcome | None:
    """How impossible an interval's pace is, against its own run's usual one and the fastest ones of other runs."""
    if one.ms <= 0:
        return Outcome.ERROR
    if limit is None:
        if usual < math.inf and one.pace > _IMPOSSIBLE_ALONE * usual:
            return Outcome.ERROR
        return Outcome.WARN if one.pace > _IMPOSSIBLE_SHARED * usual else None
    impossible = _IMPOSSIBLE_SHARED if is_ours(log) else _IMPOSSIBLE
    if one.pace > impossible * limit or one.pace > _IMPOSSIBLE_HERE * max(limit, _NOISE * usual):
        return Outcome.ERROR
    return Outcome.WARN if one.pace > _UNUSUAL * limit else None


def _pauses(log: Log, own: Sequence[_Interval]) -> Complaints:
    if len(own) < _MIN_INTERVALS:
        return
    usual_ms, usual_pace = statistics.median(one.ms for one in own), statistics.median(one.pace for one in own)
    for index, one in enumerate(own):
        if one.ms > _PAUSE * usual_ms and one.pace < usual_pace / _PAUSE:
            text = f"{log.path.name}: {one.where}: {one.ms / 1000:.4g} s since the {_BEFORE[index > 0]}"
            yield Complaint(Outcome.NOTE, f"{text}, usually {usual_ms / 1000:.4g} s")
            return


def check_evaluation_time(results: ResultSet) -> Complaints:
    """Evaluations take about the same time, in one run as in another."""
    timed = [(log, list(_durations(log))) for log in results.logs if has_plausible_stamps(log)]
    everything = [ms for _, durations in timed for _, ms in durations]
    if len(everything) < _MIN_INTERVALS:
        return
    usual = statistics.median(everything)
    for log, durations in timed:
        shortest, ms = min(durations, key=lambda pair: pair[1], default=(None, usual))
        if shortest is None or usual < _MIN_EVALUATION_MS or ms > _SHORT * usual:
            continue
        text = f"line {shortest.event.line}: an evaluation took {ms:.4g} ms, usually {usual:.4g} ms"
        if ms < usual * (_TOO_SHORT if is_ours(log) else _TOO_SHORT_OTHERS):
            yield error(log, text, _TIMED)
        else:
            yield Complaint(Outcome.WARN, f"{log.path.name}: {text}")


def _durations(log: Log) -> Iterator[tuple[Evaluation, float]]:
    for one in evaluations_of(log):
        if one.start is not None and one.stop is not None:
            yield one, one.stop.time_ms - one.start.time_ms
