"""A log as the checks of time, evaluations and copies see it: its evaluations in order, and what was configured."""

from __future__ import annotations

from typing import Any, NamedTuple

from mlbert.mlperf.logs import Event, Log
from mlbert.mlperf.result_set import is_number
from mlbert.mlperf.rules import TARGET_MLM_ACCURACY


class Evaluation(NamedTuple):
    """One eval_accuracy with the eval_start and eval_stop since the one before, and the same told again behind it."""

    event: Event
    samples: float  # trained so far
    accuracy: float
    start: Event | None
    stop: Event | None
    again: list[Event]

    @property
    def where(self) -> str:
        """The line that tells the accuracy."""
        return f"line {self.event.line}"


def evaluations_of(log: Log) -> list[Evaluation]:
    """The evaluations whose samples and accuracy are numbers; what several ranks logged alike counts once."""
    found: list[Evaluation] = []
    start = stop = None
    for event in log.events:
        if event.key == "eval_start":
            start = event
        elif event.key == "eval_stop":
            stop = event
        elif event.key == "eval_accuracy":
            samples = samples_of(event)
            if samples is not None and is_number(event.value):
                if found and (found[-1].samples, found[-1].accuracy) == (samples, event.value):
                    found[-1].again.append(event)
                else:
                    found.append(Evaluation(event, samples, event.value, start, stop, []))
            start = stop = None
    return found


def samples_of(event: Event) -> float | None:
    """What an event says of the samples trained so far, if it is a number."""
    samples = (event.metadata or {}).get("epoch_num")
    return samples if is_number(samples) else None


def significant_digits(value: float) -> int:
    """How many digits a number is told with, without leading zeros; an infinite or missing one has none."""
    return len(repr(abs(value)).partition("e")[0].replace(".", "").strip("0")) if value else 0


def setting(log: Log, name: str) -> Any:
    """A value of this code's resolved `configuration`; ``None`` where the log has none."""
    configuration = log.value("configuration")
    entry = configuration.get(name) if isinstance(configuration, dict) else None
    return entry.get("value") if isinstance(entry, dict) else None


def is_continued(log: Log) -> bool:
    """Whether the log is only the later part of a run."""
    return log.first("resumed_from_step") is not None


def samples_before(log: Log) -> float | None:
    """Return the samples that earlier parts of the run trained; None if a continued log does not say."""
    if not is_continued(log):
        return 0.0
    start = log.first("epoch_start")
    return samples_of(start) if start is not None else None


def target_of(log: Log) -> float | None:
    """The accuracy that ends a run: the rules' in closed, the configured one of this code's logs, else unknown."""
    configured = setting(log, "TARGET_MLM_ACCURACY")
    if log.value("submission_division") == "closed":
        return max(configured, TARGET_MLM_ACCURACY) if is_number(configured) else TARGET_MLM_ACCURACY
    return configured if is_number(configured) else None
