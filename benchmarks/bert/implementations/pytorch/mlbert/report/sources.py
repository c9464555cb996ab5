"""What a report is made of: the logs behind the paths given, by system, and the files that lie beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlbert.host.errors import UserError
from mlbert.host.files import read_plain
from mlbert.host.json_files import parse_json
from mlbert.mlperf.logs import Log, read_log
from mlbert.mlperf.metrics_file import read_points
from mlbert.mlperf.result_set import is_number
from mlbert.mlperf.rules import BENCHMARK
from mlbert.mlperf.run_files import run_file

RESULT_PATTERN = "result_*.txt"
_PREDICTORS = ("most_frequent", "bigram")  # of data/baselines.json; the bigram model is the better of two


@dataclass(frozen=True)
class Source:
    """One log and what its run left beside it."""

    log: Log
    summary: dict[str, Any]  # summary.json; empty where there is none
    metrics: list[dict[str, Any]]  # the points of metrics.jsonl


@dataclass(frozen=True)
class System:
    """The logs of one system or version, in the order of their numbers."""

    name: str
    folder: Path
    sources: Sequence[Source]
    facts: dict[str, Any] | None = None  # systems/<system>.json
    tree: Path | None = None  # that the description lies in
    baselines: dict[str, float] = field(default_factory=dict)  # predictor to accuracy
    notes: Sequence[str] = ()  # what could not be read


def read_systems(paths: Sequence[Path]) -> list[System]:
    """The systems behind paths, each a log, a LOGDIR, a system's results, a folder of them or a tree.

    Raises:
        UserError: a path does not exist, or there is no log behind it.
    """
    groups: dict[Path, list[Path]] = {}
    for path in paths:
        if not path.exists():
            raise UserError("file.missing", path, "does not exist", "Name a folder with result_*.txt, a tree, or logs")
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
        if found := [log for log in path.glob(pattern) if log.is_file()]:
            return sorted(found, key=_by_number)
    raise UserError(
        "log.missing", path, f"holds no {RESULT_PATTERN}", "Name a LOGDIR, a system's results, a tree, or logs"
    )


def _by_number(log: Path) -> tuple[str, int, str]:
    number = log.stem.removeprefix("result_")
    return str(log.parent), int(number) if number.isdecimal() else 0, log.name


def _names(folders: list[Path]) -> dict[Path, str]:
    """A short name for each folder: the system's, with as many parents as tell them apart."""
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
    known = {name: float(value) for name, value in accuracies.items() if is_number(value) and 0 <= value <= 1}
    return System(name, folder, sources, facts, tree, known, tuple(notes))


def _descriptions(folder: Path, log: Log) -> Iterator[Path]:
    """Where the description of a system may lie: in its tree, or beside the LOGDIR's logs."""
    if folder.name == BENCHMARK:
        yield folder.parents[2] / "systems" / f"{folder.parent.name}.json"
    platform = log.value("submission_platform")
    if isinstance(platform, str) and platform == Path(platform).name:
        yield folder / "systems" / f"{platform}.json"


def _read_source(path: Path, notes: list[str]) -> Source:
    log = read_log(path)
    notes += [f"{path.name}: {len(log.broken)} lines of the log cannot be read"] if log.broken else []
    summary, metrics = run_file(path, "summary.json"), run_file(path, "metrics.jsonl")
    return Source(
        log,
        _read_object(summary, notes) if summary else {},
        _read_points(metrics, notes) if metrics else [],
    )


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    """A JSON object; empty where there is none, with a note where the file is damaged."""
    if not os.path.lexists(path):
        return {}
    try:
        value = parse_json(read_plain(path, ""), finite=False)
    except ValueError:  # UserError among them
        value = None
    if isinstance(value, dict):
        return value
    notes.append(f"{_place(path)} cannot be read and is left out")
    return {}


def _read_points(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The points of metrics.jsonl, with a note where some are damaged."""
    try:
        points, foreign = read_points(path)
    except UserError:
        notes.append(f"{_place(path)} cannot be read and is left out")
        return []
    if foreign:
        notes.append(f"{_place(path)}: {foreign} lines cannot be read and are left out")
    return points


def _place(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"
