"""Whether two sets of runs differ: Mann and Whitney's exact test, and the interval that goes with it.

The ratio is Hodges and Lehmann's: the median of every run of B over every run of A. Its interval is made of the same
ratios by the test's own distribution (Hollander, Wolfe, Chicken: Nonparametric Statistical Methods, 4.3), so that it
leaves out 1 where the test finds a difference, ties apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

LEVEL = 0.05
FEWEST_RUNS = 3  # a side, below which nothing is told
_MANY_PAIRS = 2500  # of runs, above which U counts as normal: its exact distribution takes minutes, and differs little


@dataclass(frozen=True)
class Ratio:
    """B over A."""

    value: float
    low: float | None  # of the 95 % interval; None where so few runs have none
    high: float | None
    p: float | None  # two-sided; None where there are too few runs

    @property
    def is_significant(self) -> bool:
        """Whether the sides differ at 5 %."""
        return self.p is not None and self.p < LEVEL


def compare(a: Sequence[float], b: Sequence[float]) -> Ratio | None:
    """Compare positive numbers, one a run; ``None`` where a side has none."""
    if not a or not b:
        return None
    ratios = np.sort(np.divide.outer(np.asarray(b, float), np.asarray(a, float)).ravel())
    value = float(np.median(ratios))
    if min(len(a), len(b)) < FEWEST_RUNS:
        return Ratio(value, None, None, None)
    from scipy.stats import mannwhitneyu

    num_values = len({*a, *b})
    is_exact = num_values == len(a) + len(b) and len(a) * len(b) <= _MANY_PAIRS
    method = "exact" if is_exact else "asymptotic"  # which corrects for ties
    p = float(mannwhitneyu(a, b, method=method).pvalue) if num_values > 1 else 1.0
    cut = _cut(len(a), len(b))
    low, high = (float(ratios[cut]), float(ratios[-1 - cut])) if cut is not None else (None, None)
    return Ratio(value, low, high, p)


def _cut(num_a: int, num_b: int) -> int | None:
    """How many of the sorted ratios lie outside the 95 % interval at either end; ``None`` if it has no end."""
    if num_a * num_b > _MANY_PAIRS:
        mean, variance = num_a * num_b / 2, num_a * num_b * (num_a + num_b + 1) / 12
        return int(mean - NormalDist().inv_cdf(1 - LEVEL / 2) * math.sqrt(variance))
    # Ways to get each U: the product of (1 - x^(num_a + i)) / (1 - x^i), Mann and Whitney 1947.
    ways = [1] + [0] * (num_a * num_b)
    for i in range(1, num_b + 1):
        for u in range(len(ways) - 1, num_a + i - 1, -1):
            ways[u] -= ways[u - num_a - i]
        for u in range(i, len(ways)):
            ways[u] += ways[u - i]
    total, tail = math.comb(num_a + num_b, num_a), 0
    for u, count in enumerate(ways):
        tail += count
        if 2 * tail > LEVEL * total:  # P(U <= u) is more than 2.5 %
            return u - 1 if u else None
    return None
