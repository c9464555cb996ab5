"""Check that the times in logs are plausible: of intervals, evaluations and whole runs.

Pace is samples per millisecond from one evaluation to the next. In 140 published v5.0 logs of 14
systems, no run has an interval more than 1.02 times as fast as the fastest of the other nine runs,
and in this code's 30 on shared CPUs none more than 1.08 times. A first interval has 0.63 to 0.98 of
its run's median rate (1.15 on two GPUs, 1.10 on shared CPUs): a faster one began before the clock.
The fastest run of a set is 1.034 times as fast as the median of the others if their robust spread
is 0.014 (1.10 on shared CPUs). Rates by the time stamps are 0.95 to 1.01 of the `throughput` that
12 systems log. Slow intervals are honest (one of this code's took 5.7 times the usual while another
job had the cores), unless the run stood still. The shortest evaluations take 0.87 of the median
(0.59 on shared CPUs), and 48 ms.

Time stamps are milliseconds since 1970. MLPerf's first results are from 2018, and a clock may be a
day ahead. Three of the 14 published v5.0 systems ran on several machines side by side (3, 5 and 6
of nine pairs of runs overlap), so other programs' runs may overlap if many do. This code's
launchers start one run after the other. The published programs start the clock 0 ms after
init_stop, and this code within 1 s (a barrier). tinygrad needs up to 41 s, and the rules allow half
an hour before the clock (four hours in open).
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mlaudit.benchmarks import num_dropped, num_runs
from mlaudit.findings import Complaint, Complaints, Outcome
from mlaudit.logs import Event, Log, is_number
from mlaudit.result_set import (
    ONE_SETTING,
    LoggedEvaluation,
    ResultSet,
    evaluations_of,
    samples_before,
)

_FIRST_MS = 1_514_764_800_000  # 2018-01-01
_DAY_MS = 86_400_000
_SECOND_MS = 1000
_MIN_STAMPS = 20
_MIN_EQUAL = 5
_ROUND_DAYS = 180  # between the runs of one result; at most 3 in published logs
# Other lines have no time that counts; some programs stamp them with 0.
_TIMED_KEYS = frozenset(
    (
        "init_start",
        "init_stop",
        "run_start",
        "run_stop",
        "epoch_start",
        "epoch_stop",
        "block_start",
        "block_stop",
        "eval_start",
        "eval_stop",
        "eval_accuracy",
    )
)
_UNITS = {"seconds": 1e-3, "microseconds": 1e3, "nanoseconds": 1e6}  # per millisecond
_MS = "log format: time_ms is the time of the event in milliseconds since 1970"
_TIMED_TO_TARGET = "rules: the clock runs from the first touch of training data to the target"
_ONE_AT_A_TIME = "rules: a run has its machine to itself"
_FEW_OVERLAPS = 3  # if fewer than one pair in this many overlaps, the runs were sequential
# By is_ours: (warning above, error above).
_UNSCORED_SECONDS = {
    True: (10, 120),
    False: (120, 1800),
}
_UNSCORED_OPEN_SECONDS = 4 * 3600
_TIMED = "rules: the time from run_start to run_stop is the result, without a pause"
_UNUSUAL = 1.25  # times the fastest interval of the other runs
_IMPOSSIBLE = 1.6
_IMPOSSIBLE_SHARED = 2.0  # for this code's demos, which share their CPUs with other jobs
_IMPOSSIBLE_HERE = 1.5  # if the run's own intervals agree
_NOISE = 1.25  # of a run's own intervals relative to their median
_IMPOSSIBLE_ALONE = 3.0  # times the run's own median, if there are no other runs
_EARLY_UNUSUAL = 1.3  # first interval, times the median rate of the run's other intervals
_EARLY = 2.0  # likewise
_RUN_UNUSUAL = 1.08  # whole run, times the median of the others
_SPREADS = 8  # whole run, above the median of the others
_SPREAD_OF_MAD = 1.4826  # of a normal distribution
_RATE_LOW = 0.6  # rate by the time stamps, times the logged throughput
_RATE_HIGH = 1.5  # likewise
_OTHER_UNIT = 4.0  # likewise
_PAUSE = 3.0  # times the usual interval
_LONG_PAUSE_MS = 30_000  # more than the usual interval
_STOOD_STILL = 10.0  # times the usual interval
_STOOD_STILL_MS = 60_000  # more than the usual interval
_MIN_INTERVALS = 4
_MIN_RUNS = 3
# Shorter intervals come from trial runs, where one CPU stall multiplies the time.
_NOISY_OURS_MS = 2000
_NOISY_MS = 1000
_BEFORE = ("start", "evaluation before")
# By is_ours. For shorter evaluations, stalls of a shared CPU change the median.
_MIN_EVALUATION_MS = {
    True: 300,
    False: 20,
}
_SHORT = 0.4  # of the median evaluation
_TOO_SHORT = 0.25  # of the median evaluation
_TOO_SHORT_OTHERS = 0.1  # of the median evaluation, in logs of other programs
_NO_TIME_MS = 1
_MIN_EVALUATIONS = 3

_MAX_CLOCK_SKEW_MS = 1000
_TEN_RUNS = (
    "rules: ten runs, the fastest and the slowest dropped; one may miss the target, two may not"
)
_ALL_RUNS = "rules: one run of a result may miss the target"
_CONTINUED = "rules: a run starts from the reference checkpoint and is timed as a whole"


def check_clock(results: ResultSet) -> Complaints:
    """Time stamps are milliseconds of days since 2018,
    and the clock starts when initialization is over.
    """
    for log in results.logs:
        may_be_fraction = not log.is_ours
        found = filter(None, (_wrong_stamp(log, event, may_be_fraction) for event in log.events))
        wrong = min(found, key=lambda one: one.outcome is not Outcome.ERROR, default=None)
        if wrong is not None:
            yield wrong
        if wrong is None or wrong.outcome is not Outcome.ERROR:
            yield from _unscored(log)
            yield from _too_regular(log)
    starts = [(log, event) for log in results.logs if (event := log.first("run_start"))]
    usual = statistics.median(event.time_ms for _, event in starts) if starts else 0
    for log, event in starts:
        days = abs(event.time_ms - usual) / _DAY_MS
        if days > _ROUND_DAYS:
            yield log.warning(f"{days:.0f} days from most other runs", ONE_SETTING, event)


def _too_regular(log: Log) -> Complaints:
    """Find time stamps that no clock produces: only whole seconds,
    or evaluations evenly spaced to the millisecond.
    """
    stamps = [event.time_ms for event in stamped(log)]
    if len(stamps) >= _MIN_STAMPS and not any(stamp % _SECOND_MS for stamp in stamps):
        yield log.warning("every time_ms is a whole second", _MS)
    stamps = [one.event.time_ms for one in evaluations_of(log)]
    intervals = {after - before for before, after in itertools.pairwise(stamps)}
    if len(stamps) > _MIN_EQUAL and len(intervals) == 1:
        yield log.warning(
            f"all {len(stamps)} evaluations are {intervals.pop():.10g} ms apart, to the millisecond"
        )


def check_overlap(results: ResultSet) -> Complaints:
    """No run started before the previous one had stopped."""
    runs = []
    for log in filter(has_plausible_stamps, results.logs):
        start = log.first("run_start")
        stop = log.first("run_stop")
        if start is not None and stop is not None:
            runs.append((start.time_ms, stop.time_ms, start.line, log))
    runs.sort(key=lambda run: run[:3])
    pairs = list(itertools.pairwise(runs))
    overlaps = [(before, after) for before, after in pairs if after[0] < before[1]]
    usual = Outcome.WARN if _FEW_OVERLAPS * len(overlaps) < len(pairs) else Outcome.NOTE
    for (_, stopped, _, before), (started, _, _, log) in overlaps:
        text = f"run_start is {(stopped - started) / 1000:.4g} s before the run_stop"
        are_ours = log.is_ours and before.is_ours
        is_wrong = are_ours and not are_apart(log, before)
        text += f" of {before.path.name}" + ("" if is_wrong else "; several machines side by side?")
        outcome = Outcome.ERROR if is_wrong else Outcome.NOTE if are_ours else usual
        yield log.complaint(
            outcome, text, _ONE_AT_A_TIME if is_wrong else "", log.first("run_start")
        )


def are_apart(one: Log, other: Log) -> bool:
    """Return True if two runs name their machines and share none."""
    hosts, others = (log.value("hosts") for log in (one, other))
    if not isinstance(hosts, list) or not isinstance(others, list) or not hosts or not others:
        return False
    return set(map(str, hosts)).isdisjoint(map(str, others))


def has_plausible_stamps(log: Log) -> bool:
    """Return True if the time stamps of a log can be compared at all."""
    latest = _latest_ms()
    return all(_FIRST_MS <= event.time_ms <= latest for event in stamped(log))


def stamped(log: Log) -> list[Event]:
    """Return the events of a log without another program's untimed ones that have a stamp of 0."""
    return [event for event in log.events if not _is_unstamped(log, event)]


def _is_unstamped(log: Log, event: Event) -> bool:
    return event.time_ms == 0 and event.key not in _TIMED_KEYS and not log.is_ours


def _latest_ms() -> float:
    return time.time() * 1000 + _DAY_MS


def _wrong_stamp(log: Log, event: Event, may_be_fraction: bool) -> Complaint | None:
    stamp = json.loads(event.text).get("time_ms")
    if _is_unstamped(log, event):
        return log.complaint(Outcome.NOTE, f"{event.key} has no time stamp (0)", event=event)
    problem = ""
    if (
        isinstance(stamp, bool)
        or not isinstance(stamp, int | float)
        or not math.isfinite(event.time_ms)
    ):
        problem = "is not a plain number"
    elif stamp < 0:
        problem = "is negative"
    elif not _FIRST_MS <= stamp <= _latest_ms():
        units = [
            name for name, per_ms in _UNITS.items() if _FIRST_MS <= stamp / per_ms <= _latest_ms()
        ]
        when = "is before 2018, when MLPerf began" if stamp < _FIRST_MS else "is in the future"
        problem = f"looks like {units[0]}, not milliseconds" if units else when
    elif not may_be_fraction and stamp != int(stamp):
        problem = "is not a whole number of milliseconds"
    return (
        log.error(f"{event.key}: time_ms {stamp!r:.40} {problem}", _MS, event) if problem else None
    )


def _unscored(log: Log) -> Complaints:
    """Check the time between init_stop and run_start,
    which counts neither as initialization nor as result.
    """
    stop = log.first("init_stop")
    start = log.first("run_start")
    if stop is None or start is None:
        return
    seconds = (start.time_ms - stop.time_ms) / 1000
    unusual, wrong = _UNSCORED_SECONDS[log.is_ours]
    if not log.is_ours and log.value("submission_division") == "open":
        wrong = _UNSCORED_OPEN_SECONDS
    if seconds > unusual:
        text = f"run_start comes {seconds:.4g} s after init_stop"
        yield log.error_if(
            seconds > wrong, text, _TIMED_TO_TARGET if seconds > wrong else "", start
        )


class _Interval(NamedTuple):
    event: Event  # the accuracy at its end
    samples: float
    ms: float

    @property
    def pace(self) -> float:
        return self.samples / self.ms if self.ms > 0 else math.inf


def check_pace(results: ResultSet) -> Complaints:
    """No interval between evaluations is faster than the machine can be,
    and none is a long pause.
    """
    intervals = {log.path: _intervals(log) for log in results.logs if has_plausible_stamps(log)}
    fastest = {
        path: max(one.pace for one in own) for path, own in intervals.items() if len(own) > 1
    }
    for log in results.logs:
        own = intervals.get(log.path, [])
        others = [pace for path, pace in fastest.items() if path != log.path]
        # Use the second fastest run: the fastest may itself be the implausible one.
        limit = sorted(others)[-2] if len(others) >= _MIN_RUNS else None
        yield from _too_fast(log, own, limit)
        yield from _early(log, own)
        yield from _pauses(log, own)
        yield from _against_throughput(log, own)
    yield from _fast_runs(
        [(log, intervals[log.path]) for log in results.logs if intervals.get(log.path)]
    )


def _intervals(log: Log) -> list[_Interval]:
    start = log.first("run_start")
    samples = samples_before(log)
    if start is None or samples is None:
        return []
    intervals = []
    time_ms = start.time_ms
    for one in evaluations_of(log):
        if one.samples > samples:
            intervals.append(
                _Interval(one.event, one.samples - samples, one.event.time_ms - time_ms)
            )
            samples = one.samples
            time_ms = one.event.time_ms
    return intervals


def _too_fast(log: Log, own: Sequence[_Interval], limit: float | None) -> Complaints:
    """Find the first impossible interval or, if there is none, the first unusual one."""
    usual = statistics.median(one.pace for one in own) if own else math.inf
    known = usual if len(own) >= _MIN_INTERVALS else math.inf
    fast = [
        (outcome, one) for one in own if (outcome := _judge(log, one, known, limit)) is not None
    ]
    for outcome, one in sorted(fast, key=lambda found: found[0] is not Outcome.ERROR)[:1]:
        reference = f"{1000 * (limit or usual):.4g} a second "
        reference += "in other runs at most" if limit else "usually"
        text = f"{one.samples:.10g} samples in {one.ms / 1000:.4g} s"
        text += f" since the {_BEFORE[one is not own[0]]}, {reference}"
        yield log.complaint(outcome, text, _TIMED if outcome is Outcome.ERROR else "", one.event)


def _judge(log: Log, one: _Interval, usual: float, limit: float | None) -> Outcome | None:
    """Judge an interval's pace against the usual pace of its run and the fastest of other runs."""
    if one.ms <= 0:
        return Outcome.ERROR
    if limit is None:
        if one.pace > _IMPOSSIBLE_ALONE * usual and not _is_noisy(log, one.samples / usual):
            return Outcome.ERROR
        return Outcome.WARN if one.pace > _IMPOSSIBLE_SHARED * usual else None
    if _is_noisy(log, one.samples / limit):
        return Outcome.WARN if one.pace > _UNUSUAL * limit else None
    impossible = _IMPOSSIBLE_SHARED if log.is_ours else _IMPOSSIBLE
    if one.pace > impossible * limit or one.pace > _IMPOSSIBLE_HERE * max(limit, _NOISE * usual):
        return Outcome.ERROR
    return Outcome.WARN if one.pace > _UNUSUAL * limit else None


def _is_noisy(log: Log, usual_ms: float) -> bool:
    return usual_ms < (_NOISY_OURS_MS if log.is_ours else _NOISY_MS)


def _early(log: Log, own: Sequence[_Interval]) -> Complaints:
    """Find a first interval that is faster than the others of its run:
    training began before run_start.
    """
    if len(own) < _MIN_INTERVALS or log.is_continued or own[0].ms <= 0:
        return
    first = own[0]
    usual = statistics.median(one.pace for one in own[1:])
    if first.pace > _EARLY_UNUSUAL * usual:
        is_wrong = first.pace > _EARLY * usual and not _is_noisy(log, first.samples / usual)
        text = f"{first.samples:.10g} samples in {first.ms / 1000:.4g} s since the start"
        text += f", {first.pace / usual:.3g} times the usual rate: trained before run_start?"
        yield log.error_if(is_wrong, text, _TIMED if is_wrong else "", first.event)


def _pauses(log: Log, own: Sequence[_Interval]) -> Complaints:
    """Find a slow first interval, in which a program may compile, and the longest later pause."""
    if len(own) < _MIN_INTERVALS:
        return
    usual_ms = statistics.median(one.ms for one in own)
    usual_pace = statistics.median(one.pace for one in own)
    slow = [one for one in own if one.ms >= _PAUSE * usual_ms and one.pace <= usual_pace / _PAUSE]
    first = [one for one in slow if one is own[0]]
    later = [one for one in slow if one is not own[0]]
    for one in (*first, *sorted(later, key=lambda one: -one.ms)[:1]):
        longer_ms = one.ms - usual_ms
        outcome = Outcome.WARN if longer_ms >= _LONG_PAUSE_MS else Outcome.NOTE
        if one.ms >= _STOOD_STILL * usual_ms and longer_ms >= _STOOD_STILL_MS and one is not own[0]:
            outcome = Outcome.ERROR
        text = f"{one.ms / 1000:.4g} s since the {_BEFORE[one is not own[0]]}"
        text += f", usually {usual_ms / 1000:.4g} s"
        yield log.complaint(outcome, text, _TIMED if outcome is Outcome.ERROR else "", one.event)


def _rate(own: Sequence[_Interval]) -> float:
    """Return the samples per millisecond of a complete run."""
    ms = sum(one.ms for one in own)
    return sum(one.samples for one in own) / ms if ms > 0 else math.inf


def _against_throughput(log: Log, own: Sequence[_Interval]) -> Complaints:
    """Check logged samples per second against the time stamps.

    A very different number has another unit.
    """
    stats = [
        (event, float(event.value["throughput"]))
        for event in log.all("tracked_stats")
        if isinstance(event.value, dict)
        and is_number(event.value.get("throughput"))
        and event.value["throughput"] > 0
    ]
    if not stats or not own:
        return
    usual = statistics.median(value for _, value in stats)
    ratio = 1000 * _rate(own) / usual
    if _RATE_HIGH < ratio < _OTHER_UNIT or 1 / _OTHER_UNIT < ratio < _RATE_LOW:
        text = f"the throughput of tracked_stats is {usual:.4g} samples a second"
        yield log.warning(f"{text}, by the time stamps {1000 * _rate(own):.4g}", event=stats[0][0])


def _fast_runs(runs: Sequence[tuple[Log, Sequence[_Interval]]]) -> Complaints:
    """Find runs that are faster than the others by more than the spread of those allows."""
    rates = [_rate(own) for _, own in runs]
    for index, (log, own) in enumerate(runs):
        others = rates[:index] + rates[index + 1 :]
        if len(others) < _MIN_INTERVALS or not all(
            math.isfinite(rate) and rate > 0 for rate in others
        ):
            continue
        usual = statistics.median(others)
        spread = _SPREAD_OF_MAD * statistics.median(abs(rate / usual - 1) for rate in others)
        if rates[index] > max(_RUN_UNUSUAL, 1 + _SPREADS * spread) * usual:
            text = f"the whole run trained {1000 * rates[index]:.4g} samples a second"
            yield log.warning(
                f"{text}, the others {1000 * usual:.4g}, {100 * spread:.2g} % apart",
                event=own[-1].event,
            )


def check_evaluation_time(results: ResultSet) -> Complaints:
    """Evaluations take about the same time in all runs."""
    timed = [(log, list(_durations(log))) for log in results.logs if has_plausible_stamps(log)]
    everything = [ms for _, durations in timed for _, ms in durations]
    if len(everything) < _MIN_INTERVALS:
        return
    usual = statistics.median(everything)
    for log, durations in timed:
        if len(durations) >= _MIN_EVALUATIONS and all(ms <= _NO_TIME_MS for _, ms in durations):
            text = f"no evaluation took more than {_NO_TIME_MS} ms"
            yield log.error_if(
                log.is_ours, text, _TIMED if log.is_ours else "", durations[0][0].event
            )
            continue
        shortest, ms = min(durations, key=lambda pair: pair[1], default=(None, usual))
        min_ms = (
            _NOISY_OURS_MS
            if log.is_ours and len(results.logs) < _MIN_RUNS
            else _MIN_EVALUATION_MS[log.is_ours]
        )
        if shortest is None or usual < min_ms or ms > _SHORT * usual:
            continue
        text = f"an evaluation took {ms:.4g} ms, usually {usual:.4g} ms"
        if ms < usual * (_TOO_SHORT if log.is_ours else _TOO_SHORT_OTHERS):
            yield log.error(text, _TIMED, shortest.event)
        else:
            yield log.warning(text, event=shortest.event)


def _durations(log: Log) -> Iterator[tuple[LoggedEvaluation, float]]:
    for one in evaluations_of(log):
        if one.start is not None and one.stop is not None:
            yield one, one.stop.time_ms - one.start.time_ms


def check_status(results: ResultSet) -> Complaints:
    """Every run ended in success; of ten runs, the scoring drops one that did not."""
    bad = [log for log in results.logs if log.status != "success"]
    is_complete = len(results.logs) == num_runs(results.benchmark)
    is_tolerated = is_complete and len(bad) <= num_dropped(results.benchmark)
    rule = _TEN_RUNS if results.is_bert else _ALL_RUNS
    for log in bad:
        status = f"run_stop status is {log.status!r}"
        yield log.error_if(not is_tolerated, status, rule, log.first("run_stop"))


def check_time(results: ResultSet) -> Complaints:
    """Time stamps never go back, run_stop is after run_start,
    and no run was resumed from a checkpoint.
    """
    usual = _usually_back(results.logs)
    for log in results.logs:
        for event in log.all("resumed_from_step")[:1]:
            outcome = Outcome.WARN if results.system is None else Outcome.ERROR
            yield log.complaint(
                outcome, "resumed from a checkpoint, so its time is not a result", _CONTINUED, event
            )
        pairs = [
            (one, other)
            for one, other in itertools.pairwise(stamped(log))
            if other.time_ms < one.time_ms
        ]
        complaints = [_goes_back(log, before, after, usual) for before, after in pairs]
        yield from sorted(complaints, key=lambda found: found.outcome is not Outcome.ERROR)[:1]
        start = log.first("run_start")
        stop = log.first("run_stop")
        if start is not None and stop is not None and stop.time_ms <= start.time_ms:
            yield log.error("run_stop is not after run_start", _TIMED, stop)


def _usually_back(logs: Sequence[Log]) -> set[str]:
    """Return the keys that half of the logs stamp with an earlier time than the line before.

    Programs that evaluate time-stamped checkpoints later log the checkpoint's time.
    """
    counts: Counter[str] = Counter()
    for log in logs:
        pairs = itertools.pairwise(stamped(log))
        counts.update({other.key for one, other in pairs if other.time_ms < one.time_ms})
    return {key for key, count in counts.items() if 2 * count >= len(logs)}


def _goes_back(log: Log, before: Event, after: Event, usual: set[str]) -> Complaint:
    """Return an error for the timed part, unless the program usually logs that key late.

    Outside it, several processes may log their earlier events late.
    """
    text = f"time goes back at {after.key}"
    start = log.first("run_start")
    stop = log.first("run_stop")
    is_timed = (
        start is not None and start.line <= after.line and (stop is None or after.line <= stop.line)
    )
    is_back = is_timed and before.time_ms - after.time_ms > _MAX_CLOCK_SKEW_MS
    if log.is_ours or (is_back and after.key not in usual):
        return log.error(text, _TIMED, after)
    return log.complaint(Outcome.WARN if is_timed else Outcome.NOTE, text, event=after)
