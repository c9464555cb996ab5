"""Compares an implementation of an op with its plain twin by the rule of `mlbert.ops.error_rule`, forward and backward.

PyTorch's own at a precision is the twin itself in it, and, where the twin keeps more between its parts than PyTorch's
own models do (attention, the residual sum), the op in such steps too.

Legend: T tokens, N heads, H head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mlbert.ops import reference, registry
from mlbert.ops.dropout import attention_keep_mask, dropout_scale, dropout_threshold, keep_mask
from mlbert.ops.error_rule import ErrorRule, Verdict, draws_for


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
