"""Check a log against the other files of its run: metrics, summary and configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlaudit.findings import Complaint, Complaints, Outcome
from mlaudit.logs import Event, Log, is_number
from mlaudit.result_set import (
    NAMES,
    ResultSet,
    run_file,
    samples_per_second,
    samples_trained,
    seconds_before,
    seconds_to_train,
)
from mlaudit.settings import settings_by_key
from mlbert.host.files import read_plain
from mlbert.host.metrics_file import parse_object, read_points

# The clocks differ: logs have wall-clock time, metrics have seconds since run_start.
_SLACK_SECONDS = 1.0
_SLACK_SHARE = 0.01
_FASTER = 1.5
_MIN_SECONDS = 30.0  # of a run whose speed is compared
_RULE = "the files of a run agree with its log"


@dataclass(frozen=True)
class _RunFile:
    """One file of a run, and its name in messages."""

    log: Log
    path: Path

    def differs(self, text: str, line: int | None = None) -> Complaint:
        """Return an error that names the file and, if given, the line."""
        name = (
            f"{self.path.parent.name}/{self.path.name}"
            if self.path.name in NAMES
            else self.path.name
        )
        return Complaint(Outcome.ERROR, f"{name}{f':{line}' if line else ''}: {text}", _RULE)

    def text(self) -> str:
        """Return the content of the file. Raises ValueError if it cannot be read."""
        return read_plain(self.path, "").decode()


def check_metrics(results: ResultSet) -> Complaints:
    """The metrics, summary and configuration that a run wrote agree with its log."""
    logs = results.own_logs
    without = [log.path.name for log in logs if not any(True for _ in _files(log))]
    if without:
        text = f"{len(without)} of {len(logs)} logs have no run files, so nothing is compared"
        yield Complaint(Outcome.SKIP if len(without) == len(logs) else Outcome.WARN, text)
    for log in logs:
        for file, check in _files(log):
            try:
                yield from check(file)
            except ValueError as error:
                yield file.differs(str(error))


def _files(log: Log) -> Iterator[tuple[_RunFile, Any]]:
    checks = {
        "metrics.jsonl": _check_points,
        "summary.json": _check_summary,
        "config.json": _check_config,
    }
    for name, check in checks.items():
        path = run_file(log.path, name)
        if path is not None:
            yield _RunFile(log, path), check


def _check_points(file: _RunFile) -> Complaints:
    """Check that every logged evaluation has a line with its accuracy, samples and time,
    and points are in order.
    """
    evaluations: dict[float, tuple[int, dict[str, Any]]] = {}
    peak = file.log.value("opt_base_learning_rate")
    most = 0.0
    behind = 0
    fast = 0
    last: dict[tuple[str, str], float] = {}
    for number, text in enumerate(file.text().splitlines(), start=1):
        point = parse_object(text, f"line {number} ")
        kind = str(point.get("kind"))
        counters = ("samples",) if kind == "skipped" else ("samples", "seconds")
        for name in counters:
            value = point.get(name)
            before = last.get((kind, name), -1)
            if not is_number(value):
                yield file.differs(f"{name} is {value!r}", number)
            elif value < before or (value == before and name == "samples"):
                yield file.differs(f"{name} {value} come after {before}", number)
            else:
                last[kind, name] = value
        if kind == "evaluation" and is_number(point.get("samples")):
            evaluations[point["samples"]] = (number, point)
        if is_number(samples := point.get("samples")):
            behind = behind or (number if samples < most else 0)
            most = max(most, samples)
        if (
            is_number(rate := point.get("learning_rate"))
            and is_number(peak)
            and rate > peak * (1 + _SLACK_SHARE)
        ):
            fast = fast or number
    if behind:
        yield file.differs("fewer samples than at an earlier line", behind)
    if fast:
        yield file.differs(f"learning_rate is above opt_base_learning_rate {peak}", fast)
    logged = file.log.all("eval_accuracy")
    for event in logged:
        yield from _check_evaluation(file, event, evaluations)
    if not file.log.is_continued:
        known = [(event.metadata or {}).get("epoch_num") for event in logged]
        for samples, (number, _) in evaluations.items():
            if samples not in known:
                yield file.differs(
                    f"{file.log.path.name} has no evaluation at {samples} samples", number
                )


def _check_evaluation(
    file: _RunFile, event: Event, lines: dict[float, tuple[int, dict[str, Any]]]
) -> Complaints:
    samples = (event.metadata or {}).get("epoch_num")
    place = f"{file.log.path.name}:{event.line}"
    number, point = lines.get(samples, (0, {})) if is_number(samples) else (0, {})
    if not number:
        yield file.differs(f"has no evaluation at {samples} samples, which {place} logs")
        return
    if point.get("eval_accuracy") != event.value:
        yield file.differs(
            f"eval_accuracy is {point.get('eval_accuracy')}, in {place} {event.value}", number
        )
    start = file.log.first("run_start")
    before = seconds_before(file.log)
    if start is None or before is None or not is_number(point.get("seconds")):
        return
    seconds = before + (event.time_ms - start.time_ms) / 1000
    if not _is_near(point["seconds"], seconds):
        yield file.differs(
            f"evaluated {point['seconds']} s after the start, in {place} {seconds} s", number
        )


def _is_near(measured: float, logged: float) -> bool:
    return abs(measured - logged) <= _SLACK_SECONDS + _SLACK_SHARE * abs(logged)


def _check_summary(file: _RunFile) -> Complaints:
    """Check that the summary has the numbers of the log,
    and that no point of the metrics is after the last step.
    """
    summary = parse_object(file.text())
    log = file.log
    logged = {
        "status": log.status,
        "seed": log.value("seed"),
        "samples": samples_trained(log),
    }
    accuracies = log.all("eval_accuracy")
    if accuracies:
        logged["accuracy"] = accuracies[-1].value
    for name, value in logged.items():
        if summary.get(name) != value:
            yield file.differs(f"{name} is {summary.get(name)!r}, in {log.path.name} {value!r}")
    seconds = summary.get("seconds_to_train")
    logged_seconds = seconds_to_train(log)
    if logged_seconds is None:
        return
    if not is_number(seconds) or not _is_near(seconds, logged_seconds):
        yield file.differs(
            f"seconds_to_train is {seconds!r}, in {log.path.name} {logged_seconds:.3f}"
        )
    speed = summary.get("samples_per_second")
    stamped = samples_per_second(log)
    is_comparable = logged_seconds > _MIN_SECONDS and not log.is_continued
    # The time stamps include what is between steps, such as checkpoints.
    if is_comparable and is_number(speed) and stamped and speed > _FASTER * stamped:
        yield file.differs(f"samples_per_second is {speed}, by the time stamps {stamped:.4g}")
    path = run_file(log.path, "metrics.jsonl")
    steps = summary.get("steps")
    last = (
        max((point["step"] for point in read_points(path)[0]), default=0) if path is not None else 0
    )
    if path is not None and (not is_number(steps) or steps < last):
        yield file.differs(f"steps is {steps!r}, in {path.name} {last}")


def _check_config(file: _RunFile) -> Complaints:
    """Check that seed, provenance and every setting with its origin are those of the log."""
    record = parse_object(file.text())
    log = file.log
    if record.get("seed") != log.value("seed"):
        yield file.differs(
            f"seed is {record.get('seed')!r}, in {log.path.name} {log.value('seed')!r}"
        )
    for key, value in _part(record, "provenance").items():
        if log.first(key) is not None and log.value(key) != value:
            yield file.differs(f"{key} is {value!r}, in {log.path.name} {log.value(key)!r}")
    settings = _part(record, "config")
    origins = _part(record, "origin")
    logged = log.value("configuration")
    fields = {one.env: key for key, one in settings_by_key().items()}
    if not isinstance(logged, dict):
        return
    for env, row in logged.items():
        name = fields.get(env, "")
        if name not in settings or not isinstance(row, dict):
            continue  # a setting of another commit
        for what, value in (("value", settings[name]), ("origin", origins.get(name))):
            if row.get(what) != value:
                text = f"{name} has {what} {value!r}, {env} in {log.path.name} {row.get(what)!r}"
                yield file.differs(text)


def _part(record: dict[str, Any], name: str) -> dict[str, Any]:
    part = record.get(name)
    if not isinstance(part, dict):
        raise ValueError(f"{name} is missing")
    return part
