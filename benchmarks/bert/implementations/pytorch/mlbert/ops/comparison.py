"""Compare an implementation of an op with the PyTorch reference, forward and backward.

This decides whether a fast implementation is accurate enough, in the check before a run and in
tests.

The rule: relative to the op in float64, the error of an implementation may be at most twice that of
PyTorch in the same precision. This applies to the root mean square (RMS) error of the output and of
each gradient and, if a draw of the inputs gives at least `NUMBERS` numbers, to the largest error of
a draw, averaged over the draws.

PyTorch's error is that of the reference in that precision or, if larger, of the op as in PyTorch's
own models, for ops of which the reference keeps intermediate results in higher precision
(attention, the residual sum).

A single draw of few numbers is not enough: of two equally good implementations, one exceeds twice
the other's error in every third draw of a single number. So inputs are drawn until `NUMBERS`
results have been compared (`draws_for`), and the RMS is taken over all of them. The largest error
of few numbers, or of one ill-conditioned draw, remains random. In case PyTorch happens to be exact,
`FLOOR_STEPS` of a rounding step of the results' dtype are always allowed.

Legend: T tokens, N heads, H head size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlbert.ops import forms as registry
from mlbert.ops import reference

MAX_RATIO = 2.0
FLOOR_STEPS = 0.25
NUMBERS = 256
MIN_DRAWS = 2
MAX_DRAWS = 32
GRADIENT_SEED = 7
EAGER_IS_NARROWER = ("attention", "dropout_add_layer_norm")
Arguments = Callable[[int], tuple[Any, ...]]  # draw -> positional arguments of an op


def draws_for(numbers: int) -> int:
    """Return how many draws to make if the smallest result of one draw has this many numbers."""
    if not numbers:
        return 1
    needed = math.ceil(NUMBERS / numbers)
    return min(MAX_DRAWS, max(MIN_DRAWS, needed))


class _Size:
    """RMS of all added numbers, and the mean over draws of the largest magnitude. NaN stays NaN."""

    def __init__(self) -> None:
        self._draws = 0
        self._count = 0
        self._squares = 0.0
        self._largest = 0.0  # sum over draws

    def add(self, x: Tensor) -> None:
        self._draws += 1
        if x.numel():
            self._count += x.numel()
            self._squares += float(x.square().sum())
            self._largest += float(x.abs().max())

    def is_large(self) -> bool:
        """Return whether each draw has had enough numbers for the rule on the largest error."""
        return self._count >= NUMBERS * self._draws

    def values(self) -> tuple[float, float]:
        return math.sqrt(self._squares / max(1, self._count)), self._largest / max(1, self._draws)


@dataclass(frozen=True)
class Verdict:
    """Result of the rule.

    Attributes:
        passed: no error is too large.
        worst_ratio: largest ratio of an error to (PyTorch's error + half the floor); passes up to
            2. None if one is not finite.
        errors: result -> (relative RMS error, PyTorch's).
        why: the first violation, or "".
    """

    passed: bool
    worst_ratio: float | None
    errors: dict[str, tuple[float, float]]
    why: str


class ErrorRule:
    """Collect draws; `verdict` applies the rule of the module docstring to all of them.

    Args:
        eps: relative rounding step of the results' dtype (`torch.finfo(dtype).eps`).
    """

    def __init__(self, eps: float) -> None:
        self._floor = FLOOR_STEPS * eps
        # Result -> size of the exact values, of our error, and of each of PyTorch's errors.
        self._sizes: dict[str, tuple[_Size, _Size, list[_Size]]] = {}

    def add(
        self,
        exact: Mapping[str, Tensor],
        found: Mapping[str, Tensor],
        rivals: Sequence[Mapping[str, Tensor]],
    ) -> None:
        """Add one draw: name -> float64 result, ours, and PyTorch's variants,
        of which the worst counts.
        """
        for name, wanted in exact.items():
            if name not in self._sizes:
                self._sizes[name] = (_Size(), _Size(), [_Size() for _ in rivals])
            size, ours, theirs = self._sizes[name]
            size.add(wanted.double())
            ours.add(found[name].double() - wanted.double())
            for error, rival in zip(theirs, rivals, strict=True):
                error.add(rival[name].double() - wanted.double())

    def verdict(self) -> Verdict:
        """Return the result of the rule over all draws."""
        ratios = [0.0]
        table = {}
        why = ""
        for name, (size, ours, theirs) in self._sizes.items():
            scales = size.values()
            errors = ours.values()
            rivals = [
                max(values) for values in zip(*(their.values() for their in theirs), strict=True)
            ]
            kinds = ("rms", "largest") if size.is_large() else ("rms",)
            for kind, error, rival, scale in zip(kinds, errors, rivals, scales, strict=False):
                allowed = MAX_RATIO * rival + self._floor * scale
                # Written so that NaN fails.
                if not error <= allowed and not why:
                    why = (
                        f"{name}: {kind} error {error:.3e} is more than twice PyTorch's {rival:.3e}"
                    )
                ratios.append(_ratio(error, allowed))
            rms = scales[0] or 1.0
            table[name] = (errors[0] / rms, rivals[0] / rms)
        worst = max(ratios) if all(map(math.isfinite, ratios)) else None
        return Verdict(not why, worst, table, why)


def compare(
    op: str,
    drawn: Arguments,
    gradient_of: Sequence[int],
    form: Callable[..., Any],
    dtype: torch.dtype,
) -> tuple[Verdict, int, bool]:
    """Apply the rule to as many draws as needed.

    Return verdict, number of draws, and whether repeated runs agree.

    Args:
        op: its name in the registry.
        drawn: draw -> the positional arguments, different in each draw,
            with activations in the dtype to test.
        gradient_of: indices of the arguments to differentiate.
        form: the implementation.
        dtype: of the activations.
    """
    functions = pytorchs_own(op, dtype)
    floats = (x for x in drawn(0) if isinstance(x, Tensor) and x.is_floating_point())
    # The coarsest are the activations.
    rule = ErrorRule(max(torch.finfo(x.dtype).eps for x in floats))
    repeats = True
    draw = 0
    draws = 1
    while draw < draws:
        arguments = drawn(draw)
        exact = _results(functions[0], arguments, gradient_of, torch.float64)
        found = _results(form, arguments, gradient_of, dtype)
        again = _results(form, arguments, gradient_of, dtype)
        rivals = [_results(function, arguments, gradient_of, dtype) for function in functions]
        rule.add(exact, found, rivals)
        repeats &= all(torch.equal(found[name], again[name]) for name in found)
        draws = draws_for(min(value.numel() for value in exact.values()))
        draw += 1
    return rule.verdict(), draws, repeats


def _results(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    gradient_of: Sequence[int],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return output and gradients.

    For float64 all floating-point arguments are converted, else they stay as given.
    """
    prepared = []
    for place, value in enumerate(arguments):
        if isinstance(value, Tensor) and value.is_floating_point():
            value = (value.double() if dtype == torch.float64 else value.clone()).detach()
            value.requires_grad_(place in gradient_of)
        prepared.append(value)
    with torch.enable_grad():
        result = function(*prepared)
        out = result[0] if isinstance(result, tuple) else result
        kept = {"output": out.detach().clone()}
        generator = torch.Generator(out.device).manual_seed(GRADIENT_SEED)
        gradient = torch.randn(out.shape, generator=generator, device=out.device)
        gradient = gradient.bfloat16().to(out.dtype)
        gradients = torch.autograd.grad(out, [prepared[place] for place in gradient_of], gradient)
    for place, found in zip(gradient_of, gradients, strict=True):
        kept[f"gradient of argument {place}"] = found.detach()
    return kept


def _ratio(error: float, allowed: float) -> float:
    """Return the ratio of an error to (PyTorch's error + half the floor)."""
    if not error:
        return 0.0
    return MAX_RATIO * error / allowed if allowed else math.inf


def pytorchs_own(op: str, dtype: torch.dtype) -> list[Callable[..., Any]]:
    """Return PyTorch's variants of an op: the reference and, below float32,
    the op as in PyTorch's eager models.

    Those compute some ops in the dtype of the activations where the reference computes in float32.
    """
    plain: Callable[..., Any] = getattr(reference, op, None) or registry.form(op, "plain")
    if dtype == torch.float32 or op not in EAGER_IS_NARROWER:
        return [plain]
    return [plain, functools.partial(plain, widen=_unchanged)]


def _unchanged(x: Tensor) -> Tensor:
    return x
