"""How runs end, and whether time runs forward between run_start and run_stop."""

from __future__ import annotations

import itertools

from mlbert.mlperf.findings import Complaint, Complaints, Outcome
from mlbert.mlperf.logs import Event, Log
from mlbert.mlperf.result_set import ResultSet, error, is_ours
from mlbert.mlperf.rules import NUM_RESULT_FILES

_MAX_CLOCK_SKEW_MS = 1000
_TEN_RUNS = "rules: ten runs, the fastest and the slowest dropped; one may miss the target, two may not"
_TIMED = "rules: the time from run_start to run_stop is the result, without a pause"
_CONTINUED = "rules: a run starts from the reference checkpoint and is timed as a whole"


def check_status(results: ResultSet) -> Complaints:
    """Every run ended in success; of ten, one that did not is dropped by the scoring."""
    bad = [log for log in results.logs if log.status != "success"]
    is_tolerated = len(bad) == 1 and len(results.logs) == NUM_RESULT_FILES
    for log in bad:
        stop = log.first("run_stop")
        where = "" if stop is None else f"line {stop.line}: "
        outcome = Outcome.WARN if is_tolerated else Outcome.ERROR
        yield Complaint(outcome, f"{log.path.name}: {where}run_stop status is {log.status!r}", _TEN_RUNS)


def check_time(results: ResultSet) -> Complaints:
    """Time stamps never go back, run_stop is after run_start, and no run was continued from a checkpoint."""
    for log in results.logs:
        for event in log.all("resumed_from_step")[:1]:
            outcome = Outcome.WARN if results.system is None else Outcome.ERROR
            text = f"{log.path.name}: line {event.line}: continued from a checkpoint, so its time is no result"
            yield Complaint(outcome, text, _CONTINUED)
        complaints = [_goes_back(log, *pair) for pair in itertools.pairwise(log.events) if _is_back(*pair)]
        yield from sorted(complaints, key=lambda complaint: complaint.outcome is not Outcome.ERROR)[:1]
        stop = log.first("run_stop")
        if stop is not None and log.minutes is not None and log.minutes <= 0:
            yield error(log, f"line {stop.line}: run_stop is not after run_start", _TIMED)


def _is_back(before: Event, after: Event) -> bool:
    return after.time_ms < before.time_ms


def _goes_back(log: Log, before: Event, after: Event) -> Complaint:
    """An error in the timed part; outside, several processes may write one after the other what they did before."""
    text = f"{log.path.name}: line {after.line}: time goes back at {after.key}"
    start, stop = log.first("run_start"), log.first("run_stop")
    is_timed = start is not None and start.line <= after.line and (stop is None or after.line <= stop.line)
    if is_ours(log) or (is_timed and before.time_ms - after.time_ms > _MAX_CLOCK_SKEW_MS):
        return Complaint(Outcome.ERROR, text, _TIMED)
    return Complaint(Outcome.WARN if is_timed else Outcome.NOTE, text)
