"""Compares an implementation of an op with its plain twin by the rule of `mlbert.ops.comparison`, forward and backward.

PyTorch's own at a precision is the twin itself in it, and, where the twin keeps more between its parts than PyTorch's
own models do (attention, the residual sum), the op in such steps too.

Legend: T tokens, N heads, H head size.

When a fast implementation is exact enough, in one place: for the proof before a run, tests and tools/gpu_check.sh.

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

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mlbert.ops import reference, registry
from mlbert.ops.dropout import attention_keep_mask, dropout_scale, dropout_threshold, keep_mask

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


class Case(Protocol):
    """One call of an op.

    Attributes:
        op: its name in the registry.
        arguments: draw -> the positional arguments; floating ones are of the wanted type, other numbers each draw.
        gradient_of: places of the arguments whose gradients are taken.
    """

    @property
    def op(self) -> str: ...

    @property
    def arguments(self) -> Callable[[int], tuple[Any, ...]]: ...

    @property
    def gradient_of(self) -> tuple[int, ...]: ...


def compare(case: Case, form: Callable[..., Any], dtype: torch.dtype) -> tuple[Verdict, int, bool]:
    """The rule over as many draws as it takes: its verdict, how many they were, and whether two runs of each agreed.

    Args:
        case: what is computed.
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
    """The arguments whose precision the results have: the activations', where weights are wider."""
    return [x for x in arguments if isinstance(x, Tensor) and x.is_floating_point()]


def _results(
    function: Callable[..., Any], case: Case, arguments: tuple[Any, ...], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Output and gradients; floats of `dtype` stay so, others are weights, in float32 or the twin's float64."""
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
    """`reference.attention` with products and probabilities in the type of qkv, as PyTorch's eager models compute."""
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
    """`reference.dropout_add_layer_norm` with the sums in the type of x, as PyTorch's eager models compute."""
    total = x if x_bias is None else x + x_bias.to(x.dtype)
    if threshold := dropout_threshold(dropout_p):
        assert rows is not None, "dropout needs rows"
        total = torch.where(keep_mask(key, rows, x.shape[-1], dropout_p), total * dropout_scale(threshold), 0.0)
    return F.layer_norm((residual + total).float(), x.shape[-1:], weight.float(), bias.float(), eps).to(x.dtype)


_IN_STEPS: dict[str, Callable[..., Any]] = {
    "attention": _half_attention,
    "dropout_add_layer_norm": _half_dropout_add_layer_norm,
}


def pytorchs_own(op: str, dtype: torch.dtype) -> list[Callable[..., Any]]:
    """What PyTorch computes an op by in a precision: the plain twin, and the op in the steps of its own models."""
    in_steps = [_IN_STEPS[op]] if op in _IN_STEPS and dtype != torch.float32 else []
    twin: Callable[..., Any] = getattr(reference, op, None) or registry.form(op, "plain")
    return [twin, *in_steps]
