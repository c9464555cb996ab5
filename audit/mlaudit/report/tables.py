"""Text tables of a report (systems, runs, hyper-parameters, machines, provenance, commands),
and its JSON.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from mlaudit.planner.cost import Prices
from mlaudit.report.results import FASTEST, INTERRUPTED, UNFINISHED, Result
from mlaudit.report.runs import ReportedRun, number
from mlaudit.rules import UNVERIFIED
from mlbert.host.metrics import evaluation_titles

_PROVENANCE = (
    "submission_org",
    "submission_platform",
    "submission_status",
    "commit",
    "tree_modified",
    "recipe",
    "config_file",
    "config_file_sha256",
    "model_shape",
    "model_shape_sha256",
    "train_data",
    "eval_data",
    "data_file",
    "image",
    "image_digest",
    "image_commit",
    "python",
    "platform",
    "packages",
    "precision",
    "ranks",
)
_NEUTRAL = (
    "Computed from the logs alone; they do not say whether MLCommons has verified the result."
)
# Parts of a machine whose energy a summary.json may state, and their names for a person.
METERED_PARTS = {"gpu": "GPUs", "cpu": "processors", "dram": "memory"}
_LONGEST_VALUE = 300  # characters of a logged value
# Differ for each repetition of a run.
_PLACES = {"SEED", "LOGDIR", "EXPERIMENT", "DATADIR_PHASE2", "EVALDIR", "RESUME"}


class Cell(NamedTuple):
    """Highlighted text."""

    text: str
    mark: str  # class in the style sheet


@dataclass(frozen=True)
class ReportTable:
    """Rows and columns; the ``texts`` leftmost columns are text, the others numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    texts: int = 1
    is_long: bool = False  # texts may span several lines


def duration(seconds: float | None) -> str:
    """Format a time: 84.21 s, 5 min 0.5 s, 6 h 6 min."""
    if seconds is None or math.isinf(seconds):
        return "-"
    if round(seconds, 2) < 60:
        return f"{seconds:.2f} s"
    if round(seconds, 1) < 3600:
        minutes, rest = divmod(round(seconds, 1), 60)
        return f"{minutes:.0f} min {rest:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,d} h {minutes} min"


def count(value: float | None, digits: int = 0) -> str:
    """Format a number with thousands separators; a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def speed(value: float | None) -> str:
    """Format samples per second, with one decimal for small numbers."""
    return count(value, 1 if value is not None and value < 1000 else 0)


def percent(value: float) -> str:
    """Format a fraction as a percentage."""
    return f"{100 * value:.1f} %"


def comparison(results: Sequence[Result]) -> ReportTable:
    """Return one row per system, each compared with the first."""
    columns = [
        "system",
        "time to train",
        "relative to the first",
        "runs",
        "batch",
        "accelerators",
        "samples to target",
    ]
    columns += ["samples/s", "while training", "score factor", "share of peak"]
    first = results[0].olympic_seconds
    rows = []
    for result in results:
        mean = result.olympic_seconds
        share = next(iter(result.peak_shares.values()), None)
        is_known = (
            first is not None
            and mean is not None
            and math.isfinite(first)
            and math.isfinite(mean)
            and mean > 0
        )
        rows.append(
            [
                result.system.name,
                time_to_train(result),
                f"{mean / first:.3f} x" if is_known and first and mean else "-",
                f"{result.num_converged} of {len(result.runs)}",
                count(result.batch),
                count(result.accelerators or None),
                count(result.mean_samples),
                speed(result.samples_per_second),
                speed(result.training_speed),
                "-" if result.scaling is None else f"{result.scaling:.4f}",
                "-" if share is None else percent(share),
            ]
        )
    return ReportTable(columns, rows)


def time_to_train(result: Result) -> str:
    """Return the olympic mean, or the individual times of one or two runs."""
    mean = result.olympic_seconds
    if mean is None:
        return ", ".join(duration(run.score) for run in result.runs if run.succeeded) or "no result"
    return duration(mean) if math.isfinite(mean) else "no result"


def meaning(result: Result) -> str:
    """Describe the number that `time_to_train` returns."""
    mean = result.olympic_seconds
    num_runs = len(result.runs)
    runs_in_words = "1 run" if num_runs == 1 else f"{num_runs} runs"
    if not result.num_converged or (mean is not None and math.isinf(mean)):
        return _failures(result, runs_in_words)
    if mean is None:
        words = f"time to train of {runs_in_words}"
    else:
        words = f"time to train, olympic mean of {runs_in_words} ({mean / 60:.3f} minutes)"
    resumed = sum(run.source.log.is_continued for run in result.runs)
    if resumed:
        which = "it" if num_runs == 1 else f"{resumed} of them"
        words += f"; {which} resumed from a checkpoint, which the rules do not allow"
    return words


def _failures(result: Result, runs_in_words: str) -> str:
    """Count the runs that did not reach the target, by reason."""
    interrupted = sum(mark in (INTERRUPTED, UNFINISHED) for mark in result.marks.values())
    others = len(result.runs) - result.num_converged - interrupted
    texts = []
    if interrupted:
        texts.append(f"{interrupted} of {runs_in_words} did not finish")
    if others:
        texts.append(f"{others} of {runs_in_words} did not reach the target")
    return f"{'; '.join(texts)}; the rules allow one in ten"


def verdict(results: Sequence[Result]) -> str:
    """Return the required disclaimer for unverified results."""
    return UNVERIFIED if any(result.ours for result in results) else _NEUTRAL


def runs(result: Result) -> ReportTable:
    """Return one row per run."""
    columns = ["run", "status", "", "time to train", "samples", "accuracy", "samples/s"]
    columns += ["while training", "seed"]
    last = [run.last_metrics for run in result.runs]
    metrics = {
        key: title
        for key, title in evaluation_titles().items()
        if any(key in values for values in last)
    }
    rows = [
        [run.name, *_row(result, run), *(count(values.get(key), 4) for key in metrics)]
        for run, values in zip(result.runs, last, strict=True)
    ]
    return ReportTable([*columns, *metrics.values()], rows, 3)


def restart_words(restarts: int) -> str:
    """Return how often a run was restarted, in words; empty if it was not."""
    if restarts < 2:
        return "restarted" if restarts else ""
    return f"restarted {restarts} times"


def _row(result: Result, run: ReportedRun) -> list[str | Cell]:
    note = "; ".join(filter(None, (result.marks.get(run.name), restart_words(run.restarts))))
    accuracy = "-" if run.accuracy is None else f"{run.accuracy:.4f}"
    seed = run.source.log.value("seed")
    return [
        run.status if run.succeeded else Cell(run.status, "bad"),
        Cell(note, "dim" if run.succeeded else "bad"),
        duration(run.seconds),
        count(run.samples),
        accuracy,
        speed(run.samples_per_second),
        speed(run.training_samples_per_second),
        "-" if seed is None else str(seed),
    ]


def costs(result: Result, prices: Prices) -> ReportTable | None:
    """Return energy, price and CO2 of each run, or None if nothing is known of any."""
    columns = ["run", "measured", "energy, kJ", "average power, W", "dollars", "kg CO2"]
    rows: list[Sequence[str | Cell]] = []
    for run in result.runs:
        numbers = _cost(run, prices)
        if any(value is not None for value in numbers.values()):
            measured = [
                words
                for part, words in METERED_PARTS.items()
                if f"{part}_joules" in run.source.summary
            ]
            joules = numbers["joules"]
            kilojoules = count(None if joules is None else joules / 1e3, 1)
            rows.append(
                [
                    run.name,
                    ", ".join(measured) or "-",
                    kilojoules,
                    count(numbers["watts"], 1),
                    count(numbers["dollars"], 2),
                    count(numbers["co2_kg"], 4),
                ]
            )
    return ReportTable(columns, rows, 2) if rows else None


def _cost(run: ReportedRun, prices: Prices) -> dict[str, float | None]:
    """Return a run's joules and watts as measured, and its price and CO2 at the user's rates;
    None is unknown.
    """
    summary = run.source.summary
    log = run.source.log
    joules = number(summary.get("energy_joules"))
    ranks = number(log.value("ranks"))
    dollars = None
    if ranks is not None and run.seconds is not None:
        dollars = prices.dollars(ranks, run.seconds)
    return {
        "joules": joules,
        "watts": number(summary.get("average_watts")),
        "dollars": dollars,
        "co2_kg": prices.co2_kg(joules),
    }


def hyperparameters(results: Sequence[Result]) -> ReportTable:
    """Return one row per key; marks differences between runs of a system
    and from the reference point.
    """
    references = [result.reference_hyperparameters for result in results]
    batches = {reference[0] for reference in references if reference}
    shared = next(reference for reference in references if reference) if len(batches) == 1 else None
    keys = dict.fromkeys(key for result in results for key in result.hyperparameters)
    rows = []
    for key in keys:
        row: list[str | Cell] = [key]
        for result, reference in zip(results, references, strict=True):
            value = result.hyperparameters.get(key)
            wanted = reference[1].get(key) if reference else None
            text = "-" if value is None else value.text
            mark = "bad" if value is not None and value.differs else ""
            mark = mark or ("differs" if value is not None and wanted not in (None, text) else "")
            row.append(Cell(text, mark))
        rows.append([*row, shared[1].get(key, "-")] if shared else row)
    columns = ["", *(result.system.name for result in results)]
    if shared:
        columns.append(f"reference, batch {shared[0]}")
    return ReportTable(columns, rows)


def machines(results: Sequence[Result]) -> ReportTable | None:
    """Return the systems' descriptions in columns, without empty fields."""
    known = [result for result in results if result.system.facts]
    keys = dict.fromkeys(key for result in known for key in result.system.facts or {})
    rows = []
    for key in keys:
        texts = [_text((result.system.facts or {}).get(key, "")) for result in known]
        if any(text not in ("", "N/A") for text in texts):
            rows.append([key.replace("_", " "), *texts])
    if not rows:
        return None
    return ReportTable(
        ["", *(result.system.name for result in known)], rows, len(known) + 1, is_long=True
    )


def provenance(results: Sequence[Result]) -> ReportTable:
    """Return the provenance recorded in the logs, one column per system."""
    rows = []
    for key in _PROVENANCE:
        texts = [", ".join(_logged(result, key)) for result in results]
        if any(texts):
            rows.append([key, *texts])
    rows.append(["logs", *(str(result.system.folder) for result in results)])
    return ReportTable(
        ["", *(result.system.name for result in results)], rows, len(results) + 1, is_long=True
    )


def _logged(result: Result, key: str) -> list[str]:
    """Return the distinct values of a key, at most three."""
    values = (
        event.value for run in result.runs if (event := run.source.log.first(key)) is not None
    )
    found = list(dict.fromkeys(_text(value) for value in values))
    return found if len(found) <= 3 else [*found[:3], f"and {len(found) - 3} more"]


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        value = ", ".join(f"{key} {_text(part)}" for key, part in value.items())
    if isinstance(value, list):
        value = ", ".join(_text(part) for part in value)
    text = "" if value is None else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def trace_commands(result: Result) -> str:
    """Return commands that trace the fastest counted run to its code."""
    named = {mark: name for name, mark in result.marks.items()}
    run = next((run for run in result.runs if run.name == named.get(FASTEST)), result.runs[0])
    log = shlex.quote(str(run.source.log.path))
    return f"mlbert submission trace {log}\nmlbert submission trace {log} eval_accuracy"


def reproduce_commands(result: Result) -> str:
    """Return commands that repeat the first of our runs;
    empty if its log does not record how it was started.
    """
    log = result.runs[0].source.log
    config = log.value("config_file")
    commit = log.value("commit")
    settings = log.value("configuration")
    if (
        not isinstance(config, str)
        or not config.endswith(".sh")
        or not isinstance(settings, Mapping)
    ):
        return ""
    path = PurePosixPath(config)
    checkout = [f"git checkout {commit}"] if isinstance(commit, str) and commit.isalnum() else []
    extra = [
        f"export {name}={shlex.quote(str(setting['value']))}"
        for name, setting in settings.items()
        if isinstance(setting, Mapping)
        and str(setting.get("origin", "")).startswith(("environment ", "flag "))
        and name not in _PLACES
    ]
    seed = f"export SEED={shlex.quote(str(log.value('seed')))} LOGDIR=$PWD/again EXPERIMENT=0"
    run = "../pytorch/launch/run_and_time.sh"
    begin = [f"cd {shlex.quote(str(path.parent))}", f"source {shlex.quote(path.name)}"]
    return "\n".join([*checkout, *begin, *extra, seed, run])


def as_json(results: Sequence[Result], prices: Prices) -> list[dict[str, Any]]:
    """Return systems as plain values; seconds are time to train, null means unknown or never."""
    return [
        {
            "system": result.system.name,
            "folder": os.fsencode(result.system.folder).decode(errors="replace"),
            "time_to_train": time_to_train(result),
            "meaning": meaning(result),
            "verdict": verdict(results),
            "division": result.logged("submission_division"),
            "olympic_mean_seconds": _known(result.olympic_seconds),
            "score_factor": _known(result.scaling),
            "runs_converged": result.num_converged,
            "target_accuracy": result.target,
            "global_batch_size": result.batch,
            "accelerators": result.accelerators,
            "mean_samples_to_target": result.mean_samples,
            "reference_mean_samples": result.reference.mean_samples if result.reference else None,
            "samples_per_second": result.samples_per_second,
            "training_samples_per_second": result.training_speed,
            "share_of_peak": dict(result.peak_shares),
            "hyperparameters": {key: value.text for key, value in result.hyperparameters.items()},
            "baselines": dict(result.system.baselines),
            "runs": [_run(result, run, prices) for run in result.runs],
            "notes": list(result.system.notes),
        }
        for result in results
    ]


def _run(result: Result, run: ReportedRun, prices: Prices) -> dict[str, Any]:
    numbers = (
        "status",
        "seconds",
        "samples",
        "samples_to_target",
        "accuracy",
        "samples_per_second",
        "training_samples_per_second",
        "restarts",
    )
    return {
        "run": run.name,
        "log": str(run.source.log.path),
        "mark": result.marks.get(run.name),
        **{name: getattr(run, name) for name in numbers},
        **run.last_metrics,
        **_cost(run, prices),
        "times": asdict(run.times) if run.times else None,
        "evaluations": [asdict(evaluation) for evaluation in run.evaluations],
        "speeds": [list(pair) for pair in run.speeds],
    }


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
