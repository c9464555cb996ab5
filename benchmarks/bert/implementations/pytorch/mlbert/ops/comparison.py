"""Compare an implementation of an op with the PyTorch reference, forward and backward. This decides whether a fast
implementation is accurate enough: in the check before a run, in tests and in tools/gpu_check.sh.

The rule: relative to the op in float64, the error of an implementation may be at most twice that of PyTorch in the same
precision. This applies to the root mean square (RMS) error of the output and of each gradient and, if a draw of the
inputs gives at least `NUMBERS` numbers, to the largest error of a draw, averaged over the draws.

PyTorch's error is that of the reference in that precision or, if larger, of the op as in PyTorch's own models, for ops
of which the reference keeps intermediate results in higher precision (attention, the residual sum).

A single draw of few numbers is not enough: of two equally good implementations, one exceeds twice the other's error in
every third draw of a single number. So inputs are drawn until `NUMBERS` results have been compared (`draws_for`), and
the RMS is taken over all of them. The largest error of few numbers, or of one ill-conditioned draw, remains random. In
case PyTorch happens to be exact, `FLOOR_STEPS` of a rounding step of the results' dtype are always allowed.

Legend: T tokens, N heads, H head size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mlbert.ops import forms as registry
from mlbert.ops import reference
from mlbert.ops.dropout import attention_keep_mask, dropout_scale, dropout_threshold, keep_mask

MAX_RATIO = 2.0
FLOOR_STEPS = 0.25
NUMBERS = 256
MIN_DRAWS, MAX_DRAWS = 2, 32


def draws_for(numbers: int) -> int:
    """Return how many draws to make if the smallest result of one draw has this many numbers."""
    return min(MAX_DRAWS, max(MIN_DRAWS, math.ceil(NUMBERS / max(1, numbers)))) if numbers else 1


class _Size:
    """RMS of all added numbers, and the mean over draws of the largest magnitude. NaN stays NaN."""

    def __init__(self) -> None:
        self._draws, self._count, self._squares, self._largest = 0, 0, 0.0, 0.0  # _largest is a sum over draws

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
        worst_ratio: largest ratio of an error to (PyTorch's error + half the floor); passes up to 2. None if one is
            not finite.
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
        self, exact: Mapping[str, Tensor], found: Mapping[str, Tensor], rivals: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """Add one draw: name -> float64 result, ours, and PyTorch's variants, of which the worst counts."""
        for name, wanted in exact.items():
            size, ours, theirs = self._sizes.setdefault(name, (_Size(), _Size(), [_Size() for _ in rivals]))
            size.add(wanted.double())
            ours.add(found[name].double() - wanted.double())
            for error, rival in zip(theirs, rivals, strict=True):
                error.add(rival[name].double() - wanted.double())

    def verdict(self) -> Verdict:
        """Return the result of the rule over all draws."""
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


class Case(Protocol):
    """One call of an op.

    Attributes:
        op: its name in the registry.
        arguments: draw -> the positional arguments, different in each draw, with activations in the dtype to test.
        gradient_of: indices of the arguments to differentiate.
    """

    @property
    def op(self) -> str: ...

    @property
    def arguments(self) -> Callable[[int], tuple[Any, ...]]: ...

    @property
    def gradient_of(self) -> tuple[int, ...]: ...


def compare(case: Case, form: Callable[..., Any], dtype: torch.dtype) -> tuple[Verdict, int, bool]:
    """Apply the rule to as many draws as needed. Return verdict, number of draws, and whether repeated runs agree.

    Args:
        case: the call to compare.
        form: the implementation.
        dtype: of the activations.
    """
    functions = pytorchs_own(case.op, dtype)
    rule = ErrorRule(max(torch.finfo(x.dtype).eps for x in _floats(case.arguments(0))))
    repeats, draw, draws = True, 0, 1
    while draw < draws:
        arguments = case.arguments(draw)
        exact = _results(functions[0], case, arguments, torch.float64)
        found, again = (_results(form, case, arguments, dtype) for _ in range(2))
        rule.add(exact, found, [_results(function, case, arguments, dtype) for function in functions])
        repeats &= all(torch.equal(found[name], again[name]) for name in found)
        draws = draws_for(min(value.numel() for value in exact.values()))
        draw += 1
    return rule.verdict(), draws, repeats


def _floats(arguments: tuple[Any, ...]) -> list[Tensor]:
    """Return the floating-point arguments; the results have the precision of the coarsest, the activations."""
    return [x for x in arguments if isinstance(x, Tensor) and x.is_floating_point()]


def _results(
    function: Callable[..., Any], case: Case, arguments: tuple[Any, ...], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return output and gradients. For float64 all floating-point arguments are converted, else they stay as given."""
    prepared = []
    for place, value in enumerate(arguments):
        if isinstance(value, Tensor) and value.is_floating_point():
            value = (value.double() if dtype == torch.float64 else value.clone()).detach()
            value.requires_grad_(place in case.gradient_of)
        prepared.append(value)
    with torch.enable_grad():
        result = function(*prepared)
        out = result[0] if isinstance(result, tuple) else result
        kept = {"output": out.detach().clone()}
        generator = torch.Generator(out.device).manual_seed(7)
        gradient = torch.randn(out.shape, generator=generator, device=out.device).bfloat16().to(out.dtype)
        gradients = torch.autograd.grad(out, [prepared[place] for place in case.gradient_of], gradient)
    named = {f"gradient of argument {p}": g.detach() for p, g in zip(case.gradient_of, gradients, strict=True)}
    return {**kept, **named}


def _half_attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float,
    key: int,
    rows: Tensor | None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Like `reference.attention`, with products and probabilities in the dtype of qkv, as in PyTorch's eager models."""
    del max_seqlen
    heads, size = qkv.shape[2:]
    bounds, outputs = cu_seqlens.tolist(), [qkv[:0, 0]]
    for start, stop in itertools.pairwise(bounds):
        if start == stop:
            continue
        q, k, v = qkv[start:stop].permute(1, 2, 0, 3)
        scores = (q @ k.transpose(1, 2)) * size**-0.5
        if alibi_slopes is not None:
            place = torch.arange(stop - start, device=qkv.device)
            scores = scores - (alibi_slopes[:, None, None] * (place[:, None] - place).abs()).to(scores.dtype)
        weights = torch.softmax(scores.float(), dim=-1).to(qkv.dtype)
        if threshold := dropout_threshold(dropout_p):
            assert rows is not None, "dropout needs rows"
            keep = attention_keep_mask(key, rows[start:stop], heads, stop - start, dropout_p)
            weights = torch.where(keep, weights * dropout_scale(threshold), 0.0)
        outputs.append((weights @ v).transpose(0, 1))
    outputs.append(qkv.new_zeros(qkv.shape[0] - bounds[-1], heads, size))
    return torch.cat(outputs)


def _half_dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dropout_p: float,
    key: int,
    rows: Tensor | None,
    x_bias: Tensor | None = None,
) -> Tensor:
    """Like `reference.dropout_add_layer_norm`, with sums in the dtype of x, as in PyTorch's eager models."""
    total = x if x_bias is None else x + x_bias.to(x.dtype)
    if threshold := dropout_threshold(dropout_p):
        assert rows is not None, "dropout needs rows"
        total = torch.where(keep_mask(key, rows, x.shape[-1], dropout_p), total * dropout_scale(threshold), 0.0)
    return F.layer_norm((residual + total).float(), x.shape[-1:], weight.float(), bias.float(), eps).to(x.dtype)


_EAGER: dict[str, Callable[..., Any]] = {
    "attention": _half_attention,
    "dropout_add_layer_norm": _half_dropout_add_layer_norm,
}


def pytorchs_own(op: str, dtype: torch.dtype) -> list[Callable[..., Any]]:
    """Return PyTorch's variants of an op: the reference and, below float32, the op as in PyTorch's eager models."""
    eager = [_EAGER[op]] if op in _EAGER and dtype != torch.float32 else []
    plain: Callable[..., Any] = getattr(reference, op, None) or registry.form(op, "plain")
    return [plain, *eager]
