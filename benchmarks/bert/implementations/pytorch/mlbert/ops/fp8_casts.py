"""Plain twins of the kernels that make FP8 tensors: they quantise in PyTorch, at the same points.

What each op takes and gives is told where `mlbert.ops.fp8` calls it. A quantising op takes the scale, raises `amax` to
the largest magnitude that it saw and gives `Quantised`, by rows and transposed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mlbert.ops import norm, registry
from mlbert.ops.fp8_scaling import INPUT, TYPES, Quantised, padded_tokens


def _plain_quantise(
    x: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype, out: Quantised | None = None
) -> Quantised:
    if x.numel():
        amax.copy_(torch.maximum(amax, x.abs().amax()))
    largest = torch.finfo(dtype).max
    rows = (x.float() * scale).clamp(-largest, largest).to(dtype)
    if out is None:
        out = Quantised(torch.empty_like(rows), rows.new_zeros(x.shape[1], padded_tokens(x.shape[0])))
    out.rows.copy_(rows)
    out.columns[:, : x.shape[0]].copy_(rows.t())
    return out


def _plain_quantise_sum(x: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Quantised, Tensor]:
    return _plain_quantise(x, scale, amax, dtype), x.sum(0, dtype=torch.float32)


def _plain_gelu(pre: Tensor, bias: Tensor, exact: bool, scale: Tensor, amax: Tensor, dtype: torch.dtype) -> Quantised:
    out = F.gelu(pre.float() + bias.float(), approximate="none" if exact else "tanh")
    return _plain_quantise(out, scale, amax, dtype)


def _plain_gelu_backward(
    d_out: Tensor, pre: Tensor, bias: Tensor, exact: bool, scale: Tensor, amax: Tensor, dtype: torch.dtype
) -> tuple[Quantised, Tensor]:
    form = "none" if exact else "tanh"
    d_pre = torch.ops.aten.gelu_backward(d_out.float(), pre.float() + bias.float(), approximate=form)
    return _plain_quantise(d_pre, scale, amax, dtype), d_pre.sum(0)


def _plain_norm(*arguments: Any) -> tuple[Tensor, Tensor, Quantised]:
    *rest, scale, amax = arguments
    out = norm.dropout_add_layer_norm(*rest)
    return out, out, _plain_quantise(out.detach(), scale, amax, TYPES[INPUT])


for _name in ("plain", "native"):
    registry.register("fp8_quantise", _name)(_plain_quantise)
    registry.register("fp8_quantise_sum", _name)(_plain_quantise_sum)
    registry.register("fp8_gelu", _name)(_plain_gelu)
    registry.register("fp8_gelu_backward", _name)(_plain_gelu_backward)
    registry.register("fp8_dropout_add_layer_norm", _name)(_plain_norm)
