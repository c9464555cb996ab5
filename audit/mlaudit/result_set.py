"""The logs of one system as the checks see them: evaluations, settings, speed,
time to train and run files.

A LOGDIR has ``result_0.txt`` and ``run_0/config.json``. In a tree these are
``results/<system>/bert/result_0.txt`` and ``results/<system>/run_0.config.json``: the official
checkers take every folder in ``results/<system>`` as a benchmark and reject unknown files next to
the logs, but ignore files in ``results/<system>``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mlaudit.findings import Complaints
from mlaudit.keys import ELAPSED
from mlaudit.logs import PROGRESS, Event, Log, is_number
from mlaudit.round_rules import Round
from mlaudit.rounds import LATEST
from mlaudit.rules import BENCHMARK, olympic_mean
from mlbert.host.errors import UserError
from mlbert.host.files import open_plain
from mlbert.host.json_files import read_json

# Rules that several checks refer to.
LOG_FORMAT = (
    "log format: every line is a JSON object with metadata, without which official tools crash"
)
ONE_SETTING = "rules: ten runs of one system, code and set of hyper-parameters"
SAMPLE_COUNTS = "rules, BERT: epoch_num is the number of training samples so far"
OWN_FORM = "this code's own logs"
NAMES = ("config.json", "metrics.jsonl", "summary.json")
_LOG_NAME = re.compile(r"result_(.+)\.txt")

_MS = 1000.0  # per second
_MOST_SECONDS = 1e9  # between two events, 30 years
_SMALLEST_STEP = 0.5  # nominal batches that a step trains at least
FEWEST_FOR_MEAN = 3  # runs of an olympic mean
_MOST_EPOCHS = 100  # between two evaluations, of any benchmark


@dataclass(frozen=True)
class ResultSet:
    """The logs of one system, in order of their names."""

    logs: Sequence[Log]
    system: Mapping[str, Any] | None = None  # systems/<system>.json (None outside a tree)
    division: str | None = None  # the division given by the user
    tree: Path | None = None  # the tree, with its git history if it has one (None outside a tree)
    benchmark: str = BENCHMARK  # by whose rules the logs are judged
    round: Round = LATEST  # of the benchmark

    @property
    def is_bert(self) -> bool:
        """Return True if the logs are judged by the rules of BERT."""
        return self.benchmark == BENCHMARK

    @property
    def system_file(self) -> Path | None:
        """Return the path of systems/<system>.json, or None outside a tree."""
        folders = self.logs[0].path.parents
        if self.system is None or len(folders) < 4:
            return None
        return folders[3] / "systems" / f"{folders[1].name}.json"

    @property
    def own_logs(self) -> list[Log]:
        """Return the logs of this code."""
        return [log for log in self.logs if log.is_ours]

    @property
    def wanted_division(self) -> object:
        """Return the division expected in all logs: the user's, else the system's,
        else that of the first log.
        """
        if self.division is not None:
            return self.division
        if self.system is not None:
            return self.system.get("division")
        return self.logs[0].value("submission_division")


Check = Callable[[ResultSet], Complaints]


def run_file(log: Path, name: str) -> Path | None:
    """Return the path of a file of the log's run, readable or not, or None if it does not exist.

    ``name`` is one of `NAMES`.
    """
    match = _LOG_NAME.fullmatch(log.name)
    if match is None:
        return None
    places = (log.parent / f"run_{match[1]}" / name, log.parent.parent / f"run_{match[1]}.{name}")
    return next((place for place in places if _exists(place)), None)


def _exists(path: Path) -> bool:
    """Return True unless there is nothing at the path.

    Links to nothing and forbidden folders count as existing.
    """
    try:
        path.lstat()
    except OSError as error:
        return not isinstance(error, FileNotFoundError | NotADirectoryError)
    return True


def unreadable_files(log: Path) -> list[str]:
    """Return a sentence for each file of the log's run that exists and cannot be read."""
    notes = []
    for path in filter(None, (run_file(log, name) for name in NAMES)):
        try:
            open_plain(path).close()
        except OSError as error:
            notes.append(f"{path.parent.name}/{path.name} cannot be read ({error.strerror}).")
    return notes


class LoggedEvaluation(NamedTuple):
    """One eval_accuracy, with the preceding eval_start and eval_stop and the repeated lines that
    follow it.
    """

    event: Event
    samples: float  # trained so far
    accuracy: float
    start: Event | None
    stop: Event | None
    again: list[Event]

    @property
    def where(self) -> str:
        """Return the line of the accuracy, for messages."""
        return f"line {self.event.line}"


def quality_of(event: Event) -> float | None:
    """Return the number in an eval_accuracy, or None if it has none.

    Mask R-CNN logs a mapping of two, of which the first counts here.
    """
    value = event.value
    if isinstance(value, Mapping):
        value = next(iter(value.values()), None)
    return value if is_number(value) else None


def evaluations_of(log: Log) -> list[LoggedEvaluation]:
    """Return the evaluations with numeric samples and accuracy,
    merging equal lines of several ranks.

    If the lines name several metrics, as those of Stable Diffusion do,
    only the first metric counts.
    """
    found: list[LoggedEvaluation] = []
    start = stop = None
    first = log.first("eval_accuracy")
    metric = _metric_of(first) if first is not None else None
    for event in log.events:
        if event.key == "eval_start":
            start = event
        elif event.key == "eval_stop":
            stop = event
        elif event.key == "eval_accuracy" and _metric_of(event) == metric:
            samples = event.samples
            quality = quality_of(event)
            if samples is not None and quality is not None:
                if found and (found[-1].samples, found[-1].accuracy) == (samples, quality):
                    found[-1].again.append(event)
                else:
                    found.append(LoggedEvaluation(event, samples, quality, start, stop, []))
            start = stop = None
    return found


def _metric_of(event: Event) -> object:
    return (event.metadata or {}).get("metric")


def significant_digits(value: float) -> int:
    """Return the number of digits of a number, without leading and trailing zeros."""
    return len(repr(abs(value)).partition("e")[0].replace(".", "").strip("0")) if value else 0


def target_of(log: Log, judged: Round = LATEST) -> float | None:
    """Return the accuracy that ends a run, or None if it is not known.

    It is the configured one, but in the closed division at least that of the round's rules.
    """
    configured = log.setting("TARGET_MLM_ACCURACY")
    if log.value("submission_division") == "closed":
        required = judged.target(log.value("global_batch_size"))
        return max(configured, required) if is_number(configured) else required
    return configured if is_number(configured) else None


def counts_samples(log: Log) -> bool:
    """Return False if the evaluations' `epoch_num` is not a number of samples.

    Other programs log an epoch there, a fraction of one, or the number of the evaluation: it grows
    by at most one from one evaluation to the next, in logs of other benchmarks by at most
    `_MOST_EPOCHS`.
    """
    evaluations = evaluations_of(log)
    if any(_counts_steps(one.event) for one in evaluations):
        return False
    points = [one.samples for one in evaluations]
    most = 1 if log.benchmark == BENCHMARK else _MOST_EPOCHS
    if len(points) == 1:
        batch = log.value("global_batch_size")
        is_step = not is_number(batch) or points[0] >= _SMALLEST_STEP * batch
        return points[0] > most and is_step
    return any(after - before > most for before, after in itertools.pairwise(points))


def _counts_steps(event: Event) -> bool:
    counted = [key for key in PROGRESS if key in (event.metadata or {})]
    return counted == ["step_num"]


def train_samples_event(log: Log) -> Event | None:
    """Return the line with the samples that a run trained on, or None if it has none.

    Other programs log `train_samples` before training, too, as a planned number or as the size of
    the data set. So the line counts only after the last evaluation.
    """
    last = next(reversed(log.all("eval_accuracy")), log.first("run_start"))
    if last is None:
        return None
    after = (event for event in log.all("train_samples") if event.line > last.line)
    return next(after, None)


def samples_trained(log: Log) -> float | None:
    """Return the samples that a run trained on, earlier parts included,
    or None if they are not logged.
    """
    event = train_samples_event(log)
    # Of other benchmarks it is the size of the data set.
    is_trained = log.benchmark == BENCHMARK
    if is_trained and event is not None and is_number(event.value):
        return event.value
    if not counts_samples(log):
        return None
    return max(one.samples for one in evaluations_of(log))


def samples_to_target(log: Log) -> float | None:
    """Return the training samples at which the target was reached,
    or None if it was not or is not logged.
    """
    found = evaluations_of(log)
    if log.status != "success" or not found:
        return None
    return found[-1].samples if counts_samples(log) else samples_trained(log)


def samples_before(log: Log) -> float | None:
    """Return the samples trained in earlier parts of the run,
    or None if a resumed log does not say.
    """
    if not log.is_continued:
        return 0.0
    start = log.first("epoch_start")
    return start.samples if start is not None else None


def seconds_before(log: Log) -> float | None:
    """Return the time to train in earlier parts of the run, up to the checkpoint,
    or None if it is unknown.

    A resumed log says it with its step; older ones do not,
    so there it follows from the run's summary.
    """
    if not log.is_continued:
        return 0.0
    event = log.first("resumed_from_step")
    logged = (event.metadata or {}).get(ELAPSED) if event is not None else None
    if is_number(logged) and logged >= 0:
        return logged
    here = seconds_of_part(log)
    total = _summary(log).get("seconds_to_train")
    if here is None or not is_number(total):
        return None
    return max(0.0, total - here)


def _summary(log: Log) -> Mapping[str, Any]:
    """Return the summary of the log's run, empty if it is missing or cannot be read."""
    path = run_file(log.path, "summary.json")
    try:
        return read_json(path, "") if path is not None else {}
    except UserError:
        return {}


def seconds_between(first: Event | None, second: Event | None) -> float | None:
    """Return the seconds between two events, or None if one is missing,
    or they are negative or more than 30 years.
    """
    if first is None or second is None:
        return None
    seconds = (second.time_ms - first.time_ms) / _MS
    return seconds if 0 <= seconds < _MOST_SECONDS else None


def seconds_of_part(log: Log) -> float | None:
    """Return the time from run_start to run_stop, without earlier parts of the run, or None."""
    return seconds_between(log.first("run_start"), log.first("run_stop"))


def seconds_to_train(log: Log) -> float | None:
    """Return the time from run_start to run_stop, or None if the log does not say.

    That of a resumed run includes its earlier parts up to their checkpoints, as in its summary.
    """
    before = seconds_before(log)
    here = seconds_of_part(log)
    return before + here if before is not None and here is not None else None


def reached_target(log: Log) -> bool:
    """Return True if the run reached its target and its clock did not go backward."""
    return log.status == "success" and seconds_of_part(log) is not None


def is_interrupted(log: Log) -> bool:
    """Return True if the run, or this part of it,
    was stopped before it reached its target or a limit.
    """
    if log.first("run_start") is None or reached_target(log):
        return False
    # This code ends the epoch at the target and at a limit.
    return log.first("run_stop") is None or (log.is_ours and log.first("epoch_stop") is None)


def minutes_to_train(log: Log) -> float | None:
    """Return the time to train in minutes, or None if the run did not reach the target or its time
    is unknown.
    """
    seconds = seconds_to_train(log)
    return seconds / 60 if reached_target(log) and seconds is not None else None


def olympic_seconds(logs: Sequence[Log]) -> float | None:
    """Return the olympic mean of the times to train:
    infinite if two or more runs did not reach the target.

    None if there are fewer than three runs, or the time of one that reached the target is unknown.
    """
    if len(logs) < FEWEST_FOR_MEAN:
        return None
    seconds = [seconds_to_train(log) if reached_target(log) else math.inf for log in logs]
    known = [value for value in seconds if value is not None]
    return olympic_mean(known) if len(known) == len(seconds) else None


def samples_per_second(log: Log) -> float | None:
    """Return the training samples per second outside evaluations,
    or None if the log lacks time stamps.

    That of a resumed run is the speed of its last part. Without eval_start in the log, evaluations
    count as training time; see `stamps_evaluations`.
    """
    start = log.first("run_start")
    before = samples_before(log)
    if start is None or before is None:
        return None
    begin = start.time_ms
    seconds = 0.0
    samples = before
    end_key = "eval_start" if stamps_evaluations(log) else "eval_accuracy"
    for event in log.events:
        if event.key == end_key and (count := event.samples) is not None:
            seconds += (event.time_ms - begin) / _MS
            samples = count
            begin = event.time_ms
        elif event.key == "eval_stop":
            begin = event.time_ms
    if not counts_samples(log):
        samples = samples_trained(log) or before
    return (samples - before) / seconds if seconds > 0 and samples > before else None


def stamps_evaluations(log: Log) -> bool:
    """Return True if a log has the start times of evaluations."""
    return log.first("eval_start") is not None
