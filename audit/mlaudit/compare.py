"""Compare two sets of runs, A and B: settings, code, system, speed,
convergence and time to train.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlaudit.call_sites import changed_files, has_commit, num_commits
from mlaudit.keys import is_hyperparameter
from mlaudit.logs import Log, is_number, read_log
from mlaudit.result_set import (
    minutes_to_train,
    olympic_seconds,
    reached_target,
    samples_per_second,
    samples_to_target,
    stamps_evaluations,
)
from mlaudit.rules import BENCHMARK
from mlaudit.scratch_copy import RESULT_PATTERN, logs_at, logs_in
from mlaudit.settings import settings_by_env
from mlaudit.significance import FEWEST_RUNS, Ratio, compare
from mlbert.host.errors import UserError
from mlbert.host.json_files import parse_json, read_json

NOT_SET = "-"  # shown for a setting that a side does not have

# Log keys by the section that shows them. Other keys before run_start belong to the system.
_SETTINGS = (
    "train_data",
    "eval_data",
    "model_shape",
    "model_shape_sha256",
    "config_file",
    "eval_samples",
)
_CODE = ("recipe", "commit", "tree_modified", "packages", "ops", "precision", "python")
_UNCOMPARED = (
    "configuration",
    "config_file_sha256",
    "config_parents",  # compared setting by setting
    "seed",
    "cache_clear",
    "submission_benchmark",
    "submission_status",
    "tracked_stats",
)
# Settings that differ from run to run, or that other keys show.
_UNCOMPARED_SETTINGS = (
    "EXPERIMENT",
    "SEED",
    "RECIPE",
    "MLPERF_SUBMISSION_ORG",
    "MLPERF_SUBMISSION_PLATFORM",
)


@dataclass(frozen=True)
class ComparedSide:
    """One of the two sets of runs."""

    name: str  # as the user gave it
    logs: Sequence[Log]
    system: dict[str, Any] | None  # systems/<system>.json, if the logs are in a tree


@dataclass(frozen=True)
class Difference:
    """A value that differs between the sides. Each side lists all values of its runs."""

    name: str
    a: str
    b: str
    origin_a: str = ""  # where a setting came from
    origin_b: str = ""


@dataclass(frozen=True)
class Measure:
    """One number per run, for both sides."""

    name: str
    unit: str
    a: Sequence[float]
    b: Sequence[float]
    ratio: Ratio | None  # None if a side has no number


@dataclass(frozen=True)
class Comparison:
    """Everything that differs."""

    settings: Sequence[Difference]
    code: Sequence[Difference]
    history: str  # relation between the commits; empty if they are the same
    files: Sequence[str]  # below benchmarks/ that differ between the commits
    system: Sequence[Difference]
    successes: tuple[int, int]
    runs: tuple[int, int]
    # None with fewer than three runs, or if two did not reach the target.
    olympic_minutes: tuple[float | None, float | None]
    measures: Sequence[Measure]
    notes: Sequence[str]  # sentences


def read_side(path: Path) -> ComparedSide:
    """Read ``results/<system>``, its ``bert/``, a LOGDIR or one log.

    Raises UserError for anything else.
    """
    remedy = "Name results/<system>, a LOGDIR or one log"
    if not path.exists():
        raise UserError("file.missing", path, "does not exist", remedy)
    if not (names := logs_at(path)):
        raise UserError("log.missing", path, f"contains no {RESULT_PATTERN}", remedy)
    logs = [read_log(name) for name in names]
    for log in logs:
        if log.first("run_start") is None:
            reason = "is not the MLPerf log of a run: it has no run_start"
            raise UserError("log.incomplete", log.path, reason, "Remove it, or name others")
    return ComparedSide(str(path), logs, _system_of(names[0].resolve().parent))


def alike(log: Log) -> list[Log]:
    """Return the finished runs in the log's folder with the same settings,
    including the log itself.

    Runs that were restarted are left out: their logs lack the first evaluations.
    """
    others = map(read_log, sorted({log.path, *logs_in(log.path.parent)}))
    finished = (
        other
        for other in others
        if other.status is not None
        and other.first("run_start") is not None
        and not other.is_continued
    )
    own = ComparedSide("", [log], None)
    sides = ((other, ComparedSide("", [other], None)) for other in finished)
    return [
        other
        for other, side in sides
        if not (_facts_that_differ(own, side)[0] or _configuration(own, side, []))
    ]


def compare_sides(a: ComparedSide, b: ComparedSide, tree: Path) -> Comparison:
    """Return everything that differs.

    ``tree`` is a checkout whose history may have both commits.
    """
    settings, code, system = _facts_that_differ(a, b)
    history, files = _history(a, b, tree)
    notes: list[str] = []
    settings += _configuration(a, b, notes)
    if a.system is not None and b.system is not None:
        system += _differences(
            {k: [v] for k, v in a.system.items()}, {k: [v] for k, v in b.system.items()}
        )
    elif a.system is not None or b.system is not None:
        notes.append(
            f"Only {'A' if a.system is not None else 'B'} has a system description: not compared."
        )
    notes += _fairness(a, b)
    return Comparison(
        settings,
        code,
        history,
        files,
        system,
        (_num_successes(a), _num_successes(b)),
        (len(a.logs), len(b.logs)),
        (_olympic_minutes(a), _olympic_minutes(b)),
        _measures(a, b),
        notes,
    )


def _system_of(folder: Path) -> dict[str, Any] | None:
    """Return the system description of ``results/<system>/bert``, or None if there is none."""
    if folder.name != BENCHMARK or folder.parent.parent.name != "results":
        return None
    path = folder.parents[2] / "systems" / f"{folder.parent.name}.json"
    if not path.is_file():
        return None
    return read_json(path, "Fix or remove it")


def _facts_that_differ(
    a: ComparedSide, b: ComparedSide
) -> tuple[list[Difference], list[Difference], list[Difference]]:
    """Return the differences in settings, code and system."""
    settings: list[Difference] = []
    code: list[Difference] = []
    system: list[Difference] = []
    for difference in _differences(_facts(a), _facts(b)):
        key = difference.name.partition(": ")[0]
        is_setting = key in _SETTINGS or is_hyperparameter(key)
        (settings if is_setting else code if key in _CODE else system).append(difference)
    return settings, code, system


def _facts(side: ComparedSide) -> dict[str, list[Any]]:
    """Map each key before run_start (and eval_samples) to its values.

    Dictionary items are named ``key: item``.
    """
    facts: dict[str, list[Any]] = {}
    for log in side.logs:
        start = next(index for index, event in enumerate(log.events) if event.key == "run_start")
        values = {event.key: event.value for event in log.events[:start]}
        values["eval_samples"] = log.value("eval_samples")
        for key, value in values.items():
            for name, item in _flat(key, value):
                if (
                    key not in _UNCOMPARED
                    and item is not None
                    and item not in facts.setdefault(name, [])
                ):
                    facts[name].append(item)
    return facts


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the items of a dictionary or of its JSON text; anything else unchanged."""
    if isinstance(value, str) and value.startswith("{"):
        with contextlib.suppress(ValueError):
            value = parse_json(value)
    if isinstance(value, dict):
        for name, item in value.items():
            yield f"{key}: {name}", item
    else:
        yield key, value


def _differences(a: dict[str, list[Any]], b: dict[str, list[Any]]) -> list[Difference]:
    """Return the differences, merging items of one dictionary that have the same two values."""
    names: dict[tuple[str, str, str], list[str]] = {}
    for name in dict.fromkeys([*a, *b]):
        key, _, item = name.partition(": ")
        left = _as_text(a.get(name, []))
        right = _as_text(b.get(name, []))
        if left != right:
            names.setdefault((key, left, right), []).append(item)
    found = []
    for (key, left, right), items in names.items():
        listed = ", ".join(filter(None, items))
        found.append(Difference(f"{key}: {listed}" if listed else key, left, right))
    return found


def _as_text(values: Sequence[Any]) -> str:
    """Join the distinct values of all runs, sorted, with numbers in one format."""
    texts = {_formatted(value) for value in values} - {""}
    return ", ".join(sorted(texts)) if texts else NOT_SET


def _formatted(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.12g}" if is_number(value) else str(value)


def _configuration(a: ComparedSide, b: ComparedSide, notes: list[str]) -> list[Difference]:
    """Return the settings of our logs that differ.

    Appends notes about paths and defaults that only one side has.
    """
    if not all(isinstance(log.value("configuration"), dict) for log in (*a.logs, *b.logs)):
        return []
    names = dict.fromkeys(name for log in (*a.logs, *b.logs) for name in log.value("configuration"))
    found = []
    paths = []
    defaults: tuple[list[str], list[str]] = ([], [])
    for name in names:
        texts = [_as_text([log.setting(name) for log in side.logs]) for side in (a, b)]
        if texts[0] == texts[1] or name in _UNCOMPARED_SETTINGS:
            continue
        origins = [_origin(side, name) for side in (a, b)]
        row = settings_by_env().get(name)
        if row is not None and row.kind is Path:
            paths.append(name)
        elif "" in origins and "".join(origins).startswith("recipe "):
            defaults[origins.index("") ^ 1].append(f"{name} {texts[origins.index('') ^ 1]}")
        else:
            found.append(Difference(name, *texts, *origins))
    for letter, names_only in zip("AB", defaults, strict=True):
        if names_only:
            notes.append(
                f"Settings that only {letter} knows, at its recipe's defaults: "
                f"{', '.join(names_only)}."
            )
    if paths:
        notes.append(f"Paths that differ, not compared: {', '.join(paths)}.")
    return found


def _origin(side: ComparedSide, name: str) -> str:
    rows = (log.value("configuration").get(name) for log in side.logs)
    return ", ".join(
        dict.fromkeys(
            str(row["origin"]) for row in rows if isinstance(row, dict) and "origin" in row
        )
    )


def _history(a: ComparedSide, b: ComparedSide, tree: Path) -> tuple[str, list[str]]:
    """Return the relation between both commits, and the files below benchmarks/ that differ."""
    commits = [
        list(dict.fromkeys(_formatted(log.value("commit")) for log in side.logs)) for side in (a, b)
    ]
    if any("" in names for names in commits):
        return "Not all logs name their commit: files not compared.", []
    if commits[0] == commits[1]:
        return "", []
    if any(len(names) > 1 for names in commits):
        return "The logs of a side come from several commits: files not compared.", []
    begin = commits[0][0]
    end = commits[1][0]
    if not (has_commit(tree, begin) and has_commit(tree, end)):
        return "The history of this tree does not have both commits: files not compared.", []
    files = changed_files(tree, begin, end)
    later = num_commits(tree, begin, end)
    earlier = num_commits(tree, end, begin)
    way = f"{later} commits after A" if later else f"{earlier} commits before A"
    way += f" and lacks {earlier} of A's" if later and earlier else ""
    return f"B is {way}; {len(files)} files of benchmarks/ differ.", files


def _fairness(a: ComparedSide, b: ComparedSide) -> list[str]:
    """Return notes on what makes the comparison unfair."""
    values_of = {
        "batch sizes": [[log.value("global_batch_size") for log in side.logs] for side in (a, b)],
        "targets": [[log.setting("TARGET_MLM_ACCURACY") for log in side.logs] for side in (a, b)],
        "training sets": [[log.value("train_data") for log in side.logs] for side in (a, b)],
        "evaluation sets": [[log.value("eval_data") for log in side.logs] for side in (a, b)],
        "evaluation counts": [[log.value("eval_samples") for log in side.logs] for side in (a, b)],
    }
    texts = {name: [_as_text(values) for values in both] for name, both in values_of.items()}
    unlike = [name for name, both in texts.items() if both[0] != both[1] and NOT_SET not in both]
    notes = []
    if unlike:
        notes.append(
            f"Not like for like: the {' and '.join(unlike)} differ, "
            "so samples and time to the target do too."
        )
    for name, side in (("A", a), ("B", b)):
        if not all(stamps_evaluations(log) for log in side.logs):
            notes.append(
                f"The logs of {name} have no eval_start: their speed includes the evaluations."
            )
        if restarted := sum(log.is_continued for log in side.logs):
            notes.append(
                f"{restarted} of the runs of {name} were restarted: their time includes the earlier"
                " parts, their speed is that of the last part."
            )
        if len(side.logs) < FEWEST_RUNS:
            notes.append(
                f"{name} has fewer than {FEWEST_RUNS} runs: significance cannot be tested."
            )
    return notes


def _num_successes(side: ComparedSide) -> int:
    return sum(map(reached_target, side.logs))


def _olympic_minutes(side: ComparedSide) -> float | None:
    mean = olympic_seconds(side.logs)
    return None if mean is None or math.isinf(mean) else mean / 60


def _measures(a: ComparedSide, b: ComparedSide) -> list[Measure]:
    functions = (
        ("speed", "samples/s", samples_per_second),
        ("samples to target", "samples", samples_to_target),
        ("time to train", "minutes", minutes_to_train),
    )
    measures = []
    for name, unit, number in functions:
        left, right = ([value for log in side.logs if (value := number(log))] for side in (a, b))
        measures.append(Measure(name, unit, left, right, compare(left, right)))
    return measures
