"""Read the logs and run files behind the given paths, by system, with each run's evaluations,
speeds and times.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mlaudit.benchmarks import target_of
from mlaudit.logs import Log, is_number, read_log
from mlaudit.result_folders import ResultFolder, find_results
from mlaudit.result_set import (
    LoggedEvaluation,
    counts_samples,
    evaluations_of,
    is_interrupted,
    reached_target,
    run_file,
    samples_before,
    samples_per_second,
    samples_to_target,
    samples_trained,
    seconds_before,
    seconds_between,
    seconds_to_train,
)
from mlaudit.rounds import round_of_log
from mlaudit.rules import BENCHMARK
from mlaudit.scratch_copy import RESULT_PATTERN, earlier_parts, logs_in, without_parts
from mlbert.host.errors import UserError
from mlbert.host.files import read_plain
from mlbert.host.json_files import parse_json
from mlbert.host.metrics import evaluation_titles
from mlbert.host.metrics_file import read_points

# In data/baselines.json; the bigram model is the better one.
_PREDICTORS = ("most_frequent", "bigram")
_MOST = 1e15  # of a count in a figure


@dataclass(frozen=True)
class RunSource:
    """A log and the other files of its run."""

    log: Log  # of its last part
    summary: dict[str, Any]  # summary.json; empty if missing
    metrics: list[dict[str, Any]]  # points of metrics.jsonl
    earlier: Sequence[Log] = ()  # logs of its interrupted parts, oldest first


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
                "Name a folder with result_*.txt, a submission tree, or logs",
            )
        for log in _logs(path):
            known = groups.setdefault(log.parent, [])
            if log not in known:
                known.append(log)
    names = _names(list(groups))
    return [
        _read_system(names[folder], folder, without_parts(logs)) for folder, logs in groups.items()
    ]


def _logs(path: Path) -> list[Path]:
    path = path.resolve()
    if path.is_file():
        return [path]
    for pattern in (".", BENCHMARK, f"*/{BENCHMARK}", f"results/*/{BENCHMARK}"):
        folders = [path] if pattern == "." else path.glob(pattern)
        if found := sorted((log for one in folders for log in logs_in(one)), key=_by_number):
            return found
    if found := [log for results in find_results(path) for log in results.logs]:
        return sorted(found, key=_by_number)
    reason = f"contains no {RESULT_PATTERN}"
    raise UserError(
        "log.missing", path, reason, "Name a LOGDIR, a system's results, a submission tree, or logs"
    )


def _by_number(log: Path) -> tuple[str, int, str]:
    number = log.stem.removeprefix("result_")
    return str(log.parent), int(number) if number.isdecimal() else 0, log.name


def _names(folders: list[Path]) -> dict[Path, str]:
    """Return a short name per folder: the system's,
    with as many parents as needed to make it unique.
    """
    parts = {folder: _name_parts(folder) for folder in folders}
    for count in range(1, max(map(len, parts.values()), default=1) + 1):
        names = {folder: "/".join(words[-count:]) for folder, words in parts.items()}
        if len(set(names.values())) == len(names):
            return names
    return {folder: str(folder) for folder in folders}


def _name_parts(folder: Path) -> tuple[str, ...]:
    """Return the parts of a system's name, the last one alone if that is enough."""
    if folder.name == BENCHMARK:
        return folder.parent.parts
    if ResultFolder(folder, ()).tree is None:
        return folder.parts
    *above, system, benchmark = folder.parts
    return (*above, f"{system}, {benchmark}")


def _read_system(name: str, folder: Path, logs: list[Path]) -> System:
    notes: list[str] = []
    sources = [_read_source(log, notes) for log in logs]
    facts = None
    tree = None
    for place in _descriptions(folder, sources[0].log):
        if place.is_file():
            facts = _read_object(place, notes) or None
            tree = place.parent.parent
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
    """Yield possible locations of a system's description: in its tree,
    or next to the LOGDIR's logs.
    """
    description = ResultFolder(folder, ()).description
    if folder.name == BENCHMARK or description is not None:
        yield description or folder.parents[2] / "systems" / f"{folder.parent.name}.json"
    platform = log.value("submission_platform")
    if isinstance(platform, str) and platform == Path(platform).name:
        yield folder / "systems" / f"{platform}.json"


def _read_source(path: Path, notes: list[str]) -> RunSource:
    log = read_log(path)
    if log.broken:
        notes.append(f"{path.name}: {len(log.broken)} lines of the log cannot be read")
    summary = run_file(path, "summary.json")
    metrics = run_file(path, "metrics.jsonl")
    return RunSource(
        log,
        _read_object(summary, notes) if summary else {},
        _read_points(metrics, notes) if metrics else [],
        _read_earlier(path, notes),
    )


def _read_earlier(path: Path, notes: list[str]) -> list[Log]:
    """Read the logs of the interrupted parts of a run that began training."""
    logs = []
    for part in earlier_parts(path):
        try:
            log = read_log(part)
        except UserError as error:
            notes.append(f"{part.name} {error.problem} and is ignored")
            continue
        if log.first("run_start") is not None:
            logs.append(log)
    return logs


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


Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class EvaluationPoint:
    """One evaluation."""

    samples: float | None  # trained on before it; None if the log does not count them
    seconds: float  # time to train up to the result
    accuracy: float


@dataclass(frozen=True)
class Times:
    """The seconds of a run by what it did; all but ``untimed`` add up to its time to train.

    A log separates training from evaluation only if it has eval_start and eval_stop, and the time
    between steps only with the run's summary. Parts that cannot be separated count as training, and
    their field is None.
    """

    untimed: float  # from a log's first line to run_start
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
    seconds: float | None  # time to train, as `seconds_to_train` defines it
    restarts: int  # how often it continued or began again after an interruption
    evaluations: Sequence[EvaluationPoint]
    speeds: Points  # (samples at the end, samples/s) per interval between evaluations
    times: Times | None
    source: RunSource

    @property
    def succeeded(self) -> bool:
        """True if it reached the target."""
        return reached_target(self.source.log)

    @property
    def has_started(self) -> bool:
        """True if one of its logs has a run_start."""
        return bool(self.source.earlier) or self.source.log.first("run_start") is not None

    @property
    def is_interrupted(self) -> bool:
        """True if it began and ended before it reached the target or a limit;
        it may still be running.
        """
        log = self.source.log
        return is_interrupted(log) or (self.has_started and log.first("run_start") is None)

    @property
    def score(self) -> float:
        """Seconds to train; infinite if it did not reach the target or the time is unknown."""
        return self.seconds if self.succeeded and self.seconds is not None else math.inf

    @cached_property
    def samples(self) -> float | None:
        """Samples trained on."""
        trained = number(samples_trained(self.source.log))
        if trained is not None:
            return trained
        return max(finite(evaluation.samples for evaluation in self.evaluations), default=None)

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

    @cached_property
    def training_samples_per_second(self) -> float | None:
        """Average outside evaluations; that of a restarted run is of its last part."""
        return samples_per_second(self.source.log)

    def metric(self, name: str) -> Points:
        """Return (samples, value) of a quantity at each point of metrics.jsonl that has it: of
        steps, such as loss, or of evaluations, such as eval_loss.
        """
        points = (line for line in self.source.metrics if name in line)
        pairs = ((number(line.get("samples")), number(line.get(name))) for line in points)
        return [
            (samples, value)
            for samples, value in pairs
            if samples is not None and value is not None
        ]

    @property
    def last_metrics(self) -> dict[str, float]:
        """The declared metrics of the last evaluation, by their keys in metrics.jsonl."""
        found = {key: self.metric(key) for key in evaluation_titles()}
        return {key: points[-1][1] for key, points in found.items() if points}


def number(value: object) -> float | None:
    """Return a number that a figure can show, or None."""
    return float(value) if is_number(value) and abs(value) < _MOST else None


@dataclass(frozen=True)
class _Part:
    """One part of a run: the whole run, or what lies between its start, interruptions and end."""

    log: Log
    samples_before: float | None
    seconds_before: float  # time to train
    kept: Sequence[LoggedEvaluation]  # without those that a later part repeated


def read_run(source: RunSource) -> ReportedRun:
    """Compute the numbers of a run."""
    log = source.log
    stop = log.first("run_stop")
    status = "unfinished" if log.events else "no MLPerf line"
    if stop is not None:
        status = str((stop.metadata or {}).get("status", "no status"))
    parts = _parts(source)
    seconds = seconds_to_train(log)
    return ReportedRun(
        name=log.path.stem.removeprefix("result_"),
        status=status,
        target=_target(source),
        seconds=seconds,
        restarts=max(len(parts) - 1, int(log.is_continued)),
        evaluations=[point for part in parts for point in _points(part)],
        speeds=[pair for part in parts for pair in _speeds(part)],
        times=None if seconds is None else _times(source, seconds, parts),
        source=source,
    )


def _parts(source: RunSource) -> list[_Part]:
    logs = [log for log in (*source.earlier, source.log) if log.first("run_start") is not None]
    parts = []
    ended = 0.0
    for index, log in enumerate(logs):
        before = seconds_before(log)
        if before is None:
            before = ended  # an older log: what the part before it lost is counted
        ended = before + _logged_seconds(log)
        resumed_at = [samples_before(later) or 0.0 for later in logs[index + 1 :]]
        last = min(resumed_at, default=math.inf)
        kept = [one for one in evaluations_of(log) if _is_shown(log, one) and one.samples <= last]
        parts.append(_Part(log, samples_before(log), before, kept))
    return parts


def _is_shown(log: Log, one: LoggedEvaluation) -> bool:
    numbers = (
        number(one.samples),
        number(one.accuracy),
        seconds_between(log.first("run_start"), one.event),
    )
    return None not in numbers


def _logged_seconds(log: Log) -> float:
    """Return the seconds from run_start to the last line of a log."""
    return seconds_between(log.first("run_start"), log.events[-1]) or 0.0


def _points(part: _Part) -> Iterator[EvaluationPoint]:
    is_counted = counts_samples(part.log)
    start = part.log.first("run_start")
    for one in part.kept:
        seconds = seconds_between(start, one.event)
        if seconds is not None:
            samples = float(one.samples) if is_counted else None
            yield EvaluationPoint(samples, part.seconds_before + seconds, float(one.accuracy))


def _target(source: RunSource) -> float | None:
    """Return the target accuracy: our logs record it;
    other benchmark logs have that of the rules of their round.
    """
    target = number(source.log.setting("TARGET_MLM_ACCURACY"))
    target = number(source.summary.get("target_accuracy")) if target is None else target
    if target is not None or source.log.first("configuration") is not None:
        return target
    if source.log.value("submission_benchmark") == BENCHMARK:
        return round_of_log(source.log).target(source.log.value("global_batch_size"))
    official = target_of(source.log)
    return official.value if official is not None else None


def _evaluation_spans(part: _Part) -> list[tuple[float, float]]:
    """Return (begin, end) of each evaluation in seconds after run_start;
    empty unless every start has its stop.
    """
    start = part.log.first("run_start")
    ends = [
        (seconds_between(start, one.start), seconds_between(start, one.stop)) for one in part.kept
    ]
    spans = [
        (begin, end)
        for begin, end in ends
        if begin is not None and end is not None and begin <= end
    ]
    return spans if len(spans) == len(part.kept) else []


def _to_first_step(log: Log) -> float:
    """Return the seconds from run_start to the first block or epoch."""
    first = log.first("block_start") or log.first("epoch_start")
    return seconds_between(log.first("run_start"), first) or 0.0


def _speeds(part: _Part) -> Iterator[tuple[float, float]]:
    """Yield the samples per second of each interval,
    without evaluations if the log records their start and end.
    """
    if not counts_samples(part.log):
        return
    spans = _evaluation_spans(part)
    if not spans:
        ends = [seconds_between(part.log.first("run_start"), one.event) for one in part.kept]
        spans = [(end, end) for end in ends if end is not None]
    before = part.samples_before
    since = _to_first_step(part.log)
    for evaluation, (until, after) in zip(part.kept, spans, strict=True):
        if before is not None and until > since and evaluation.samples > before:
            speed = (evaluation.samples - before) / (until - since)
            yield float(evaluation.samples), speed
        before = evaluation.samples
        since = after


def _times(source: RunSource, seconds: float, parts: Sequence[_Part]) -> Times:
    start = min(math.fsum(_to_first_step(part.log) for part in parts), seconds)
    spans = [span for part in parts for span in _evaluation_spans(part)]
    # The log of a restarted run whose earlier logs are missing does not have all evaluations.
    is_complete = len(spans) == sum(len(part.kept) for part in parts) and not (
        parts and parts[0].log.is_continued
    )
    evaluation = None
    if spans and is_complete:
        evaluation = min(math.fsum(end - begin for begin, end in spans), seconds - start)
    rest = seconds - start - (evaluation or 0.0)
    training = _training_seconds(source.summary)
    other = (
        rest - training
        if evaluation is not None and training is not None and training <= rest
        else None
    )
    untimed = math.fsum(_untimed_seconds(part.log) for part in parts)
    return Times(untimed, start, rest - (other or 0.0), evaluation, other)


def _untimed_seconds(log: Log) -> float:
    first = min(log.events, key=lambda event: event.time_ms)
    return seconds_between(first, log.first("run_start")) or 0.0


def _training_seconds(summary: Mapping[str, Any]) -> float | None:
    """Return the seconds in training steps, from the summary's rate, which covers only these."""
    samples = number(summary.get("samples"))
    rate = number(summary.get("samples_per_second"))
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
