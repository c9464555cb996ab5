"""Check that caches were cleared shortly before each run, with no other run in between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlaudit.checks.pace import are_apart
from mlaudit.findings import Complaint, Complaints
from mlaudit.logs import Event, Log
from mlaudit.result_set import ResultSet

_CACHES = "rules: caches are cleared before a run"
_CLEAR = "cache_clear"
_NO = ("false", "no", "0", "0.0")
_FRESH_SECONDS = 600  # up to 40 in published logs

_Run = tuple[Log, Event | None, Event | None]  # (log, run_start, run_stop)


def check_caches(results: ResultSet) -> Complaints:
    """Caches were cleared shortly before each run, with no other run in between."""
    is_closed = results.wanted_division == "closed"
    runs = [(log, log.first("run_start"), log.first("run_stop")) for log in results.logs]
    for log in results.logs:
        if log.is_ours and not log.all(_CLEAR):  # compliance_checker reports it for other programs
            yield log.error(f"{_CLEAR} is missing", _CACHES)
        yield from _denied(log, is_closed or (log.is_ours and results.system is not None))
        yield from _late(log)
        event = max(log.all(_CLEAR), key=lambda event: event.time_ms, default=None)
        start = log.first("init_start")
        if event is not None and start is not None:
            yield from _early(log, event, start)
            yield from _before_another(log, event, start, runs)
    yield from _unanswered(results.logs)


def _denied(log: Log, is_strict: bool) -> Iterable[Complaint]:
    for event in log.all(_CLEAR):
        value = str(event.value).strip().casefold()
        if value in _NO:
            yield log.error_if(is_strict, f"{_CLEAR} is {value}", _CACHES, event)


def _late(log: Log) -> Iterable[Complaint]:
    late_from = [log.first("run_start")]
    if log.is_ours:
        late_from.insert(0, log.first("init_start"))
    for event in log.all(_CLEAR):
        first = next(
            (first for first in late_from if first is not None and first.line < event.line), None
        )
        if first is not None:
            yield log.error(f"{_CLEAR} comes after {first.key} (line {first.line})", _CACHES, event)


def _early(log: Log, event: Event, start: Event) -> Iterable[Complaint]:
    """Check that caches were cleared recently: a machine fills them within minutes."""
    seconds = (start.time_ms - event.time_ms) / 1000
    if seconds > _FRESH_SECONDS:
        text = f"{_CLEAR} comes {seconds:.4g} s before init_start (line {start.line})"
        yield log.error_if(log.is_ours, text, _CACHES, event)


def _before_another(
    log: Log, event: Event, start: Event, runs: Sequence[_Run]
) -> Iterable[Complaint]:
    """Find another run after the clearing.

    Other programs use several machines, so only complete runs count there.
    """
    for other, begun, ended in runs:
        if other is log or begun is None or ended is None:
            continue
        since = ended if log.is_ours else begun
        if (
            event.time_ms < since.time_ms
            and ended.time_ms <= start.time_ms
            and not are_apart(log, other)
        ):
            text = f"{_CLEAR} comes before the run_stop of {other.path.name} (line {ended.line})"
            yield log.error_if(log.is_ours, text, _CACHES, event)
            return


def _unanswered(logs: Sequence[Log]) -> Iterable[Complaint]:
    """Find logs where cache_clear is null although other logs say true."""
    if not any(event.value is True for log in logs for event in log.all(_CLEAR)):
        return
    for log in logs:
        events = log.all(_CLEAR)
        if events and all(event.value is None for event in events):
            yield log.warning(f"{_CLEAR} is null, in other logs true", _CACHES, events[0])
