"""Whether caches were cleared for each run: before it, not long before, and with no other run between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlbert.mlperf.checks.clock import are_apart
from mlbert.mlperf.findings import Complaint, Complaints, Outcome
from mlbert.mlperf.logs import Event, Log
from mlbert.mlperf.result_set import ResultSet, error, is_ours, where

_CACHES = "rules: caches are cleared before a run"
_CLEAR = "cache_clear"
_NO = ("false", "no", "0", "0.0")
_FRESH_SECONDS = 600  # published logs: up to 40

_Run = tuple[Log, Event | None, Event | None]  # with its run_start and run_stop


def check_caches(results: ResultSet) -> Complaints:
    """Caches were cleared before each run, and nothing lies between."""
    is_closed = results.wanted_division == "closed"
    runs = [(log, log.first("run_start"), log.first("run_stop")) for log in results.logs]
    for log in results.logs:
        if is_ours(log) and not log.all(_CLEAR):  # of others compliance_checker tells
            yield error(log, f"{_CLEAR} is missing", _CACHES)
        yield from _denied(log, is_closed or (is_ours(log) and results.system is not None))
        yield from _late(log)
        event, start = max(log.all(_CLEAR), key=lambda event: event.time_ms, default=None), log.first("init_start")
        if event is not None and start is not None:
            yield from _early(log, event, start)
            yield from _before_another(log, event, start, runs)
    yield from _unanswered(results.logs)


def _denied(log: Log, is_strict: bool) -> Iterable[Complaint]:
    for event in log.all(_CLEAR):
        said = str(event.value).strip().casefold()
        if said in _NO:
            text = f"{where(log, event)}{_CLEAR} is {said}"
            yield Complaint(Outcome.ERROR if is_strict else Outcome.WARN, text, _CACHES)


def _late(log: Log) -> Iterable[Complaint]:
    late_from = [log.first(key) for key in (("init_start", "run_start") if is_ours(log) else ("run_start",))]
    for event in log.all(_CLEAR):
        first = next((first for first in late_from if first is not None and first.line < event.line), None)
        if first is not None:
            yield error(log, f"{_CLEAR} comes after {first.key} (line {first.line})", _CACHES, event)


def _early(log: Log, event: Event, start: Event) -> Iterable[Complaint]:
    """A machine fills its caches within minutes."""
    seconds = (start.time_ms - event.time_ms) / 1000
    if seconds > _FRESH_SECONDS:
        text = f"{where(log, event)}{_CLEAR} comes {seconds:.4g} s before init_start (line {start.line})"
        yield Complaint(_severity(log), text, _CACHES)


def _before_another(log: Log, event: Event, start: Event, runs: Sequence[_Run]) -> Iterable[Complaint]:
    """Another run fills the caches; others run on several machines at once, so of theirs only a whole run tells."""
    for other, begun, ended in runs:
        if other is log or begun is None or ended is None:
            continue
        since = ended if is_ours(log) else begun
        if event.time_ms < since.time_ms and ended.time_ms <= start.time_ms and not are_apart(log, other):
            text = f"{where(log, event)}{_CLEAR} comes before the run_stop of {other.path.name} (line {ended.line})"
            yield Complaint(_severity(log), text, _CACHES)
            return


def _unanswered(logs: Sequence[Log]) -> Iterable[Complaint]:
    """A log that leaves open what others say."""
    if not any(event.value is True for log in logs for event in log.all(_CLEAR)):
        return
    for log in logs:
        events = log.all(_CLEAR)
        if events and all(event.value is None for event in events):
            yield Complaint(Outcome.WARN, f"{where(log, events[0])}{_CLEAR} is null, in other logs true", _CACHES)


def _severity(log: Log) -> Outcome:
    return Outcome.ERROR if is_ours(log) else Outcome.WARN
