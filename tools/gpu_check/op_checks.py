"""Whether every implementation of every op computes what its plain twin says.

The rule is that of `gpu_check.error_rule`. PyTorch's own at a precision is the twin itself in it, and, where the
twin keeps more between its parts than PyTorch's own models do (attention, the residual sum), the op in such steps too.

Legend: S sequences, T tokens, N heads, H head size, R rows, F columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_check.error_rule import FLOOR_STEPS, MAX_RATIO, ErrorRule, draws_for
from gpu_check.op_cases import Case, OpCases
from mlbert.dist.sharding import ShardLayout
from mlbert.feed.batch import Batch
from mlbert.models import BertConfig, BertForPreTraining
from mlbert.ops import dropout_key, reference, registry
from mlbert.ops.dropout import attention_keep_mask, dropout_scale, dropout_threshold, keep_mask
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
                yield f"{case.name}: {form}", lambda c=case, f=form: check_case(c, f, cases.dtype)
    for form in forms["attention"]:
        yield f"attention dropout rate: {form}", lambda f=form: check_dropout_rate(f, cases)
    yield "LAMB", lambda: check_lamb(config, cases.device)
    if any("triton" in names for names in forms.values()):
        yield "cast_transpose to FP8", lambda: check_cast(cases)


def check_case(case: Case, form: str, dtype: torch.dtype) -> dict[str, Any]:
    """The error rule over as many draws as it takes, and that two runs give the same bits.

    Returns:
        ``passed``; ``worst_ratio``, ``errors`` and ``why`` as in `error_rule.Verdict`; ``draws`` of the inputs;
        ``repeats``: whether two runs of each agreed.
    """
    functions = pytorchs_own(case.op, dtype)
    rule = ErrorRule(max(torch.finfo(x.dtype).eps for x in _floats(case.arguments(0))))
    repeats, draw, draws = True, 0, 1
    while draw < draws:
        arguments = case.arguments(draw)
        exact = _results(functions[0], case, arguments, torch.float64)
        found, again = (_results(registry.form(case.op, form), case, arguments, dtype) for _ in range(2))
        rule.add(exact, found, [_results(function, case, arguments, dtype) for function in functions])
        repeats &= all(torch.equal(found[name], again[name]) for name in found)
        draws = draws_for(min(value.numel() for value in exact.values()))
        draw += 1
    verdict = rule.verdict()
    # PyTorch's FlashAttention adds the gradient of Q in no fixed order.
    passed = verdict.passed and (repeats or form == "flash")
    return {**asdict(verdict), "passed": passed, "draws": draws, "repeats": repeats}


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
    result = function(*prepared)
    out = result[0] if isinstance(result, tuple) else result
    kept = {"output": out.detach().clone()}
    generator = torch.Generator(out.device).manual_seed(7)
    gradient = torch.randn(out.shape, generator=generator, device=out.device).bfloat16().to(out.dtype)
    gradients = torch.autograd.grad(out, [prepared[place] for place in case.gradient_of], gradient)
    named = {f"gradient of argument {p}": g.detach() for p, g in zip(case.gradient_of, gradients, strict=True)}
    return {**kept, **named}


def half_attention(
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
            keep = attention_keep_mask(key, rows[start:stop], heads, stop - start, dropout_p)
            weights = torch.where(keep, weights * dropout_scale(threshold), 0.0)
        outputs.append((weights @ v).transpose(0, 1))
    outputs.append(qkv.new_zeros(qkv.shape[0] - bounds[-1], heads, size))
    return torch.cat(outputs)


def half_dropout_add_layer_norm(
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
        total = torch.where(keep_mask(key, rows, x.shape[-1], dropout_p), total * dropout_scale(threshold), 0.0)
    return F.layer_norm((residual + total).float(), x.shape[-1:], weight.float(), bias.float(), eps).to(x.dtype)


_IN_STEPS = {"attention": half_attention, "dropout_add_layer_norm": half_dropout_add_layer_norm}


def pytorchs_own(op: str, dtype: torch.dtype) -> list[Callable[..., Any]]:
    """What PyTorch computes an op by in a precision: the plain twin, and the op in the steps of its own models."""
    in_steps = [_IN_STEPS[op]] if op in _IN_STEPS and dtype != torch.float32 else []
    return [getattr(reference, op), *in_steps]


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
    numbers = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "max_grad_norm": 1.0}
    exact = ReferenceLamb({name: value.double() for name, value in weights.items()}, **numbers)
    for _ in range(LAMB_STEPS):
        exact.step(1e-3, {name: grad.double() for name, grad in grads.items()})
    target = torch.cat([value.flatten() for value in exact.weights.values()])
    errors, used = {}, {}
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


def ugly_batches(config: BertConfig, device: torch.device) -> dict[str, Batch]:
    """Batches that kernels stumble over: one token, block edges, many tiny sequences, empty ones, a tail."""
    longest = config.max_position_embeddings
    lengths = {
        "one sequence": [longest],
        "length 1": [1],
        "around the longest": [longest - 1, longest, longest + 1],
        "512 sequences of 1 token": [1] * 512,
        "empty sequences": [0, 7, 0, 65, 0],
        "empty tail": [longest // 3, 9],
    }
    return {name: _bare_batch(config, values, 13 * (name == "empty tail"), device) for name, values in lengths.items()}


def _bare_batch(config: BertConfig, lengths: list[int], tail: int, device: torch.device) -> Batch:
    """Random ids for these lengths and `tail` tokens that belong to no sequence; every seventh token masked."""
    used = sum(lengths)
    total, generator = used + tail, torch.Generator().manual_seed(used)
    positions = torch.cat([torch.arange(n) for n in [*lengths, tail]]).clamp(max=config.max_position_embeddings - 1)
    masked = torch.arange(min(3, used), used, 7)
    numbers = torch.randint(config.vocab_size, (total + len(masked),), generator=generator)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    batch = Batch(
        input_ids=numbers[:total],
        segment_ids=(positions > 4).long(),
        position_ids=positions,
        cu_seqlens=bounds,
        max_seqlen=max(lengths),
        masked_positions=masked,
        masked_labels=numbers[total:],
        next_sentence_labels=torch.zeros(len(lengths), dtype=torch.int64),
        dropout_rows=torch.arange(total, dtype=torch.int32) + 1000,
    )
    return batch.to(device)
