"""Measure the speed of every implementation of every op, as a share of the device's peak.

Legend: T tokens, D hidden, F inner size, B bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu_check.hardware import median_seconds, rated
from gpu_check.op_cases import Case, OpCases
from gpu_check.rows import Row
from mlbert.config.bert_config import BertConfig
from mlbert.distributed.sharding import ShardLayout
from mlbert.models.bert import BertForPreTraining
from mlbert.ops import forms as registry
from mlbert.ops.peak import gemm_peak_flops
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb
from mlbert.programs.bench.sides import LAMB

# Per weight: read gradient, weight and two moments, write the moments;
# read three, write the weight; and the norm.
LAMB_BYTES = 44
COPY_BYTES = {"cuda": 4 << 30, "cpu": 1 << 24}
_FORWARD = slice(0, 1)
_BACKWARD = slice(1, 2)


def speed_rows(config: BertConfig, cases: OpCases, seconds: float) -> Iterator[Row]:
    """Yield measurements of ceilings, ops, LAMB and casts, each for about ``seconds``."""
    device = cases.device
    dtype = cases.dtype
    yield "ceiling: copy", lambda: _copy(device, seconds)
    if device.type == "cuda":
        yield (
            "ceiling: product",
            lambda: rated(gemm_peak_flops(dtype, device) / 1e12, "TFLOP/s", device),
        )
    forms = registry.available(device)
    for case in cases.all():
        for form in forms[case.op]:
            yield f"{case.name}: {form}", partial(_op, case, form, device, seconds)
    tiny = FlatParameters([("weight", torch.nn.Parameter(torch.ones(8, device=device)))])
    for implementation in dict.fromkeys(("plain", _lamb_of(tiny, "auto").implementation)):
        yield f"LAMB: {implementation}", partial(_lamb, config, implementation, device, seconds)
    if "triton" in forms["fp8_quantize"]:
        for name, (call, moved) in kernel_calls(cases).items():
            yield f"{name}: triton", partial(_traffic, call, moved, device, seconds)
        for op, arguments in product_arguments(cases).items():
            for form in forms[op][1:]:
                yield (
                    f"{op}: {form}",
                    partial(_product, registry.form(op, form), arguments, device, seconds),
                )


def _lamb_of(flat: FlatParameters, implementation: str) -> Lamb:
    return Lamb(flat, ShardLayout.whole(flat.numel), **LAMB, implementation=implementation)


def _copy(device: torch.device, seconds: float) -> dict[str, Any]:
    source = torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    taken = median_seconds(lambda: target.copy_(source), device, seconds)
    return rated(2 * source.numel() / taken / 1e12, "TB/s", device)


def _op(case: Case, form: str, device: torch.device, seconds: float) -> dict[str, Any]:
    """Time the forward pass alone, then both passes; the backward pass's time is the difference."""
    function = registry.form(case.op, form)
    arguments = list(case.arguments(0))
    inputs = [arguments[place].requires_grad_() for place in case.gradient_of]

    def forward() -> Tensor:
        result = function(*arguments)
        return result[0] if isinstance(result, tuple) else result

    gradient = torch.randn_like(forward().detach())

    def both() -> None:
        torch.autograd.grad(forward(), inputs, gradient)

    forward_seconds = median_seconds(forward, device, seconds / 2)
    both_seconds = median_seconds(both, device, seconds / 2)
    # On a busy machine the forward pass alone may take longer than both together.
    backward_seconds = both_seconds - forward_seconds if both_seconds > forward_seconds else None
    rate, unit = case.cost.rate(both_seconds, slice(0, 2))
    return {
        "forward_seconds": forward_seconds,
        "backward_seconds": backward_seconds,
        "forward_rate": case.cost.rate(forward_seconds, _FORWARD)[0],
        "backward_rate": case.cost.rate(backward_seconds, _BACKWARD)[0]
        if backward_seconds
        else None,
        **rated(rate, unit, device),
    }


def _lamb(
    config: BertConfig, implementation: str, device: torch.device, seconds: float
) -> dict[str, Any]:
    with torch.device(device):
        model = BertForPreTraining(config)
    flat = FlatParameters(model.ordered_parameters())
    flat.grad.normal_(std=1e-3)
    optimizer = _lamb_of(flat, implementation)
    taken = median_seconds(lambda: optimizer.step(1e-4), device, seconds)
    return {"step_seconds": taken, **rated(LAMB_BYTES * flat.numel / taken / 1e12, "TB/s", device)}


def kernel_calls(cases: OpCases) -> dict[str, tuple[Callable[[], object], float]]:
    """Return, by name, calls of the kernels around the products and the bytes that each must move.

    These are activations read and results written;
    quantized results take one byte per number by rows and one by columns.
    """
    config = cases.config
    tokens = cases.batch.num_tokens
    wide = cases.random(tokens, config.intermediate_size)
    narrow = cases.random(tokens, config.hidden_size)
    bias = cases.random(config.intermediate_size, dtype=torch.float32)
    scale = torch.ones((), device=cases.device)
    amax = torch.zeros((), device=cases.device)
    e4m3 = torch.float8_e4m3fn
    norm = cases.dropout_add_layer_norm().arguments(0)
    names = (op for op in registry.available(cases.device) if op.startswith(("fp8_", "gelu")))
    form = {op: registry.form(op, "triton") for op in names}
    element = wide.element_size()
    x, _, weight, _, _, dropout, key, rows, _ = norm
    saved = form["fp8_dropout_add_layer_norm_forward"](*norm, scale, amax)[2]

    def norm_backward() -> object:
        backward = form["fp8_dropout_add_layer_norm_backward"]
        return backward(x, None, saved, weight, dropout, key, rows, scale, amax)

    return {
        "gelu": (lambda: form["gelu"](wide, False), 2 * element * wide.numel()),
        "gelu_backward": (
            lambda: form["gelu_backward"](wide, wide, False),
            3 * element * wide.numel(),
        ),
        "fp8_quantize": (
            lambda: form["fp8_quantize"](wide, scale, amax, e4m3),
            (element + 2) * wide.numel(),
        ),
        "fp8_quantize_sum": (
            lambda: form["fp8_quantize_sum"](wide, scale, amax, e4m3),
            (element + 2) * wide.numel(),
        ),
        "fp8_gelu": (
            lambda: form["fp8_gelu"](wide, bias, False, scale, amax, e4m3),
            (element + 2) * wide.numel(),
        ),
        "fp8_gelu_backward": (
            lambda: form["fp8_gelu_backward"](wide, wide, bias, False, scale, amax, e4m3),
            (2 * element + 2) * wide.numel(),
        ),
        "fp8_dropout_add_layer_norm_forward": (
            lambda: form["fp8_dropout_add_layer_norm_forward"](*norm, scale, amax),
            (4 * element + 2) * narrow.numel(),
        ),
        "fp8_dropout_add_layer_norm_backward": (
            norm_backward,
            (3 * element + 2) * narrow.numel(),
        ),
    }


def product_arguments(cases: OpCases) -> dict[str, tuple[Any, ...]]:
    """Return the arguments of the feed-forward's FP8 products with GELU and with its derivative."""
    config = cases.config
    tokens = cases.batch.num_tokens
    x = cases.random(tokens, config.hidden_size)
    weight = cases.random(config.intermediate_size, config.hidden_size)
    bias = cases.random(config.intermediate_size, dtype=torch.float32)
    one, amax = torch.tensor([1.0, 0.0], device=cases.device)
    e4m3 = torch.float8_e4m3fn
    e5m2 = torch.float8_e5m2
    scales = (one.clone(), one.clone())
    pre = cases.random(tokens, config.intermediate_size)
    return {
        "fp8_product_gelu": (x.to(e4m3), weight.to(e4m3), scales, bias, False, one, amax, e4m3),
        "fp8_product_gelu_backward": (
            x.to(e5m2),
            weight.to(e4m3),
            scales,
            True,
            pre,
            bias,
            False,
            one,
            amax,
            e5m2,
        ),
    }


def _product(
    form: Callable[..., Any], arguments: tuple[Any, ...], device: torch.device, seconds: float
) -> dict[str, Any]:
    taken = median_seconds(lambda: form(*arguments), device, seconds)
    tokens, inner = arguments[0].shape
    columns = len(arguments[1])
    rate = 2.0 * tokens * inner * columns / taken / 1e12
    return {"forward_seconds": taken, **rated(rate, "TFLOP/s", device, is_fp8=True)}


def _traffic(
    call: Callable[[], object], moved: float, device: torch.device, seconds: float
) -> dict[str, Any]:
    with torch.no_grad():
        taken = median_seconds(call, device, seconds)
    return {"forward_seconds": taken, **rated(moved / taken / 1e12, "TB/s", device)}
