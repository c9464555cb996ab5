"""Time single kernels in graphs, where no host's time is in the result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gpu_check.hardware import queued_seconds
from mlbert.config.bert_config import BertConfig
from mlbert.ops import api as ops
from mlbert.ops import forms as registry

Call = Callable[[], Any]


def timed(call: Call, device: torch.device, seconds: float) -> dict[str, Any]:
    """Return the milliseconds of a call."""
    return {"ms": 1e3 * queued_seconds(call, device, seconds)}


def attention_calls(
    config: BertConfig, length: int, tokens: int, device: torch.device
) -> dict[str, Call]:
    """Return forward, and forward with backward, of global and local attention with rotations."""
    sequences = tokens // length
    heads = config.num_attention_heads
    shape = (tokens, 3, heads, config.head_size)
    qkv = torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()
    starts = torch.arange(sequences + 1, device=device, dtype=torch.int32) * length
    rows = torch.arange(tokens, device=device, dtype=torch.int32)
    positions = torch.arange(length, device=device).repeat(sequences)
    angles = ops.rotations(positions, config.head_size, config.rope_theta, True)

    forms: dict[str, Callable[..., Any]] = {"": ops.attention}
    gluon = "gluon-attention"
    if gluon in registry.available(device)["attention"]:
        forms[f" {gluon}"] = registry.form("attention", gluon)
    gradient = torch.randn_like(qkv[:, 0].detach())

    def train(attend: Call) -> None:
        torch.autograd.grad(attend(), qkv, gradient)

    calls: dict[str, Call] = {}
    for name, form in forms.items():
        for kind, window in (("global", None), ("local", config.local_window)):
            attend = partial(
                form, qkv, starts, length, 0.0, 0, rows, None, window=window, rotations=angles
            )
            calls[f"attention {length} {kind} forward{name}"] = torch.no_grad()(attend)
            calls[f"attention {length} {kind} both{name}"] = partial(train, attend)
    return calls


def gate_calls(config: BertConfig, tokens: int, device: torch.device) -> dict[str, Call]:
    """Return forward, and forward with backward, of GeGLU without its products."""
    pre = torch.randn(tokens, config.inner_rows, device=device, dtype=torch.bfloat16)
    pre.requires_grad_()
    gradient = torch.randn(tokens, config.intermediate_size, device=device, dtype=torch.bfloat16)

    def train() -> None:
        torch.autograd.grad(ops.gated_gelu(pre, True), pre, gradient)

    return {"GeGLU both": train}


def product_calls(config: BertConfig, tokens: int, device: torch.device) -> dict[str, Call]:
    """Return the feed-forward's FP8 products with GELU and its derivative, in each form."""
    hidden = config.hidden_size
    inner = config.intermediate_size
    x = torch.randn(tokens, hidden, device=device)
    weight = torch.randn(inner, hidden, device=device)
    pre = torch.randn(tokens, inner, device=device).bfloat16()
    bias = torch.randn(inner, device=device)
    one = torch.ones((), device=device)
    amax = torch.zeros((), device=device)
    scales = (one.clone(), one.clone())
    e4m3 = torch.float8_e4m3fn
    e5m2 = torch.float8_e5m2
    x4 = x.to(e4m3)
    x5 = x.to(e5m2)
    w4 = weight.to(e4m3)
    forward = (x4, w4, scales, bias, False, one, amax, e4m3)
    backward = (x5, w4, scales, True, pre, bias, False, one, amax, e5m2)
    slopes = torch.randint(0, 253, (tokens, inner), device=device, dtype=torch.uint8)
    arguments = {
        "fp8_product_gelu": forward,
        "fp8_product_gelu_backward": backward,
        "fp8_product_slope": (x4, w4, scales, bias, one, amax, e4m3),
        "fp8_product_slope_backward": (x5, w4, scales, slopes, one, amax, e5m2),
    }
    calls: dict[str, Call] = {}
    for op, given in arguments.items():
        for form in registry.available(device)[op]:
            if form == "plain":
                continue
            function = registry.form(op, form)
            calls[f"{op} {form}"] = partial(function, *given)
    return calls
