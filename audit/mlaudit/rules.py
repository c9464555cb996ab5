"""MLPerf Training rules for BERT: target, evaluation grid, reference convergence points, scoring.

Those of round v5.0, the last with BERT; `mlaudit.rounds` says what earlier rounds had instead.

Sources: mlcommons/training_policies (rules of the v5.0 round) and mlcommons/logging
(``rcps_bert.json`` of each ruleset, read from the installed package).
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

RULESET = "5.0.0"
# MLCommons requires this note next to every result that it has not verified.
UNVERIFIED = "Result not verified by MLCommons Association."
BENCHMARK = "bert"
TARGET_MLM_ACCURACY = 0.720
# Accuracy of the benchmark's phase-1 checkpoint on the benchmark's evaluation samples.
INITIAL_MLM_ACCURACY = 0.34085
NUM_EVAL_SAMPLES = 10_000
NUM_RESULT_FILES = 10
# The closed division's model, by the names that configurations of BERT give its sizes.
REFERENCE_MODEL = {
    "vocab_size": 30522,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}

_EVAL_INTERVAL_UNIT = 25_000
_SUBMISSION_RUNS_SCORED = NUM_RESULT_FILES - 2
_INTERPOLATED_RUNS = 20
_ONE_SIDED_T_95 = {24: 1.710882, 26: 1.705618, 27: 1.703288}


def global_batch_size(train_batch_size: int, world_size: int, average_packing_rate: float) -> int:
    """Return the nominal sequences per step over all ranks:
    packs per rank x ranks x nominal sequences per pack.
    """
    return round(train_batch_size * world_size * average_packing_rate)


def eval_interval(global_batch_size: int) -> int:
    """Return the distance between evaluations in the closed division, in training sequences.

    Formula in the rules: ``floor(0.05 * (230.23 * GBS + 3,000,000) / 25,000) * 25,000``.
    """
    return (
        math.floor(0.05 * (230.23 * global_batch_size + 3_000_000) / _EVAL_INTERVAL_UNIT)
        * _EVAL_INTERVAL_UNIT
    )


def olympic_mean(values: Sequence[float]) -> float:
    """Return the mean without one smallest and one largest value.

    Pass ``math.inf`` for an unconverged run.

    Raises:
        ValueError: fewer than three values.
    """
    if len(values) < 3:
        raise ValueError(f"an olympic mean needs at least 3 values, got {len(values)}")
    return math.fsum(sorted(values)[1:-1]) / (len(values) - 2)


@dataclass(frozen=True)
class ReferencePoint:
    """A reference convergence point (RCP): how many samples the reference code needs at one batch
    size.
    """

    global_batch_size: int  # sequences per step
    mean_samples: float  # olympic mean of the samples to 0.720 over the reference runs
    stdev_samples: float  # over all reference runs
    num_runs: int = 18  # in the olympic mean
    pruned: bool = False  # True if the official checker uses the point

    @property
    def min_mean_samples(self) -> float:
        """Return the smallest olympic mean that passes: one-sided t-test at 5 %, 8 scored runs."""
        t_limit = _ONE_SIDED_T_95[self.num_runs + _SUBMISSION_RUNS_SCORED - 2]
        spread = math.sqrt(1 / self.num_runs + 1 / _SUBMISSION_RUNS_SCORED)
        return self.mean_samples - t_limit * self.stdev_samples * spread


@cache
def reference_points(ruleset: str = RULESET) -> tuple[ReferencePoint, ...]:
    """Return the points of a ruleset by batch size. Ruleset 0.7.0 has none."""
    name = f"rcp_checker/training_{ruleset}/rcps_bert.json"
    file = resources.files("mlperf_logging").joinpath(name)
    if not file.is_file():
        return ()
    records = json.loads(file.read_text(encoding="utf-8")).values()
    points = sorted(map(_point_of, records), key=lambda point: point.global_batch_size)
    used = _pruned(points)
    return tuple(replace(point, pruned=point in used) for point in points)


def _point_of(record: Mapping[str, Any]) -> ReferencePoint:
    samples = record["Epochs to converge"]
    return ReferencePoint(
        global_batch_size=record["BS"],
        mean_samples=olympic_mean(samples),
        stdev_samples=statistics.pstdev(samples),
        num_runs=len(samples) - 2,
    )


def _pruned(points: Sequence[ReferencePoint]) -> list[ReferencePoint]:
    """Return the points that the official checker uses: from the fastest on, without those above
    the line between their neighbors.

    After it leaves out a point, the checker continues with the next pair of neighbors and does not
    look back, so the rest need not be convex.
    """
    fastest = min(points, key=lambda point: point.mean_samples)
    kept = [point for point in points if point.global_batch_size >= fastest.global_batch_size]
    index = 1
    while index < len(kept) - 1:
        point = kept[index]
        line = _interpolate(point.global_batch_size, kept[index - 1], kept[index + 1])
        if point.mean_samples > line.mean_samples:
            del kept[index]
        else:
            index += 1
    return kept


def reference_point(global_batch_size: int, ruleset: str = RULESET) -> ReferencePoint | None:
    """Return the point for a batch size: exact or interpolated, the smallest one below all points,
    None above them, and in ruleset 0.7.0.
    """
    points = [point for point in reference_points(ruleset) if point.pruned]
    if not points:
        return None
    if global_batch_size <= points[0].global_batch_size:
        return points[0]
    for low, high in itertools.pairwise(points):
        if global_batch_size == high.global_batch_size:
            return high
        if global_batch_size < high.global_batch_size:
            return _interpolate(global_batch_size, low, high)
    return None


def _interpolate(
    global_batch_size: int, low: ReferencePoint, high: ReferencePoint
) -> ReferencePoint:
    share = (global_batch_size - low.global_batch_size) / (
        high.global_batch_size - low.global_batch_size
    )
    mean = low.mean_samples + share * (high.mean_samples - low.mean_samples)
    stdev = low.stdev_samples + share * (high.stdev_samples - low.stdev_samples)
    return ReferencePoint(global_batch_size, mean, stdev, num_runs=_INTERPOLATED_RUNS)
