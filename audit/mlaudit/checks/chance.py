"""How often honest runs look alike by chance, so that `duplicate_runs` accuses none.

Numbers (accuracies, sample counts). The values of a set are multiples of a step: 1 / predictions,
10^-digits of a rounded log, or the batch size. The model: if the differences of two independent
runs are at most h in each of L evaluations in a row, they are equally likely to be any multiple of
the step from -h to h. So a set whose other pairs have N such stretches is expected to have

    E = max over h of N(h, L) x ((2 floor(t / step) + 1) / (2 floor(h / step) + 1)) ^ L

stretches that agree to within t. N is counted, so runs that are close for other reasons than
copying (a plateau, a grid of few values) raise E. If the other pairs agree in a share q of their n
close evaluations, E is at least n x q ^ L: diverged runs take few values.

Times. Interval i of run k is f_k x T_i plus noise: a speed of the run, a pattern that all runs
share, and noise that is independent between runs. If the noise of one of two runs has at most the
density D (per ms), their intervals agree to within t with a probability of at most
p = D x (2 t + resolution), whatever the noise of the other. M windows of L intervals, of which one
decides the factor, are expected to contain

    E = M x p ^ (L - 1)

proportional ones. D is measured: the steepest third of a run's noise, also of its second
differences, which a slow drift does not hide. An even machine has a large D, and its intervals
prove nothing.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

# Differences h at which stretches are counted. The accuracies of two published runs are apart by
# 0.0005, and those of small runs by 0.003.
ACCURACY_WIDTHS = (5e-5, 2e-4, 1e-3, 5e-3, 2e-2)
CLOSE_ACCURACIES = 5e-3
COUNT_WIDTHS = (0.0, 10.0, 100.0, 1e3, 1e4, 1e5)
SMALLEST_STEP = 1e-6  # of accuracies: an evaluation makes at most 760,000 predictions
_MAX_VALUES = 4000  # of which the step is measured
_FEWEST_RUNS = 4  # that show which pattern of intervals is shared
_FEWEST_INTERVALS = 5  # that show the noise of a run
_DENSEST = 1 / 3  # share of a run's noise in which its density is measured
_SECOND_DIFFERENCE = math.sqrt(1.5)  # its spread, relative to that of the values


def accuracy_step(values: Iterable[float]) -> float:
    """Return the smallest difference of accuracies, at least `SMALLEST_STEP`."""
    distinct = sorted(set(values))[:_MAX_VALUES]
    gaps = [after - before for before, after in itertools.pairwise(distinct)]
    return max(SMALLEST_STEP, min(gaps, default=SMALLEST_STEP))


def count_step(values: Iterable[float]) -> int:
    """Return the largest number that divides all sample counts, 1 if a count is not an integer."""
    whole = [int(value) if value == int(value) else 1 for value in values]
    return math.gcd(*whole) or 1


def chance_of_match(step: float, tolerance: float, width: float) -> float:
    """Return the share of the multiples of ``step`` within ``width`` that are a match."""
    matching = 2 * math.floor(tolerance / step + 1e-6) + 1
    possible = 2 * math.floor(width / step + 1e-6) + 1
    return min(1.0, matching / possible)


def count_stretches(
    differences: Sequence[float] | np.ndarray, length: int, widths: Sequence[float]
) -> np.ndarray:
    """Return N for each h: the stretches of ``length`` differences in a row that are at most h.

    Args:
        differences: of two runs, one per evaluation; or a matrix of every evaluation of one run
            against every one of the other, of which the diagonals count.
        length: number of evaluations, L.
        widths: values of h.
    """
    apart = np.abs(np.atleast_2d(np.asarray(differences, float)))
    is_row = apart.shape[0] == 1
    return np.array([_windows(apart <= width, length, is_row) for width in widths])


def expected_stretches(
    counts: np.ndarray, length: int, step: float, tolerance: float, widths: Sequence[float]
) -> float:
    """Return E: how many stretches that agree to within ``tolerance`` honest sets have.

    Args:
        counts: N for each h, of the other pairs of the set.
        length: number of evaluations, L.
        step: of the values.
        tolerance: largest difference that counts as a match, t.
        widths: values of h.
    """
    powers = [chance_of_match(step, tolerance, width) ** length for width in widths]
    return max(float(count) * power for count, power in zip(counts, powers, strict=True))


def expected_repeats(equal: float, close: float, length: int) -> float:
    """Return E if any stretch of close differences matches as often as those of other pairs do."""
    return close * (equal / close) ** length if close else 0.0


def _windows(near: np.ndarray, length: int, is_row: bool) -> int:
    """Count stretches of ``length`` true values in a row or, of a matrix, in its diagonals."""
    rows, columns = near.shape
    down = 0 if is_row else 1
    if columns < length or (not is_row and rows < length):
        return 0
    together = np.ones((rows - down * (length - 1), columns - length + 1), dtype=bool)
    for index in range(length):
        last_row = rows - down * (length - 1 - index)
        last_column = columns - (length - 1 - index)
        together &= near[down * index : last_row, index:last_column]
    return int(together.sum())


def noise_of_intervals(runs: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return each run's intervals minus its share of the pattern that all runs have, in ms.

    Empty if there are fewer than four runs. Intervals that fewer than four runs have are left out.
    """
    timed = [run for run in runs if len(run) >= _FEWEST_INTERVALS]
    if len(timed) < _FEWEST_RUNS:
        return [[] for _ in runs]
    lengths = sorted((len(run) for run in timed), reverse=True)
    usable = lengths[_FEWEST_RUNS - 1]
    usual = [statistics.median(run[i] for run in timed if len(run) > i) for i in range(usable)]
    factors = [_factor(run, usual) for run in runs]
    pattern = [
        statistics.median(
            run[i] / factor for run, factor in zip(runs, factors, strict=True) if len(run) > i
        )
        for i in range(usable)
    ]
    return [
        [value - factor * shared for value, shared in zip(run, pattern, strict=False)]
        for run, factor in zip(runs, factors, strict=True)
    ]


def _factor(run: Sequence[float], usual: Sequence[float]) -> float:
    ratios = [value / other for value, other in zip(run, usual, strict=False) if other > 0]
    return max(statistics.median(ratios), 1e-9) if ratios else 1.0


def density_of(noise: Sequence[float]) -> float:
    """Return D, the largest density of a run's noise per ms; infinite with too few intervals."""
    if len(noise) < _FEWEST_INTERVALS:
        return math.inf
    curved = [
        (here - (before + after) / 2) / _SECOND_DIFFERENCE
        for before, here, after in zip(noise, noise[1:], noise[2:], strict=False)
    ]
    return max(_steepest(noise), _steepest(curved) if len(curved) >= _FEWEST_INTERVALS else 0.0)


def _steepest(values: Sequence[float]) -> float:
    """Return the density in the shortest range that holds a third of the values, at least three."""
    ordered = sorted(values)
    number = max(3, math.ceil(_DENSEST * len(ordered)))
    width = min(last - first for first, last in zip(ordered, ordered[number - 1 :], strict=False))
    return (number - 1) / len(ordered) / width if width > 0 else math.inf


def time_step(intervals: Iterable[float]) -> float:
    """Return the resolution of time stamps in ms, such as 1000 if all are whole seconds."""
    return float(math.gcd(*(round(value) for value in intervals)) or 1)


def length_needed(chance: float, probability: float, windows: int) -> float:
    """Return the smallest L with windows x probability^(L - 1) <= chance, or infinity."""
    if probability >= 1 or windows < 1:
        return math.inf
    if probability <= 0:
        return 2
    return 1 + math.ceil(max(0.0, math.log(chance / windows) / math.log(probability)))
