"""A reference convergence point of the rules, and the fewest samples that pass with it."""

from __future__ import annotations

import math
from dataclasses import dataclass

_SUBMISSION_RUNS_SCORED = 8  # of ten, without the fastest and the slowest
# Student's t, by degrees of freedom.
_ONE_SIDED_T_95 = {24: 1.710882, 26: 1.705618, 27: 1.703288}


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
