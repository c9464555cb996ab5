"""Compare the measurements of two sets of runs, A and B, with the exact Mann-Whitney test.

The ratio is the Hodges-Lehmann estimate: the median of every run of B over every run of A. Its
interval uses the same ratios and the distribution of the test (Hollander, Wolfe, Chicken:
Nonparametric Statistical Methods, 4.3), so without ties it excludes 1 exactly if the test finds a
difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

LEVEL = 0.05  # of significance, two-sided
FEWEST_RUNS = 3  # per side, needed for a significance test
# Above which U is taken as normal: the exact distribution takes minutes and differs little
_MANY_PAIRS = 2500


@dataclass(frozen=True)
class Ratio:
    """The ratio of B to A."""

    value: float
    low: float | None  # of the 95 % interval (None with too few runs)
    high: float | None
    p: float | None  # two-sided (None with too few runs)

    @property
    def is_significant(self) -> bool:
        """Return True if the sides differ at the 5 % level."""
        return self.p is not None and self.p < LEVEL


def compare(a: Sequence[float], b: Sequence[float]) -> Ratio | None:
    """Compare positive numbers, one per run. Returns None if a side is empty."""
    if not a or not b:
        return None
    ratios = np.sort(np.divide.outer(np.asarray(b, float), np.asarray(a, float)).ravel())
    value = float(np.median(ratios))
    if min(len(a), len(b)) < FEWEST_RUNS:
        return Ratio(value, None, None, None)
    from scipy.stats import mannwhitneyu

    num_values = len({*a, *b})
    is_exact = num_values == len(a) + len(b) and len(a) * len(b) <= _MANY_PAIRS
    method = "exact" if is_exact else "asymptotic"  # the asymptotic test corrects for ties
    p = float(mannwhitneyu(a, b, method=method).pvalue) if num_values > 1 else 1.0
    cut = _cut(len(a), len(b))
    low, high = (float(ratios[cut]), float(ratios[-1 - cut])) if cut is not None else (None, None)
    return Ratio(value, low, high, p)


def _cut(num_a: int, num_b: int) -> int | None:
    """Return how many of the sorted ratios at each end are outside the 95 % interval,
    or None if it is unbounded.
    """
    if num_a * num_b > _MANY_PAIRS:
        mean = num_a * num_b / 2
        variance = num_a * num_b * (num_a + num_b + 1) / 12
        return int(mean - NormalDist().inv_cdf(1 - LEVEL / 2) * math.sqrt(variance))
    # Number of ways to get each U: the product of (1 - x^(num_a + i)) / (1 - x^i),
    # Mann and Whitney 1947.
    ways = [1] + [0] * (num_a * num_b)
    for i in range(1, num_b + 1):
        for u in range(len(ways) - 1, num_a + i - 1, -1):
            ways[u] -= ways[u - num_a - i]
        for u in range(i, len(ways)):
            ways[u] += ways[u - i]
    total = math.comb(num_a + num_b, num_a)
    tail = 0
    for u, count in enumerate(ways):
        tail += count
        if 2 * tail > LEVEL * total:  # P(U <= u) is more than 2.5 %
            return u - 1 if u else None
    return None
