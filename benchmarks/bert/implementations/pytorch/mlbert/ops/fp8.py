"""Linear layers whose matrix products run in FP8: E4M3 for activations and weights, E5M2 for gradients.

A tensor is multiplied by one scale, a power of two (`mlbert.ops.fp8_scaling` tells which), and rounded to FP8; the
product is divided by the two scales. What exceeds the range becomes the largest FP8 number; NaN stays NaN. Activations
around the products stay bfloat16, weight gradients come out in float32.

Hopper's products read both operands along their inner dimension, so every operand is wanted by rows and transposed. One
pass makes both, and where an element-wise op touches the tensor anyway, that op's kernel makes them:

    input of Q K V and of the feed-forward   LayerNorm before it (`dropout_add_layer_norm`), beside the bfloat16 result
                                             that the residual sum needs; the first layer's in a pass of its own
    input of the attention output            a pass of its own
    input of the second feed-forward layer   bias and GELU: no activation of that width is written in bfloat16
    gradient of Q K V                        a pass of its own, which sums the bias gradient
    gradient of the outputs                  a pass of its own each; their biases belong to LayerNorm
    gradient of the first feed-forward layer GELU's derivative, which sums the bias gradient
    weights                                  a pass of its own, once a step and once an evaluation

The bias of Q K V is added inside the product. The two gradients of a hidden state, the product's and the residual's,
are added by LayerNorm's backward pass.

Formats: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433. Implementations: ``plain`` quantises in
PyTorch, at the same points, and takes the product of the dequantised numbers in float32; ``triton`` quantises in
kernels; all but ``plain`` call `torch._scaled_mm`, which exists for CUDA (compute capability 8.9 and higher) and,
slower than bfloat16, for the CPU, where it serves tests.

Legend: T tokens, U tokens rounded up to a multiple of 16, D columns of the input, F columns of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mlbert.ops import norm, registry
from mlbert.ops.fp8_scaling import (
    GRADIENT,
    INNER_MULTIPLE,
    INPUT,
    TYPES,
    WEIGHT,
    Quantised,
    Scaled,
    Slot,
)
from mlbert.ops.weights import joined


class Hidden(NamedTuple):
    """A hidden state [T, D] with two readers, whose gradients the pass that made it adds.

    Attributes:
        residual: for the residual sum.
        product: the same numbers, for the next linear layer.
        small: their FP8 copies with that layer's scale; None where the layer has to make them.
    """

    residual: Tensor
    product: Tensor
    small: Scaled | None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, slot: Slot, small: Scaled | None = None) -> Tensor:
    """x W^T + b: x [T, D] in the activations' type, weight [F, D] and bias [F] float32 -> [T, F].

    Args:
        small: x in FP8 with the slot's scale, if it is there already.
    """
    return _Linear.apply(x, small, slot, 1, weight, *(() if bias is None else (bias,)))


def linear_qkv(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], slot: Slot, small: Scaled | None = None
) -> Tensor:
    """`mlbert.ops.linear_qkv` in FP8: three weights [D, D] and biases [D], which share one scale."""
    return _Linear.apply(x, small, slot, len(weights), *weights, *biases)


def feed_forward(
    x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, exact: bool, slots: tuple[Slot, Slot], small: Scaled | None = None
) -> Tensor:
    """gelu(x W1^T + b1) W2^T: x [T, D], w1 [F, D], b1 [F], w2 [D, F] -> [T, D]; the second bias is left to the caller.

    Args:
        exact: the erf form of GELU; otherwise the benchmark's tanh form.
        slots: of the two linear layers. Where some of their products do not run in FP8, GELU has a pass of its own.
        small: x in FP8 with the first slot's scale, if it is there already.
    """
    if all(slot.products.all for slot in slots):
        return _FeedForward.apply(x, small, w1, b1, w2, exact, *slots)
    inner = F.gelu(linear(x, w1, b1, slots[0], small), approximate="none" if exact else "tanh")
    return linear(inner, w2, None, slots[1])


def dropout_add_layer_norm(slot: Slot | None, *arguments: Any) -> Hidden:
    """`mlbert.ops.dropout_add_layer_norm` of all its arguments, quantised for the linear layer of `slot`, if there is
    one."""
    if slot is None or not slot.takes_input:
        return Hidden(*norm.dropout_add_layer_norm_twice(*arguments), None)
    op = registry.implementation("fp8_dropout_add_layer_norm", arguments[0])
    (out, twin, small), inverse = slot.cast(INPUT, lambda scale, amax: op(*arguments, scale, amax))
    return Hidden(out, twin, Scaled.of(small, inverse))


def quantise_weight(weights: Sequence[Tensor], slot: Slot) -> None:
    """Makes the FP8 copies of a linear layer's weight [F, D], in parts that share a scale, if they are to be made."""
    if slot.products.forward or slot.products.input_gradient:
        _weight_in_fp8(weights, slot)


def _weight_in_fp8(weights: Sequence[Tensor], slot: Slot) -> Scaled:
    """The copies, made if they are not since the weight changed."""
    place, first = slot.weight, weights[0]
    room = place.small
    if room is not None and room.rows.device != first.device:
        room = None
    # Made in an evaluation, a copy's magnitude was not counted: training makes it again.
    if room is None or not place.fresh or (slot.counts and not place.counted):
        weight = joined(tuple(part.detach() for part in weights)).contiguous()
        out = None if room is None else Quantised(room.rows, room.columns)
        op = registry.implementation("fp8_quantise", weight)
        copies, inverse = slot.cast(WEIGHT, lambda scale, amax: op(weight, scale, amax, TYPES[WEIGHT], out))
        place.small = room = Scaled.of(copies, inverse)
        place.fresh, place.counted = True, slot.counts
    return room


def quantise(x: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype) -> Quantised:
    """x * scale in FP8, by rows and transposed.

    Args:
        x: [T, F] float32 or bfloat16, contiguous.
        scale: float32 scalar.
        amax: float32 scalar, raised to the largest |x|.
        dtype: float8_e4m3fn or float8_e5m2.
    """
    return registry.implementation("fp8_quantise", x)(x, scale, amax, dtype, None)


def product(
    a: Tensor,
    b: Tensor,
    inverse_a: Tensor,
    inverse_b: Tensor,
    dtype: torch.dtype,
    fast: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """a b^T of FP8 matrices a [M, K] and b [N, K], times the reciprocals of their scales, plus bias: [M, N] in `dtype`.

    Args:
        fast: lets the tensor cores of Hopper add with fewer bits.
        bias: [N] in `dtype`, which is bfloat16 then.
    """
    if not a.numel():
        return torch.zeros(a.shape[0], b.shape[0], dtype=dtype, device=a.device)
    return registry.implementation("fp8_product", a)(a, b, inverse_a, inverse_b, dtype, fast, bias)


def _scaled(x: Tensor, slot: Slot, kind: int) -> Scaled:
    """A tensor quantised in a pass of its own."""
    x = x.contiguous()
    copies, inverse = slot.cast(kind, lambda scale, amax: quantise(x, scale, amax, TYPES[kind]))
    return Scaled.of(copies, inverse)


def _scaled_and_summed(d_out: Tensor, slot: Slot) -> tuple[Scaled, Tensor]:
    """A gradient quantised, and its sum over tokens, float32 [F]."""
    d_out = d_out.contiguous()
    op = registry.implementation("fp8_quantise_sum", d_out)
    (copies, total), inverse = slot.cast(GRADIENT, lambda scale, amax: op(d_out, scale, amax, TYPES[GRADIENT]))
    return Scaled.of(copies, inverse), total


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, small: Scaled | None, slot: Slot, parts: int, *tensors: Tensor) -> Tensor:
        weights, biases = tensors[:parts], tensors[parts:]
        products, bias = slot.products, joined(biases).to(x.dtype) if biases else None
        _check_sizes(*weights)
        ctx.slot, ctx.parts, ctx.types = slot, parts, [tensor.dtype for tensor in tensors]
        # Reciprocals stay out of autograd's own list: scales change in place, after this step's backward.
        ctx.inverse_x = ctx.inverse_weight = None
        # What backward multiplies by: the transposed FP8 copies where its products run in FP8, else the operands.
        saved_x, saved_weight = x, None
        if slot.takes_input:
            small = small or _scaled(x, slot, INPUT)
            if products.weight_gradient:
                saved_x, ctx.inverse_x = small.columns, small.inverse
        if products.forward or products.input_gradient:
            small_weight = _weight_in_fp8(weights, slot)
            if products.input_gradient:
                saved_weight, ctx.inverse_weight = small_weight.columns, small_weight.inverse
        if products.forward:
            assert small is not None, "forward products read the input in FP8"
            operands = (small.rows, small_weight.rows, small.inverse, small_weight.inverse)
            out = product(*operands, x.dtype, fast=True, bias=bias)
        else:
            out = F.linear(x, joined(weights).to(x.dtype), bias)
        ctx.save_for_backward(saved_x, joined(weights) if saved_weight is None else saved_weight)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        slot, products, has_bias = ctx.slot, ctx.slot.products, len(ctx.types) > ctx.parts
        d_x = d_bias = None
        if products.input_gradient or products.weight_gradient:
            if has_bias:
                small, d_bias = _scaled_and_summed(d_out, slot)
            else:
                small = _scaled(d_out, slot, GRADIENT)
        elif has_bias:
            d_bias = d_out.sum(0, dtype=torch.float32)
        if products.input_gradient and ctx.needs_input_grad[0]:
            d_x = product(small.rows, weight, small.inverse, ctx.inverse_weight, d_out.dtype)
        elif ctx.needs_input_grad[0]:
            d_x = d_out @ weight.to(d_out.dtype)
        if products.weight_gradient:
            d_weight = product(small.columns, x, small.inverse, ctx.inverse_x, torch.float32)
        else:
            d_weight = d_out.t() @ x
        gradients = [*d_weight.chunk(ctx.parts), *(() if d_bias is None else d_bias.chunk(len(ctx.types) - ctx.parts))]
        return d_x, None, None, None, *(g.to(dtype) for g, dtype in zip(gradients, ctx.types, strict=True))


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, small: Scaled | None, *settings: Any) -> Tensor:
        w1, b1, w2, exact, slot1, slot2 = settings
        _check_sizes(w1, w2)
        small = small or _scaled(x, slot1, INPUT)
        first, second = _weight_in_fp8((w1,), slot1), _weight_in_fp8((w2,), slot2)
        pre = product(small.rows, first.rows, small.inverse, first.inverse, x.dtype, fast=True)
        op = registry.implementation("fp8_gelu", pre)
        inner, inverse = slot2.cast(INPUT, lambda scale, amax: op(pre, b1, exact, scale, amax, TYPES[INPUT]))
        out = product(inner.rows, second.rows, inverse, second.inverse, x.dtype, fast=True)
        ctx.save_for_backward(small.columns, inner.columns, pre, b1, first.columns, second.columns)
        ctx.inverses = small.inverse, inverse, first.inverse, second.inverse
        ctx.slots, ctx.exact, ctx.types = (slot1, slot2), exact, (w1.dtype, b1.dtype, w2.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, pre, b1, w1, w2 = ctx.saved_tensors
        inverse_x, inverse_inner, inverse_w1, inverse_w2 = ctx.inverses
        (slot1, slot2), exact = ctx.slots, ctx.exact
        d_out_small = _scaled(d_out, slot2, GRADIENT)
        d_inner = product(d_out_small.rows, w2, d_out_small.inverse, inverse_w2, d_out.dtype)
        d_w2 = product(d_out_small.columns, inner, d_out_small.inverse, inverse_inner, torch.float32)
        op = registry.implementation("fp8_gelu_backward", pre)
        (d_pre, d_b1), inverse = slot1.cast(
            GRADIENT, lambda scale, amax: op(d_inner, pre, b1, exact, scale, amax, TYPES[GRADIENT])
        )
        d_x = product(d_pre.rows, w1, inverse, inverse_w1, d_out.dtype) if ctx.needs_input_grad[0] else None
        d_w1 = product(d_pre.columns, x, inverse, inverse_x, torch.float32)
        gradients = (g.to(dtype) for g, dtype in zip((d_w1, d_b1, d_w2), ctx.types, strict=True))
        return d_x, None, *gradients, None, None, None


def _check_sizes(*weights: Tensor) -> None:
    for weight in weights:
        assert not any(n % INNER_MULTIPLE for n in weight.shape), f"FP8 needs sizes in 16s, not {tuple(weight.shape)}"


def _plain_product(
    a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype, fast: bool, bias: Tensor | None
) -> Tensor:
    del fast
    out = (a.float() * inverse_a) @ (b.float() * inverse_b).t()
    return (out if bias is None else out + bias).to(dtype)


def _scaled_product(
    a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype, fast: bool, bias: Tensor | None
) -> Tensor:
    inside = bias if dtype != torch.float32 else None  # PyTorch has no float32 product with a bias
    out = torch._scaled_mm(a, b.t(), inverse_a, inverse_b, bias=inside, out_dtype=dtype, use_fast_accum=fast)
    return out if bias is None or bias is inside else out + bias


registry.register("fp8_product", "plain")(_plain_product)
for _name in ("native", "triton"):
    registry.register("fp8_product", _name)(_scaled_product)
