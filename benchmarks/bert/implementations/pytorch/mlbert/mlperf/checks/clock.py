"""Whether time stamps are milliseconds of days on which BERT was run, and whether runs share a machine's time.

Stamps count from 1970 in milliseconds. MLPerf's first results are of 2018, and a clock may be a day ahead. Of the 14
published v5.0 systems three ran on several machines side by side (3, 5 and 6 of nine pairs of runs overlap), so other
programs' runs may overlap, if many do; this code's launchers start one run after the other. Those programs start the
clock 0 ms after init_stop and this code within 1 s (a barrier); tinygrad's needs up to 41 s, and the rules allow half
an hour before the clock (four in open).
"""

from __future__ import annotations

import itertools
import json
import math
import time

from mlbert.mlperf.findings import Complaint, Complaints, Outcome
from mlbert.mlperf.logs import Event, Log
from mlbert.mlperf.result_set import ResultSet, error, is_ours

_FIRST_MS = 1_514_764_800_000  # 2018-01-01
_DAY_MS = 86_400_000
_UNITS = {"seconds": 1e-3, "microseconds": 1e3, "nanoseconds": 1e6}  # per millisecond
_MS = "log format: time_ms is the time of the event in milliseconds since 1970"
_TIMED = "rules: the clock runs from the first touch of training data to the target"
_ONE_AT_A_TIME = "rules: a run has its machine to itself"
_FEW_OVERLAPS = 3  # fewer than one in so many pairs: the set ran one after the other
_UNSCORED_SECONDS = {True: (10, 120), False: (120, 1800)}  # of this code's logs: a warning above, an error above
_UNSCORED_OPEN_SECONDS = 4 * 3600


def check_clock(results: ResultSet) -> Complaints:
    """Time stamps are milliseconds of days since 2018, and the clock starts when initialisation is over."""
    for log in results.logs:
        may_be_fraction = not is_ours(log)
        wrong = next(filter(None, (_wrong_stamp(log, event, may_be_fraction) for event in log.events)), None)
        if wrong is not None:
            yield wrong
        else:
            yield from _unscored(log)


def check_overlap(results: ResultSet) -> Complaints:
    """No run started before the one before it had stopped."""
    runs = []
    for log in filter(has_plausible_stamps, results.logs):
        start, stop = log.first("run_start"), log.first("run_stop")
        if start is not None and stop is not None:
            runs.append((start.time_ms, stop.time_ms, start.line, log))
    runs.sort(key=lambda run: run[:3])
    pairs = list(itertools.pairwise(runs))
    overlaps = [(before, after) for before, after in pairs if after[0] < before[1]]
    usual = Outcome.WARN if _FEW_OVERLAPS * len(overlaps) < len(pairs) else Outcome.NOTE
    for (_, stopped, _, before), (started, _, line, log) in overlaps:
        text = f"{log.path.name}: line {line}: run_start lies {(stopped - started) / 1000:.4g} s before the run_stop"
        are_ours = is_ours(log) and is_ours(before)
        is_wrong = are_ours and not are_apart(log, before)
        text += f" of {before.path.name}" + ("" if is_wrong else "; several machines side by side?")
        outcome = Outcome.ERROR if is_wrong else Outcome.NOTE if are_ours else usual
        yield Complaint(outcome, text, _ONE_AT_A_TIME if is_wrong else "")


def are_apart(one: Log, other: Log) -> bool:
    """Whether two runs name their machines, and none in common."""
    hosts, others = (log.value("hosts") for log in (one, other))
    if not isinstance(hosts, list) or not isinstance(others, list) or not hosts or not others:
        return False
    return set(map(str, hosts)).isdisjoint(map(str, others))


def has_plausible_stamps(log: Log) -> bool:
    """Whether the times of a log can be compared at all."""
    latest = _latest_ms()
    return all(_FIRST_MS <= event.time_ms <= latest for event in log.events)


def _latest_ms() -> float:
    return time.time() * 1000 + _DAY_MS


def _wrong_stamp(log: Log, event: Event, may_be_fraction: bool) -> Complaint | None:
    stamp = json.loads(event.text).get("time_ms")
    problem = ""
    if isinstance(stamp, bool) or not isinstance(stamp, int | float) or not math.isfinite(event.time_ms):
        problem = "is not a plain number"
    elif stamp < 0:
        problem = "is negative"
    elif not _FIRST_MS <= stamp <= _latest_ms():
        units = [name for name, per_ms in _UNITS.items() if _FIRST_MS <= stamp / per_ms <= _latest_ms()]
        when = "is before 2018, when MLPerf began" if stamp < _FIRST_MS else "is in the future"
        problem = f"looks like {units[0]}, not milliseconds" if units else when
    elif not may_be_fraction and stamp != int(stamp):
        problem = "is not a whole number of milliseconds"
    return error(log, f"line {event.line}: {event.key}: time_ms {stamp!r:.40} {problem}", _MS) if problem else None


def _unscored(log: Log) -> Complaints:
    """Time between init_stop and run_start belongs neither to initialisation nor to the result."""
    stop, start = log.first("init_stop"), log.first("run_start")
    if stop is None or start is None:
        return
    seconds = (start.time_ms - stop.time_ms) / 1000
    unusual, wrong = _UNSCORED_SECONDS[is_ours(log)]
    if not is_ours(log) and log.value("submission_division") == "open":
        wrong = _UNSCORED_OPEN_SECONDS
    if seconds > unusual:
        text = f"{log.path.name}: line {start.line}: run_start comes {seconds:.4g} s after init_stop"
        yield Complaint(Outcome.ERROR if seconds > wrong else Outcome.WARN, text, _TIMED if seconds > wrong else "")
