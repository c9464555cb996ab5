"""Read the logs and run files behind the given paths, by system, with each run's evaluations, speeds and times."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mlbert.host.errors import UserError
from mlbert.host.files import read_plain
from mlbert.host.json_files import parse_json
from mlbert.mlperf.logs import Event, Log, is_number, read_log
from mlbert.mlperf.metrics import read_points
from mlbert.mlperf.result_set import evaluations_of, run_file, samples_to_target
from mlbert.mlperf.rules import BENCHMARK, TARGET_MLM_ACCURACY
from mlbert.mlperf.scratch_copy import RESULT_PATTERN

_PREDICTORS = (
    "most_frequent",
    "bigram",
)  # in data/baselines.json; the bigram model is the better one


@dataclass(frozen=True)
class RunSource:
    """A log and the other files of its run."""

    log: Log
    summary: dict[str, Any]  # summary.json; empty if missing
    metrics: list[dict[str, Any]]  # points of metrics.jsonl


@dataclass(frozen=True)
class System:
    """The logs of one system or version, by number."""

    name: str
    folder: Path
    sources: Sequence[RunSource]
    facts: dict[str, Any] | None = None  # systems/<system>.json
    tree: Path | None = None  # tree that contains the description
    baselines: dict[str, float] = field(default_factory=dict)  # predictor to accuracy
    notes: Sequence[str] = ()  # files that could not be read


def read_systems(paths: Sequence[Path]) -> list[System]:
    """Read the systems behind paths: logs, LOGDIRs, systems' results, folders of those, or trees.

    Raises:
        UserError: a path does not exist, or contains no log.
    """
    groups: dict[Path, list[Path]] = {}
    for path in paths:
        if not path.exists():
            raise UserError(
                "file.missing",
                path,
                "does not exist",
                "Name a folder with result_*.txt, a tree, or logs",
            )
        for log in _logs(path):
            known = groups.setdefault(log.parent, [])
            if log not in known:
                known.append(log)
    names = _names(list(groups))
    return [_read_system(names[folder], folder, logs) for folder, logs in groups.items()]


def _logs(path: Path) -> list[Path]:
    path = path.resolve()
    if path.is_file():
        return [path]
    patterns = (RESULT_PATTERN, f"{BENCHMARK}/{RESULT_PATTERN}", f"*/{BENCHMARK}/{RESULT_PATTERN}")
    for pattern in (*patterns, f"results/*/{BENCHMARK}/{RESULT_PATTERN}"):
        if found := sorted(path.glob(pattern), key=_by_number):
            return found
    reason = f"contains no {RESULT_PATTERN}"
    raise UserError(
        "log.missing", path, reason, "Name a LOGDIR, a system's results, a tree, or logs"
    )


def _by_number(log: Path) -> tuple[str, int, str]:
    number = log.stem.removeprefix("result_")
    return str(log.parent), int(number) if number.isdecimal() else 0, log.name


def _names(folders: list[Path]) -> dict[Path, str]:
    """Return a short name per folder: the system's, with as many parents as needed to make it unique."""
    parts = {f: (f.parent if f.name == BENCHMARK else f).parts for f in folders}
    for count in range(1, max(map(len, parts.values()), default=1) + 1):
        names = {folder: "/".join(words[-count:]) for folder, words in parts.items()}
        if len(set(names.values())) == len(names):
            return names
    return {folder: str(folder) for folder in folders}


def _read_system(name: str, folder: Path, logs: list[Path]) -> System:
    notes: list[str] = []
    sources = [_read_source(log, notes) for log in logs]
    facts, tree = None, None
    for place in _descriptions(folder, sources[0].log):
        if place.is_file():
            facts, tree = _read_object(place, notes) or None, place.parent.parent
            break
    baselines = _read_object(folder / "data" / "baselines.json", notes)
    accuracies = {predictor: baselines.get(f"{predictor}_accuracy") for predictor in _PREDICTORS}
    known = {
        name: float(value)
        for name, value in accuracies.items()
        if is_number(value) and 0 <= value <= 1
    }
    return System(name, folder, sources, facts, tree, known, tuple(notes))


def _descriptions(folder: Path, log: Log) -> Iterator[Path]:
    """Yield possible locations of a system's description: in its tree, or next to the LOGDIR's logs."""
    if folder.name == BENCHMARK:
        yield folder.parents[2] / "systems" / f"{folder.parent.name}.json"
    platform = log.value("submission_platform")
    if isinstance(platform, str) and platform == Path(platform).name:
        yield folder / "systems" / f"{platform}.json"


def _read_source(path: Path, notes: list[str]) -> RunSource:
    log = read_log(path)
    notes += (
        [f"{path.name}: {len(log.broken)} lines of the log cannot be read"] if log.broken else []
    )
    summary, metrics = run_file(path, "summary.json"), run_file(path, "metrics.jsonl")
    return RunSource(
        log,
        _read_object(summary, notes) if summary else {},
        _read_points(metrics, notes) if metrics else [],
    )


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return a JSON object; empty if the file is missing, or damaged (then with a note)."""
    if not os.path.lexists(path):
        return {}
    try:
        value = parse_json(read_plain(path, ""), finite=False)
    except ValueError:  # includes UserError
        value = None
    if isinstance(value, dict):
        return value
    notes.append(f"{_place(path)} cannot be read and is ignored")
    return {}


def _read_points(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the points of metrics.jsonl; adds a note if some are damaged."""
    try:
        points, foreign = read_points(path)
    except UserError:
        notes.append(f"{_place(path)} cannot be read and is ignored")
        return []
    if foreign:
        notes.append(f"{_place(path)}: {foreign} lines cannot be read and are ignored")
    return points


def _place(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


_MOST, _MOST_SECONDS = 1e15, 1e9  # for a run's counts, and for its time
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class EvaluationPoint:
    """One evaluation."""

    samples: float  # trained on before it
    seconds: float  # from run_start to the result
    accuracy: float


@dataclass(frozen=True)
class Times:
    """The seconds of a run by part; all but ``untimed`` add up to its time to train.

    A log separates training from evaluation only if it has eval_start and eval_stop, and the time between steps only
    with the run's summary. Parts that cannot be separated count as training, and their field is None.
    """

    untimed: float  # from the log's first line to run_start
    start: float  # from run_start to the first block or epoch: opening the data
    training: float
    evaluation: float | None
    other: float | None  # neither of these; None if unknown


@dataclass(frozen=True)
class ReportedRun:
    """One run."""

    name: str  # the log's number, or its name
    status: str  # success, aborted, unfinished (no run_stop) or another status in the log
    target: float | None  # accuracy
    seconds: float | None  # from run_start to run_stop
    evaluations: Sequence[EvaluationPoint]
    speeds: Points  # (samples at the end, samples/s) per interval between evaluations
    times: Times | None
    source: RunSource

    @property
    def succeeded(self) -> bool:
        """True if its time counts: it reached the target, and the log records when."""
        return self.status == "success" and self.seconds is not None

    @property
    def score(self) -> float:
        """Seconds to train; infinite if it did not reach the target."""
        return self.seconds if self.succeeded and self.seconds is not None else math.inf

    @cached_property
    def samples(self) -> float | None:
        """Samples trained on."""
        logged = number(self.source.log.value("train_samples"))
        return (
            logged
            if logged is not None
            else max((e.samples for e in self.evaluations), default=None)
        )

    @cached_property
    def samples_to_target(self) -> float | None:
        """Samples before the evaluation that reached the target; None if no evaluation did."""
        return samples_to_target(self.source.log) if self.succeeded else None

    @cached_property
    def accuracy(self) -> float | None:
        """Accuracy of the last evaluation."""
        return self.evaluations[-1].accuracy if self.evaluations else None

    @cached_property
    def samples_per_second(self) -> float | None:
        """Average over the whole run, including evaluations, as time to train does."""
        if self.samples is None or not self.seconds:
            return None
        return self.samples / self.seconds

    def metric(self, name: str) -> Points:
        """Return (samples, value) of a quantity in metrics.jsonl at each log point."""
        steps = (line for line in self.source.metrics if line.get("kind") == "step")
        pairs = ((number(line.get("samples")), number(line.get(name))) for line in steps)
        return [
            (samples, value)
            for samples, value in pairs
            if samples is not None and value is not None
        ]


def number(value: object) -> float | None:
    """Return a number that a figure can show, or None."""
    return float(value) if is_number(value) and abs(value) < _MOST else None


def read_run(source: RunSource) -> ReportedRun:
    """Compute the numbers of a run."""
    log = source.log
    start, stop = log.first("run_start"), log.first("run_stop")
    seconds = None if stop is None else _between(start, stop)
    status = "unfinished" if log.events else "no MLPerf line"
    if stop is not None:
        status = str((stop.metadata or {}).get("status", "no status"))
    spans = _evaluation_spans(log)
    evaluations = _evaluations(log, start)
    return ReportedRun(
        name=log.path.stem.removeprefix("result_"),
        status=status,
        target=_target(source),
        seconds=seconds,
        evaluations=evaluations,
        speeds=_speeds(evaluations, spans, _to_first_step(log)),
        times=None if seconds is None else _times(source, seconds, spans),
        source=source,
    )


def _target(source: RunSource) -> float | None:
    """Return the target accuracy: our logs record it; other benchmark logs have the rules' target."""
    target = number(source.log.setting("TARGET_MLM_ACCURACY"))
    target = number(source.summary.get("target_accuracy")) if target is None else target
    if target is not None or source.log.first("configuration") is not None:
        return target
    return TARGET_MLM_ACCURACY if source.log.value("submission_benchmark") == BENCHMARK else None


def _between(first: Event | None, second: Event | None) -> float | None:
    """Return the seconds between two events; None if one is missing, negative or more than 30 years."""
    if first is None or second is None:
        return None
    seconds = (second.time_ms - first.time_ms) / 1000
    return seconds if 0 <= seconds < _MOST_SECONDS else None


def _evaluations(log: Log, start: Event | None) -> list[EvaluationPoint]:
    found = []
    for event in log.all("eval_accuracy"):
        samples, accuracy = number((event.metadata or {}).get("epoch_num")), number(event.value)
        seconds = _between(start, event)
        if samples is not None and accuracy is not None and seconds is not None:
            found.append(EvaluationPoint(samples, seconds, accuracy))
    return found


def _evaluation_spans(log: Log) -> list[tuple[float, float]]:
    """Return (begin, end) of each evaluation in seconds after run_start; empty unless every start has its stop."""
    start, found = log.first("run_start"), evaluations_of(log)
    ends = [(_between(start, one.start), _between(start, one.stop)) for one in found]
    spans = [
        (begin, end)
        for begin, end in ends
        if begin is not None and end is not None and begin <= end
    ]
    return spans if len(spans) == len(log.all("eval_accuracy")) else []


def _to_first_step(log: Log) -> float:
    """Return the seconds from run_start to the first block or epoch."""
    first = log.first("block_start") or log.first("epoch_start")
    return _between(log.first("run_start"), first) or 0.0


def _speeds(
    evaluations: Sequence[EvaluationPoint], spans: Points, begin: float
) -> list[tuple[float, float]]:
    """Return the samples per second of each interval, without evaluations if the log records their start and end."""
    spans = spans if len(spans) == len(evaluations) else []
    speeds = []
    before, since = 0.0, begin
    for index, evaluation in enumerate(evaluations):
        until, after = spans[index] if spans else (evaluation.seconds, evaluation.seconds)
        if until > since and evaluation.samples > before:
            speeds.append((evaluation.samples, (evaluation.samples - before) / (until - since)))
        before, since = evaluation.samples, after
    return speeds


def _times(source: RunSource, seconds: float, spans: Points) -> Times:
    log = source.log
    start = min(_to_first_step(log), seconds)
    evaluation = (
        min(math.fsum(end - begin for begin, end in spans), seconds - start) if spans else None
    )
    rest = seconds - start - (evaluation or 0.0)
    training = _training_seconds(source.summary)
    other = (
        rest - training
        if evaluation is not None and training is not None and training <= rest
        else None
    )
    first = min(log.events, key=lambda event: event.time_ms, default=None)
    untimed = _between(first, log.first("run_start")) or 0.0
    return Times(untimed, start, rest - (other or 0.0), evaluation, other)


def _training_seconds(summary: Mapping[str, Any]) -> float | None:
    """Return the seconds in training steps, from the summary's rate, which covers only these."""
    samples, rate = number(summary.get("samples")), number(summary.get("samples_per_second"))
    return samples / rate if samples is not None and rate else None


def thin(points: Points, most: int) -> Points:
    """Return at most ``most`` of the points, including the first and the last."""
    if len(points) <= max(most, 2):
        return points
    last = len(points) - 1
    return [points[round(index * last / (most - 1))] for index in range(most)]


def finite(values: Iterable[float | None]) -> list[float]:
    """Return the values that are known and finite."""
    return [value for value in values if value is not None and math.isfinite(value)]
