"""Check every implementation of every op against its plain reference,
by the rule of `mlbert.ops.comparison`.

Legend: S sequences, T tokens, N heads, H head size, R rows, F columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mlbert.config.bert_config import BertConfig
from mlbert.distributed.sharding import ShardLayout
from mlbert.models.bert import BertForPreTraining
from mlbert.ops import forms as registry
from mlbert.ops.api import dropout_key
from mlbert.ops.comparison import FLOOR_STEPS, MAX_RATIO, compare
from mlbert.ops.dropout import dropout_scale, dropout_threshold
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb
from op_cases import Case, OpCases
from reference_optimizers import ReferenceLamb

LAMB_STEPS = 2
MAX_DEVIATIONS = 5.0  # allowed deviation of a dropout rate, in standard deviations
E4M3_LARGEST = 448.0


def check_rows(
    config: BertConfig, cases: OpCases
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield the checks of all implementations but plain, then of LAMB and casts;
    each result has ``passed``.
    """
    forms = registry.available(cases.device)
    head_cases = [cases.attention(0.1), cases.attention(0.0), cases.attention(0.1, alibi=True)]
    for case in [*head_cases, *cases.all()[1:]]:
        for form in forms[case.op]:
            if form != "plain":
                yield f"{case.name}: {form}", partial(check_case, case, form, cases.dtype)
    for form in forms["attention"]:
        yield f"attention dropout rate: {form}", partial(check_dropout_rate, form, cases)
    yield "LAMB", lambda: check_lamb(config, cases.device)
    if any("triton" in names for names in forms.values()):
        yield "cast_transpose to FP8", lambda: check_cast(cases)


def check_case(case: Case, form: str, dtype: torch.dtype) -> dict[str, Any]:
    """Check the errors of an implementation over several draws,
    and that two runs give the same bits.

    Returns:
        `mlbert.ops.comparison.Verdict` as a dictionary, with ``draws``, the number of draws,
            and ``repeats``: whether
        two runs of each draw agreed.
    """
    verdict, draws, repeats = compare(
        case.op, case.arguments, case.gradient_of, registry.form(case.op, form), dtype
    )
    passed = verdict.passed and repeats
    return {**asdict(verdict), "passed": passed, "draws": draws, "repeats": repeats}


def check_dropout_rate(form: str, cases: OpCases) -> dict[str, Any]:
    """Check the share of attention weights kept: with Q = 0 and V = 1,
    the outputs are that share times the scale.
    """
    qkv = cases.attention(0.1).arguments(0)[0].zero_()
    qkv[:, 2] = 1.0
    batch = cases.batch
    wanted_p = 0.1
    key = dropout_key(11, 1, 2, 3)
    out = registry.form("attention", form)(
        qkv, batch.cu_seqlens, batch.max_seqlen, wanted_p, key, batch.dropout_rows
    )
    used = int(batch.cu_seqlens[-1])
    lengths = torch.diff(batch.cu_seqlens).double()
    # A token in a sequence of n tokens averages n draws per head; all channels of a head are equal.
    by_token = out[:used].double()[..., 0].mean(1)
    weight = torch.repeat_interleave(lengths, lengths.long()).to(by_token.device)
    threshold = dropout_threshold(wanted_p)
    rate = float((by_token * weight).sum() / weight.sum()) / dropout_scale(threshold)
    wanted = 1 - threshold / 256
    draws = float((lengths**2).sum()) * qkv.shape[2]
    deviations = abs(rate - wanted) / math.sqrt(wanted * (1 - wanted) / draws)
    # bfloat16 rounds the outputs; over all tokens the rounding averages out to far less than this.
    rounding = float(torch.finfo(qkv.dtype).eps) / 16
    passed = abs(rate - wanted) < rounding or deviations < MAX_DEVIATIONS
    return {
        "passed": bool(passed),
        "kept": rate,
        "wanted": wanted,
        "deviations": deviations,
        "draws": draws,
    }


def check_lamb(config: BertConfig, device: torch.device) -> dict[str, Any]:
    """Check the fast LAMB's weights: their error against float64 must be close to the plain
    LAMB's.
    """
    weights, grads = _lamb_problem(config, device)
    numbers: dict[str, Any] = {
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
    }
    exact = ReferenceLamb({name: value.double() for name, value in weights.items()}, **numbers)
    for _ in range(LAMB_STEPS):
        exact.step(1e-3, {name: grad.double() for name, grad in grads.items()})
    target = torch.cat([value.flatten() for value in exact.weights.values()])
    errors: dict[str, float] = {}
    used: dict[str, Tensor] = {}
    for implementation in ("plain", "auto", "auto"):
        flat = FlatParameters(
            [(name, torch.nn.Parameter(value.clone())) for name, value in weights.items()]
        )
        optimizer = Lamb(
            flat, ShardLayout.whole(flat.numel), **numbers, implementation=implementation
        )
        for name, view in flat.views(flat.grad).items():
            view.copy_(grads[name])
        for _ in range(LAMB_STEPS):
            optimizer.step(1e-3)
        name = optimizer.implementation
        repeats = torch.equal(used[name], flat.data) if name in used else None
        used[name] = flat.data
        errors[name] = float((flat.data.double() - target).norm() / target.norm())
    floor = torch.finfo(torch.float32).eps * FLOOR_STEPS
    passed = (
        all(error <= MAX_RATIO * errors["plain"] + floor for error in errors.values()) and repeats
    )
    return {
        "passed": bool(passed),
        "relative_errors": errors,
        "repeats": repeats,
        "implementation": name,
    }


def _lamb_problem(
    config: BertConfig, device: torch.device
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with torch.device(device):
        model = BertForPreTraining(config)
    generator = torch.Generator(device).manual_seed(3)
    weights = {name: parameter.detach() for name, parameter in model.ordered_parameters()}
    grads = {
        name: torch.randn(value.shape, generator=generator, device=device) * 1e-3
        for name, value in weights.items()
    }
    return weights, grads


def check_cast(cases: OpCases) -> dict[str, Any]:
    """Check that `cast_transpose` returns PyTorch's FP8 bits, by rows and transposed,
    and the largest magnitude.
    """
    from mlbert.ops.triton.cast import cast_transpose

    x = cases.random(cases.batch.num_tokens, cases.config.intermediate_size)
    scale = torch.full((), 200.0, device=cases.device)
    amax = torch.zeros((), device=cases.device)
    copies = cast_transpose(x, scale, amax, torch.float8_e4m3fn)
    expected = (
        (x.float() * scale)
        .clamp(-E4M3_LARGEST, E4M3_LARGEST)
        .to(torch.float8_e4m3fn)
        .view(torch.uint8)
    )
    different = int((copies.rows.view(torch.uint8) != expected).sum())
    # Rows of the transposed copy may be padded with zeros.
    columns = torch.zeros_like(copies.columns.view(torch.uint8))
    columns[:, : len(expected)] = expected.t()
    different += int((copies.columns.view(torch.uint8) != columns).sum())
    right_amax = bool(amax == x.float().abs().max())
    return {
        "passed": different == 0 and right_amax,
        "different": different,
        "of": 2 * x.numel(),
        "amax": right_amax,
    }
