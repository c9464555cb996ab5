"""What the benchmark's reference says of a batch size: its hyper-parameters, and what a mean below its own costs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources

from mlbert.mlperf.rules import RULESET, ReferencePoint

_FILE = f"rcp_checker/training_{RULESET}/rcps_bert.json"


@cache
def _hyperparameters() -> dict[int, dict[str, float]]:
    """Batch size to hyper-parameters, from the official checker's own file."""
    text = resources.files("mlperf_logging").joinpath(_FILE).read_text(encoding="utf-8")
    return {int(point["BS"]): point["Hyperparams"] for point in json.loads(text).values()}


def nearest_hyperparameters(global_batch_size: float) -> tuple[int, Mapping[str, float]]:
    """Those of the reference point with the most similar batch size, and that batch size."""
    known = _hyperparameters()
    batch = min(known, key=lambda size: max(size / global_batch_size, global_batch_size / size))
    return batch, known[batch]


def scaling(mean_samples: float, point: ReferencePoint) -> float | None:
    """What the official score multiplies the time by: more than 1 where a submission needed fewer samples than the
    reference, None where it needed too few."""
    if mean_samples < point.min_mean_samples:
        return None
    return max(point.mean_samples / mean_samples, 1.0)
