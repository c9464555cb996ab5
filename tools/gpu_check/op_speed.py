"""How fast every implementation of every op is, as a share of what the device could do.

Legend: T tokens, D hidden, F inner size, B bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu_check.hardware import Peaks, device_name, median_seconds, peaks_of
from gpu_check.op_cases import Case, OpCases
from mlbert.config.bert_config import BertConfig
from mlbert.distributed.sharding import ShardLayout
from mlbert.models.bert import BertForPreTraining
from mlbert.ops import forms as registry
from mlbert.ops.precision import gemm_peak_flops
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb
from mlbert.programs.bench.step_time import LAMB

Row = tuple[str, Callable[[], dict[str, Any]]]
LAMB_BYTES = 44  # read gradient, weight, two moments, write moments; read three, write the weight; and the norm
COPY_BYTES = {"cuda": 4 << 30, "cpu": 1 << 24}
_FORWARD, _BACKWARD = slice(0, 1), slice(1, 2)


def speed_rows(config: BertConfig, cases: OpCases, seconds: float) -> Iterator[Row]:
    """(name, measurement) of ceilings, ops, LAMB and casts; each measurement for about `seconds`."""
    device, dtype = cases.device, cases.dtype
    peaks = peaks_of(device_name(device))
    yield "ceiling: copy", lambda: _copy(device, seconds, peaks)
    if device.type == "cuda":
        yield "ceiling: product", lambda: _rated(gemm_peak_flops(dtype, device) / 1e12, "TFLOP/s", peaks)
    forms = registry.available(device)
    for case in cases.all():
        for form in forms[case.op]:
            yield f"{case.name}: {form}", partial(_op, case, form, device, seconds, peaks)
    for implementation in lamb_implementations(device):
        yield f"LAMB: {implementation}", partial(_lamb, config, implementation, device, seconds, peaks)
    yield from cast_rows(cases, seconds, peaks)


def cast_rows(cases: OpCases, seconds: float, peaks: Peaks | None) -> Iterator[Row]:
    """What surrounds the products, where there are kernels for it."""
    if "triton" in registry.available(cases.device)["fp8_quantise"]:
        for name, call in kernel_calls(cases).items():
            yield f"{name}: triton", partial(_traffic, call, cases.device, seconds, peaks)


def lamb_implementations(device: torch.device) -> tuple[str, ...]:
    """The forms of LAMB that can be had on the device, plain first."""
    tiny = torch.nn.Parameter(torch.ones(8, device=device))
    found = ["plain"]
    name = _lamb_of(FlatParameters([("weight", tiny)]), "auto").implementation
    return tuple(found if name == "plain" else [*found, name])


def _lamb_of(flat: FlatParameters, implementation: str) -> Lamb:
    return Lamb(flat, ShardLayout.whole(flat.numel), **LAMB, implementation=implementation)


def _rated(rate: float, unit: str, peaks: Peaks | None) -> dict[str, Any]:
    result: dict[str, Any] = {"rate": rate, "unit": unit}
    if peaks:
        peak = peaks.memory if unit == "TB/s" else peaks.bf16
        result["share_of_peak"] = rate / peak
    return result


def _copy(device: torch.device, seconds: float, peaks: Peaks | None) -> dict[str, Any]:
    source = torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    taken = median_seconds(lambda: target.copy_(source), device, seconds)
    return _rated(2 * source.numel() / taken / 1e12, "TB/s", peaks)


def _op(case: Case, form: str, device: torch.device, seconds: float, peaks: Peaks | None) -> dict[str, Any]:
    """Forward alone, then both passes; the backward pass's time is the difference."""
    function, arguments = registry.form(case.op, form), list(case.arguments(0))
    for place in case.gradient_of:
        arguments[place] = arguments[place].requires_grad_()
    wanted = [arguments[place] for place in case.gradient_of]

    def forward() -> Tensor:
        result = function(*arguments)
        return result[0] if isinstance(result, tuple) else result

    gradient = torch.randn_like(forward().detach())

    def both() -> None:
        torch.autograd.grad(forward(), wanted, gradient)

    forward_seconds = median_seconds(forward, device, seconds / 2)
    both_seconds = median_seconds(both, device, seconds / 2)
    # On a loaded machine the forward pass alone may take longer than it took inside both.
    backward_seconds = both_seconds - forward_seconds if both_seconds > forward_seconds else None
    rate, unit = case.cost.rate(both_seconds, slice(0, 2))
    return {
        "forward_seconds": forward_seconds,
        "backward_seconds": backward_seconds,
        "forward_rate": case.cost.rate(forward_seconds, _FORWARD)[0],
        "backward_rate": case.cost.rate(backward_seconds, _BACKWARD)[0] if backward_seconds else None,
        **_rated(rate, unit, peaks),
    }


def _lamb(
    config: BertConfig, implementation: str, device: torch.device, seconds: float, peaks: Peaks | None
) -> dict[str, Any]:
    with torch.device(device):
        model = BertForPreTraining(config)
    flat = FlatParameters(model.ordered_parameters())
    flat.grad.normal_(std=1e-3)
    optimizer = _lamb_of(flat, implementation)
    taken = median_seconds(lambda: optimizer.step(1e-4), device, seconds)
    return {"step_seconds": taken, **_rated(LAMB_BYTES * flat.numel / taken / 1e12, "TB/s", peaks)}


def kernel_calls(cases: OpCases) -> dict[str, tuple[Callable[[], object], float]]:
    """Name -> a call of what surrounds the products, and the bytes that it must move: activations read, and results
    written, quantised ones with one byte a number by rows and one by columns."""
    config, tokens = cases.config, cases.batch.num_tokens
    wide, narrow = cases.random(tokens, config.intermediate_size), cases.random(tokens, config.hidden_size)
    bias = cases.random(config.intermediate_size, dtype=torch.float32)
    scale, amax = torch.ones((), device=cases.device), torch.zeros((), device=cases.device)
    settings = (scale, amax, torch.float8_e4m3fn)
    norm = cases.dropout_add_layer_norm().arguments(0)
    form = {
        op: registry.form(op, "triton") for op in registry.available(cases.device) if op.startswith(("fp8_", "gelu"))
    }
    element = wide.element_size()
    x, _, weight, _, _, dropout, key, rows, _ = norm
    saved = form["fp8_dropout_add_layer_norm_forward"](*norm, scale, amax)[2]
    gradients = (x, None, saved, weight, dropout, key, rows, scale, amax)
    return {
        "gelu": (lambda: form["gelu"](wide, False), 2 * element * wide.numel()),
        "gelu_backward": (lambda: form["gelu_backward"](wide, wide, False), 3 * element * wide.numel()),
        "fp8_quantise": (lambda: form["fp8_quantise"](wide, *settings), (element + 2) * wide.numel()),
        "fp8_quantise_sum": (lambda: form["fp8_quantise_sum"](wide, *settings), (element + 2) * wide.numel()),
        "fp8_gelu": (lambda: form["fp8_gelu"](wide, bias, False, *settings), (element + 2) * wide.numel()),
        "fp8_gelu_backward": (
            lambda: form["fp8_gelu_backward"](wide, wide, bias, False, *settings),
            (2 * element + 2) * wide.numel(),
        ),
        "fp8_dropout_add_layer_norm_forward": (
            lambda: form["fp8_dropout_add_layer_norm_forward"](*norm, scale, amax),
            (4 * element + 2) * narrow.numel(),
        ),
        "fp8_dropout_add_layer_norm_backward": (
            lambda: form["fp8_dropout_add_layer_norm_backward"](*gradients),
            (3 * element + 2) * narrow.numel(),
        ),
    }


def _traffic(
    call: tuple[Callable[[], object], float], device: torch.device, seconds: float, peaks: Peaks | None
) -> dict[str, Any]:
    function, moved = call
    with torch.no_grad():
        taken = median_seconds(function, device, seconds)
    return {"forward_seconds": taken, **_rated(moved / taken / 1e12, "TB/s", peaks)}
