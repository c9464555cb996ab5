"""Reference versions of the kernels that quantize to FP8, in PyTorch,
with the same rounding points.

Every op takes a scale, raises `amax` to the largest magnitude of its values, and returns
`Quantized`, by rows and transposed. Other arguments are documented here or at the caller in
`mlbert.ops.fp8`.

Legend: T tokens, U tokens rounded up to a multiple of 16, D hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mlbert.ops import forms as registry
from mlbert.ops import reference
from mlbert.ops.dropout import Key
from mlbert.ops.fp8_scaling import GRADIENT, INPUT, TYPES, Quantized, padded_tokens
from mlbert.ops.weights import GradientBuffer, kept_sum

# GELU's derivative, between -0.129 and 1.129, in a byte: 200 slope + 26, so that the values of most
# numbers far from 0, which are 0 and 1, are exact.
SLOPE_SCALE = 200.0
SLOPE_ZERO = 26.0


class NormSaved(NamedTuple):
    """Tensors saved by LayerNorm's forward pass for backward.

    Attributes:
        total: residual + dropout(x + x_bias), rounded to the activations' dtype, [T, D].
        mean, inverse: mean and 1 / deviation of its rows, float32 [T].
    """

    total: Tensor
    mean: Tensor
    inverse: Tensor


class NormGradients(NamedTuple):
    """Gradients from LayerNorm's quantising backward pass.

    Attributes:
        residual: [T, D] of the activations' dtype.
        x: gradient in the activations' dtype, times the scale, in e5m2, rows [T, D]
            and columns [D, U].
        sums: float32 [3 D], the gradients of x_bias (the sum over tokens of the unrounded gradient
            of x), weight and bias.
    """

    residual: Tensor
    x: Quantized
    sums: Tensor


def plain_quantize(
    x: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype, out: Quantized | None = None
) -> Quantized:
    if x.numel():
        amax.copy_(torch.maximum(amax, x.abs().amax()))
    largest = torch.finfo(dtype).max
    rows = (x.float() * scale).clamp(-largest, largest).to(dtype)
    if out is None:
        out = Quantized(
            torch.empty_like(rows), rows.new_zeros(x.shape[1], padded_tokens(x.shape[0]))
        )
    out.rows.copy_(rows)
    out.columns[:, : x.shape[0]].copy_(rows.t())
    return out


def _plain_quantize_sum(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    buffer: GradientBuffer | None = None,
) -> tuple[Quantized, Tensor]:
    total = x.sum(0, dtype=torch.float32)
    return plain_quantize(x, scale, amax, dtype), kept_sum(total, buffer)


def plain_gelu(
    pre: Tensor, bias: Tensor, exact: bool, scale: Tensor, amax: Tensor, dtype: torch.dtype
) -> Quantized:
    out = F.gelu(pre.float() + bias.float(), approximate="none" if exact else "tanh")
    return plain_quantize(out, scale, amax, dtype)


def plain_gelu_backward(
    d_out: Tensor,
    pre: Tensor,
    bias: Tensor,
    exact: bool,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    buffer: GradientBuffer | None = None,
) -> tuple[Quantized, Tensor]:
    form = "none" if exact else "tanh"
    d_pre = torch.ops.aten.gelu_backward(
        d_out.float(), pre.float() + bias.float(), approximate=form
    )
    return plain_quantize(d_pre, scale, amax, dtype), kept_sum(d_pre.sum(0), buffer)


def plain_gelu_and_slope(
    pre: Tensor, bias: Tensor, exact: bool, scale: Tensor, amax: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Quantized]:
    """Return GELU's derivative at pre + bias in a byte, uint8 [T, F], and `plain_gelu`."""
    y = pre.float() + bias.float()
    form = "none" if exact else "tanh"
    slope = torch.ops.aten.gelu_backward(torch.ones_like(y), y, approximate=form)
    coded = (slope * SLOPE_SCALE + SLOPE_ZERO).round().to(torch.uint8)
    return coded, plain_gelu(pre, bias, exact, scale, amax, dtype)


def plain_times_slope(
    d_out: Tensor,
    slopes: Tensor,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    buffer: GradientBuffer | None = None,
) -> tuple[Quantized, Tensor]:
    """Return `plain_gelu_backward` with the derivative of `plain_gelu_and_slope`."""
    d_pre = d_out.float() * ((slopes.float() - SLOPE_ZERO) / SLOPE_SCALE)
    return plain_quantize(d_pre, scale, amax, dtype), kept_sum(d_pre.sum(0), buffer)


def _plain_norm_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dropout_p: float,
    key: Key,
    rows: Tensor | None,
    x_bias: Tensor | None,
    scale: Tensor,
    amax: Tensor,
) -> tuple[Tensor, Quantized, NormSaved]:
    """Compute LayerNorm(residual + dropout(x + x_bias)) without autograd,
    and its rounded result in e4m3.

    Args:
        x, residual, weight, bias, eps, dropout_p, key, rows, x_bias: as in
            `mlbert.ops.api.dropout_add_layer_norm`.
        scale: float32 scalar; quantized = result * scale.
        amax: float32 scalar, raised to the largest |result|.

    Returns:
        (result [T, D] of the dtype of x, its e4m3 copies, tensors for backward).
    """
    wide = x.float() if x_bias is None else x.float() + x_bias.float()
    exact = residual.float() + reference.apply_dropout(wide, dropout_p, key, rows)
    out = F.layer_norm(exact, exact.shape[1:], weight.float(), bias.float(), eps).to(x.dtype)
    total = exact.to(x.dtype)
    mean = total.float().mean(1)
    variance = (total.float() - mean[:, None]).square().mean(1)
    return (
        out,
        plain_quantize(out, scale, amax, TYPES[INPUT]),
        NormSaved(total, mean, (variance + eps).rsqrt()),
    )


def _plain_norm_backward(
    d_out: Tensor,
    d_twin: Tensor | None,
    saved: NormSaved,
    weight: Tensor,
    dropout_p: float,
    key: Key,
    rows: Tensor | None,
    scale: Tensor,
    amax: Tensor,
    buffer: GradientBuffer | None = None,
) -> NormGradients:
    """Return the gradients of `_plain_norm_forward`,
    with that of x in e5m2 for the linear layer that computed x.

    With h = (total - mean) / deviation and g = weight * d, the residual's gradient is (g - mean(g)
    - h mean(g h)) / deviation. The gradient of x is the same, scaled, for kept elements, else 0.

    Args:
        d_out: [T, D] of the activations' dtype.
        d_twin: gradient from the result's second reader, added in float32, [T, D] or None.
        saved: from the forward pass.
        weight, dropout_p, key, rows: as in the forward pass.
        scale: float32 scalar; quantized = d_x * scale.
        amax: float32 scalar, raised to the largest |d_x|.
        buffer: memory for the three sums, float32 [3 D].
    """
    d = d_out.float() if d_twin is None else d_out.float() + d_twin.float()
    normal = (saved.total.float() - saved.mean[:, None]) * saved.inverse[:, None]
    g = d * weight.float()
    centred = g - g.mean(1, keepdim=True) - normal * (g * normal).mean(1, keepdim=True)
    d_total = centred * saved.inverse[:, None]
    d_x = reference.apply_dropout(d_total, dropout_p, key, rows)
    small = plain_quantize(d_x.to(d_out.dtype), scale, amax, TYPES[GRADIENT])
    sums = kept_sum(torch.cat([d_x.sum(0), (d * normal).sum(0), d.sum(0)]), buffer)
    return NormGradients(d_total.to(d_out.dtype), small, sums)


for _name in ("plain", "native"):
    registry.register("fp8_quantize", _name)(plain_quantize)
    registry.register("fp8_quantize_sum", _name)(_plain_quantize_sum)
    registry.register("fp8_gelu", _name)(plain_gelu)
    registry.register("fp8_gelu_backward", _name)(plain_gelu_backward)
    registry.register("fp8_dropout_add_layer_norm_forward", _name)(_plain_norm_forward)
    registry.register("fp8_dropout_add_layer_norm_backward", _name)(_plain_norm_backward)
