"""The numbers of one run, from the stamps of its log: speed, samples to the target, time to train."""

from __future__ import annotations

from mlbert.mlperf.logs import Log
from mlbert.mlperf.run_view import evaluations_of, samples_before, samples_of

_MS = 1000.0


def samples_per_second(log: Log) -> float | None:
    """Training samples a second between evaluations; ``None`` where the log lacks stamps. In a log without eval_start
    the evaluations count as training, see `stamps_evaluations`."""
    start, before = log.first("run_start"), samples_before(log)
    if start is None or before is None:
        return None
    begin, seconds, samples = start.time_ms, 0.0, before
    end_key = "eval_start" if stamps_evaluations(log) else "eval_accuracy"
    for event in log.events:
        if event.key == end_key and (count := samples_of(event)) is not None:
            seconds += (event.time_ms - begin) / _MS
            samples, begin = count, event.time_ms
        elif event.key == "eval_stop":
            begin = event.time_ms
    return (samples - before) / seconds if seconds > 0 and samples > before else None


def stamps_evaluations(log: Log) -> bool:
    """Whether a log tells when evaluations began."""
    return log.first("eval_start") is not None


def samples_to_target(log: Log) -> float | None:
    """Training samples when the target was reached; ``None`` for a run that did not, or whose log does not tell."""
    found = evaluations_of(log)
    return found[-1].samples if log.status == "success" and found else None


def minutes_to_train(log: Log) -> float | None:
    """Minutes from run_start to run_stop; ``None`` for a run that did not reach the target."""
    return log.minutes if log.status == "success" else None
