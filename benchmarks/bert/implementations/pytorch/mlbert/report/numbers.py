"""The numbers of a report for other programs."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mlbert.report.results import Result
from mlbert.report.runs import Run
from mlbert.report.tables import meaning, time_to_train, verdict


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """A list of systems in plain values; seconds are of time to train, null is unknown or never."""
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
            "runs": [_run(result, run) for run in result.runs],
            "notes": list(result.system.notes),
        }
        for result in results
    ]


def _run(result: Result, run: Run) -> dict[str, Any]:
    return {
        "run": run.name,
        "log": str(run.source.log.path),
        "status": run.status,
        "mark": result.marks.get(run.name),
        "seconds": run.seconds,
        "samples": run.samples,
        "samples_to_target": run.samples_to_target,
        "accuracy": run.accuracy,
        "samples_per_second": run.samples_per_second,
        "times": asdict(run.times) if run.times else None,
        "evaluations": [asdict(evaluation) for evaluation in run.evaluations],
        "speeds": [list(pair) for pair in run.speeds],
    }


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
