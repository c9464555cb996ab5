"""What every check looks at: the logs of one system with its description, and how a check words an error.

Where the files lie that a run writes beside its log: ``config.json``, ``metrics.jsonl`` and ``summary.json``.

A LOGDIR has ``result_0.txt`` and ``run_0/config.json``. In a tree they are ``results/<system>/bert/result_0.txt`` and
``results/<system>/run_0.config.json``: the official checkers take every folder in ``results/<system>`` for a benchmark
and every file beside the logs for a mistake, but do not look at files there.

A log as the checks of time, evaluations and copies see it: its evaluations in order, and what was configured.

The numbers of one run, from the stamps of its log: speed, samples to the target, time to train.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from mlbert.mlperf.findings import Complaint, Complaints, Outcome
from mlbert.mlperf.logs import Event, Log
from mlbert.mlperf.rules import TARGET_MLM_ACCURACY

_LARGEST = int(sys.float_info.max)

# Rules that several checks name.
LOG_FORMAT = "log format: every line is a JSON object with metadata, without which official tools crash"
ONE_SETTING = "rules: ten runs of one system, code and set of hyper-parameters"
SAMPLE_COUNTS = "rules, BERT: epoch_num is the number of training samples so far"
OWN_FORM = "this code's own logs"


@dataclass(frozen=True)
class ResultSet:
    """The logs of one system, in the order of their names."""

    logs: Sequence[Log]
    system: Mapping[str, Any] | None = None  # systems/<system>.json; None outside a tree, as is the next but one
    division: str | None = None  # that the user named
    tree: Path | None = None  # its folder, with its history if it has one

    @property
    def system_file(self) -> Path | None:
        """systems/<system>.json beside the logs' results/<system>/bert; None outside a tree."""
        folders = self.logs[0].path.parents
        if self.system is None or len(folders) < 4:
            return None
        return folders[3] / "systems" / f"{folders[1].name}.json"

    @property
    def wanted_division(self) -> object:
        """What every log should say: the user's word, else the system's, else the first log's."""
        if self.division is not None:
            return self.division
        if self.system is not None:
            return self.system.get("division")
        return self.logs[0].value("submission_division")


Check = Callable[[ResultSet], Complaints]


def is_ours(log: Log) -> bool:
    """Whether this code wrote a log: it tells its recipe or its configuration, or a call in this code wrote a line."""
    return log.is_of_this_code


def error(log: Log, text: str, rule: str, event: Event | None = None) -> Complaint:
    """An error in one log, at the line of an event."""
    return Complaint(Outcome.ERROR, where(log, event) + text, rule)


def where(log: Log, event: Event | None = None) -> str:
    """How a complaint begins: the file, and the line of an event."""
    return f"{log.path.name}: " + (f"line {event.line}: " if event else "")


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a plain, finite number that fits a float; true and false are none."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= _LARGEST
    return isinstance(value, float) and math.isfinite(value)


NAMES = ("config.json", "metrics.jsonl", "summary.json")
_LOG_NAME = re.compile(r"result_(.+)\.txt")


def run_file(log: Path, name: str) -> Path | None:
    """The file of a log's run, ``name`` being one of `NAMES`; ``None`` where there is none."""
    match = _LOG_NAME.fullmatch(log.name)
    if match is None:
        return None
    places = (log.parent / f"run_{match[1]}" / name, log.parent.parent / f"run_{match[1]}.{name}")
    return next((place for place in places if place.is_file()), None)


class LoggedEvaluation(NamedTuple):
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


def evaluations_of(log: Log) -> list[LoggedEvaluation]:
    """The evaluations whose samples and accuracy are numbers; what several ranks logged alike counts once."""
    found: list[LoggedEvaluation] = []
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
                    found.append(LoggedEvaluation(event, samples, event.value, start, stop, []))
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
