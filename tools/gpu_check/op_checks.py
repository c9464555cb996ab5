"""Whether every implementation of every op computes what its plain twin says.

The rule is that of `mlbert.ops.comparison`, applied as before a run (`mlbert.ops.comparison`).

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

from gpu_check.op_cases import Case, OpCases
from mlbert.config.bert_config import BertConfig
from mlbert.distributed.sharding import ShardLayout
from mlbert.models.bert import BertForPreTraining
from mlbert.ops import forms as registry
from mlbert.ops.api import dropout_key
from mlbert.ops.comparison import FLOOR_STEPS, MAX_RATIO, compare
from mlbert.ops.dropout import dropout_scale, dropout_threshold
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb
from reference_optimizers import ReferenceLamb

Row = tuple[str, Callable[[], dict[str, Any]]]
LAMB_STEPS = 2
# Most standard deviations of a dropout rate from the one that is wanted, and what a generator of PyTorch may miss by.
MAX_DEVIATIONS, FLASH_RATE_ERROR = 5.0, 0.005
E4M3_LARGEST = 448.0


def check_rows(config: BertConfig, cases: OpCases) -> Iterator[Row]:
    """(name, check) of every implementation that is not plain, then LAMB and casts; results hold ``passed``."""
    forms = registry.available(cases.device)
    head_cases = [cases.attention(0.1), cases.attention(0.0), cases.attention(0.1, alibi=True)]
    for case in [*head_cases, *cases.all()[1:]]:
        for form in forms[case.op]:
            # The FlashAttention inside PyTorch draws its own masks and knows no ALiBi.
            is_own = form != "flash" or case.name == "attention without dropout"
            if form != "plain" and is_own:
                yield f"{case.name}: {form}", partial(check_case, case, form, cases.dtype)
    for form in forms["attention"]:
        yield f"attention dropout rate: {form}", partial(check_dropout_rate, form, cases)
    yield "LAMB", lambda: check_lamb(config, cases.device)
    if any("triton" in names for names in forms.values()):
        yield "cast_transpose to FP8", lambda: check_cast(cases)


def check_case(case: Case, form: str, dtype: torch.dtype) -> dict[str, Any]:
    """The error rule over as many draws as it takes, and that two runs give the same bits.

    Returns:
        ``passed``; ``worst_ratio``, ``errors`` and ``why`` as in `error_rule.Verdict`; ``draws`` of the inputs;
        ``repeats``: whether two runs of each agreed.
    """
    verdict, draws, repeats = compare(case.op, case.arguments, case.gradient_of, registry.form(case.op, form), dtype)
    # PyTorch's FlashAttention adds the gradient of Q in no fixed order.
    passed = verdict.passed and (repeats or form == "flash")
    return {**asdict(verdict), "passed": passed, "draws": draws, "repeats": repeats}


def check_dropout_rate(form: str, cases: OpCases) -> dict[str, Any]:
    """The share of attention weights that is kept: with Q = 0 and V = 1 an output is that share times the scale."""
    qkv = cases.attention(0.1).arguments(0)[0].zero_()
    qkv[:, 2] = 1.0
    batch, wanted_p = cases.batch, 0.1
    key = dropout_key(11, 1, 2, 3)
    out = registry.form("attention", form)(qkv, batch.cu_seqlens, batch.max_seqlen, wanted_p, key, batch.dropout_rows)
    used = int(batch.cu_seqlens[-1])
    lengths = torch.diff(batch.cu_seqlens).double()
    # A token of a sequence of n tokens averages n draws for each head; all channels of a head are the same.
    by_token = out[:used].double()[..., 0].mean(1)
    weight = torch.repeat_interleave(lengths, lengths.long()).to(by_token.device)
    threshold = dropout_threshold(wanted_p)
    scale = 1 / (1 - wanted_p) if form == "flash" else dropout_scale(threshold)
    rate = float((by_token * weight).sum() / weight.sum()) / scale
    wanted = 1 - wanted_p if form == "flash" else 1 - threshold / 256
    draws = float((lengths**2).sum()) * qkv.shape[2]
    deviations = abs(rate - wanted) / math.sqrt(wanted * (1 - wanted) / draws)
    # In bfloat16 the outputs are rounded; over all tokens that averages out to far less than this.
    rounding = float(torch.finfo(qkv.dtype).eps) / 16
    passed = (
        abs(rate - wanted) < (FLASH_RATE_ERROR if form == "flash" else 0.0) + rounding or deviations < MAX_DEVIATIONS
    )
    return {"passed": bool(passed), "kept": rate, "wanted": wanted, "deviations": deviations, "draws": draws}


def check_lamb(config: BertConfig, device: torch.device) -> dict[str, Any]:
    """The fast LAMB's weights against the specification in float64, next to the plain one's, after some updates."""
    weights, grads = _lamb_problem(config, device)
    numbers: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "max_grad_norm": 1.0}
    exact = ReferenceLamb({name: value.double() for name, value in weights.items()}, **numbers)
    for _ in range(LAMB_STEPS):
        exact.step(1e-3, {name: grad.double() for name, grad in grads.items()})
    target = torch.cat([value.flatten() for value in exact.weights.values()])
    errors: dict[str, float] = {}
    used: dict[str, Tensor] = {}
    for implementation in ("plain", "auto", "auto"):
        flat = FlatParameters([(name, torch.nn.Parameter(value.clone())) for name, value in weights.items()])
        optimizer = Lamb(flat, ShardLayout.whole(flat.numel), **numbers, implementation=implementation)
        for name, view in flat.views(flat.grad).items():
            view.copy_(grads[name])
        for _ in range(LAMB_STEPS):
            optimizer.step(1e-3)
        name = optimizer.implementation
        repeats = torch.equal(used[name], flat.data) if name in used else None
        used[name] = flat.data
        errors[name] = float((flat.data.double() - target).norm() / target.norm())
    floor = torch.finfo(torch.float32).eps * FLOOR_STEPS
    passed = all(error <= MAX_RATIO * errors["plain"] + floor for error in errors.values()) and repeats
    return {"passed": bool(passed), "relative_errors": errors, "repeats": repeats, "implementation": name}


def _lamb_problem(config: BertConfig, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with torch.device(device):
        model = BertForPreTraining(config)
    generator = torch.Generator(device).manual_seed(3)
    weights = {name: parameter.detach() for name, parameter in model.ordered_parameters()}
    grads = {
        name: torch.randn(value.shape, generator=generator, device=device) * 1e-3 for name, value in weights.items()
    }
    return weights, grads


def check_cast(cases: OpCases) -> dict[str, Any]:
    """`cast_transpose` gives PyTorch's FP8 bits, by rows and transposed, and the largest magnitude."""
    from mlbert.ops.triton.cast import cast_transpose

    x = cases.random(cases.batch.num_tokens, cases.config.intermediate_size)
    scale, amax = torch.full((), 200.0, device=cases.device), torch.zeros((), device=cases.device)
    copies = cast_transpose(x, scale, amax, torch.float8_e4m3fn)
    twin = (x.float() * scale).clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    different = int((copies.rows.view(torch.uint8) != twin).sum())
    # Rows of the transposed copy may be filled up with zeros.
    columns = torch.zeros_like(copies.columns.view(torch.uint8))
    columns[:, : len(twin)] = twin.t()
    different += int((copies.columns.view(torch.uint8) != columns).sum())
    right_amax = bool(amax == x.float().abs().max())
    return {"passed": different == 0 and right_amax, "different": different, "of": 2 * x.numel(), "amax": right_amax}
