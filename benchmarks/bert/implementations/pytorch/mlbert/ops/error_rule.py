"""When a fast implementation is exact enough, in one place: for the proof before a run, tests and tools/gpu_check.sh.

The rule: against the op in float64, the error of an implementation is at most twice that of PyTorch in the same
precision. That holds for the root mean square error of the output and of each gradient, and where a draw of the inputs
gives at least `NUMBERS` numbers, for the largest one of a draw, averaged over the draws.

A single draw of few numbers does not do: their error is chance, and of two equally good implementations one exceeds
twice the other's in every third draw of a single number. So inputs are drawn until `NUMBERS` results have been compared
(`draws_for`), and the root mean square runs over all of them; the largest of few, or of a single ill-conditioned draw,
stays chance. Where PyTorch happens to be exact, `FLOOR_STEPS` of a rounding step of the results' type are
allowed besides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

MAX_RATIO = 2.0
FLOOR_STEPS = 0.25
NUMBERS = 256
MIN_DRAWS, MAX_DRAWS = 2, 32


def draws_for(numbers: int) -> int:
    """How often to draw the inputs where the smallest result of one draw has so many numbers."""
    return min(MAX_DRAWS, max(MIN_DRAWS, math.ceil(NUMBERS / max(1, numbers)))) if numbers else 1


class _Size:
    """Root mean square of what was added, and the mean of each draw's largest magnitude; NaN stays NaN."""

    def __init__(self) -> None:
        self._draws, self._count, self._squares, self._largest = 0, 0, 0.0, 0.0  # the last a sum over draws

    def add(self, x: Tensor) -> None:
        self._draws += 1
        if x.numel():
            self._count += x.numel()
            self._squares += float(x.square().sum())
            self._largest += float(x.abs().max())

    def is_large(self) -> bool:
        """Whether each draw has held enough numbers for a rule on the largest."""
        return self._count >= NUMBERS * self._draws

    def values(self) -> tuple[float, float]:
        return math.sqrt(self._squares / max(1, self._count)), self._largest / max(1, self._draws)


@dataclass(frozen=True)
class Verdict:
    """What the rule says.

    Attributes:
        passed: it holds.
        worst_ratio: an error to PyTorch's and half the floor, at most 2; None where one is not finite.
        errors: result -> (relative root mean square error, PyTorch's).
        why: the first violation in words, empty where there is none.
    """

    passed: bool
    worst_ratio: float | None
    errors: dict[str, tuple[float, float]]
    why: str


class ErrorRule:
    """Collects draws; `verdict` applies the rule of the module docstring to all of them.

    Args:
        eps: rounding step of the results' type, relative (`torch.finfo(dtype).eps`).
    """

    def __init__(self, eps: float) -> None:
        self._floor = FLOOR_STEPS * eps
        # Result -> its size, our error's, and that of PyTorch in each way.
        self._sizes: dict[str, tuple[_Size, _Size, list[_Size]]] = {}

    def add(
        self, exact: Mapping[str, Tensor], found: Mapping[str, Tensor], rivals: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """One draw: name -> float64 result, ours, and PyTorch's in one or several ways, of which the worst counts."""
        for name, wanted in exact.items():
            size, ours, theirs = self._sizes.setdefault(name, (_Size(), _Size(), [_Size() for _ in rivals]))
            size.add(wanted.double())
            ours.add(found[name].double() - wanted.double())
            for error, rival in zip(theirs, rivals, strict=True):
                error.add(rival[name].double() - wanted.double())

    def verdict(self) -> Verdict:
        """The rule over all draws."""
        ratios, table, why = [0.0], {}, ""
        for name, (size, ours, theirs) in self._sizes.items():
            scales, errors = size.values(), ours.values()
            rivals = [max(values) for values in zip(*(their.values() for their in theirs), strict=True)]
            kinds = ("rms", "largest") if size.is_large() else ("rms",)
            for kind, error, rival, scale in zip(kinds, errors, rivals, scales, strict=False):
                allowed = MAX_RATIO * rival + self._floor * scale
                # Written so that NaN fails.
                if not error <= allowed:
                    why = why or f"{name}: {kind} error {error:.3e} is more than twice PyTorch's {rival:.3e}"
                ratios.append((MAX_RATIO * error / allowed if allowed else math.inf) if error else 0.0)
            table[name] = (errors[0] / (scales[0] or 1.0), rivals[0] / (scales[0] or 1.0))
        worst = max(ratios) if all(map(math.isfinite, ratios)) else None
        return Verdict(not why, worst, table, why)
