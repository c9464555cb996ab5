"""The chance of a token to be predicted, as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# From the share of training that is done (0 to 1) to the share of the way from the first rate to the last.
SHAPES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda done: 0.0,
    "linear": lambda done: done,
    "cosine": lambda done: 0.5 * (1.0 - math.cos(math.pi * done)),
    "step": lambda done: float(done >= 0.5),
}


@dataclass(frozen=True)
class MaskingRate:
    """From ``first`` at step 0 to ``last`` at step ``max_steps`` and beyond."""

    schedule: str  # a name of `SHAPES`
    first: float
    last: float
    max_steps: int  # 1 or more

    def __call__(self, step: int) -> float:
        """The rate of the update before which ``step`` were done."""
        return self.first + SHAPES[self.schedule](min(step / self.max_steps, 1.0)) * (self.last - self.first)
