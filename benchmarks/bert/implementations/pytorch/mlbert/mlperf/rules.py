"""MLPerf Training rules for BERT, ruleset 5.0.0: target, evaluation grid,
reference convergence points.

Only what a training program needs: `mlaudit` judges by its own rules.

Sources: mlcommons/training_policies (rules of the v5.0 round)
and mlcommons/logging (``rcps_bert.json``).
"""

from __future__ import annotations

import itertools
import math

from mlbert.mlperf.reference_point import ReferencePoint

# MLCommons requires this note next to every result that it has not verified.
UNVERIFIED = "Result not verified by MLCommons Association."
BENCHMARK = "bert"
TARGET_MLM_ACCURACY = 0.720
# Accuracy of the benchmark's phase-1 checkpoint on the benchmark's evaluation samples.
INITIAL_MLM_ACCURACY = 0.34085
NUM_EVAL_SAMPLES = 10_000

_EVAL_INTERVAL_UNIT = 25_000
_INTERPOLATED_RUNS = 20
REFERENCE_POINTS: tuple[ReferencePoint, ...] = (
    ReferencePoint(256, 2549219.556, 218406.134),
    ReferencePoint(448, 2414421.333, 197392.477, num_runs=21, pruned=True),
    ReferencePoint(1536, 2776278.222, 82207.527),
    ReferencePoint(3072, 2764498.667, 166119.340),
    ReferencePoint(4096, 2843989.333, 116600.106),
    ReferencePoint(4608, 2798080.000, 130963.705, pruned=True),
    ReferencePoint(6144, 3319125.333, 146691.136, pruned=True),
    ReferencePoint(6912, 3601920.000, 121792.777, pruned=True),
    ReferencePoint(8192, 4186112.000, 88430.923),
    ReferencePoint(8704, 4273706.667, 134042.404),
    ReferencePoint(12288, 4465066.667, 88564.045, pruned=True),
    ReferencePoint(13056, 4645333.333, 179017.324, pruned=True),
    ReferencePoint(16384, 5505422.222, 144642.709, pruned=True),
)


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


def reference_point(global_batch_size: int) -> ReferencePoint | None:
    """Return the point for a batch size: exact or interpolated, the smallest one below 448,
    None above 16384.
    """
    points = [point for point in REFERENCE_POINTS if point.pruned]
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
