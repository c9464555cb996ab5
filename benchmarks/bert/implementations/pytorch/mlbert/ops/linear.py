"""Linear layers: one product for Q, K and V, a product with bias and GELU,
and the two products of the feed-forward.

All products here are PyTorch's; `mlbert.ops.cublaslt` calls cublasLt. ``native`` adds C kernels for
bias + GELU, forward and backward (with the bias gradient in the same pass), and for sums over
tokens. Weights are converted to the activations' dtype, and their gradients back.

Legend: T tokens, D hidden, F columns of a weight's product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mlbert.ops import forms as registry
from mlbert.ops import reference
from mlbert.ops.dropout import Key, dropout_threshold
from mlbert.ops.native_library import (
    is_bf16,
    library,
    pointer,
    sum_tokens,
    token_chunk,
    token_chunks,
)
from mlbert.ops.weights import GradientBuffer, in_type, joined, kept_sum


def linear_qkv(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, *biases: Tensor) -> Tensor:
    """Return the three projections as one product: x [T, D] to [T, 3 D], q then k then v.

    Args:
        x: [T, D] float32 or bfloat16.
        wq, wk, wv: [D, D]; used without a copy if adjacent in one storage.
        biases: none, or three [D], likewise.
    """
    return registry.implementation("linear_qkv", x)(x, wq, wk, wv, *biases)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, has_other_users: bool = False
) -> Tensor:
    """Return x W^T + b: x [T, D], weight [F, D], bias [F] or None -> [T, F].

    Args:
        has_other_users: whether an earlier op uses the weight too and also gives it gradients.
    """
    return registry.implementation("linear", x)(x, weight, bias, has_other_users)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, exact: bool) -> Tensor:
    """Return gelu(x W^T + b): x [T, D], weight [F, D], bias [F] -> [T, F].

    Args:
        exact: the erf form; otherwise the benchmark's tanh form,
            0.5 y (1 + tanh(sqrt(2 / pi) (y + 0.044715 y^3))).
    """
    return registry.implementation("linear_gelu", x)(x, weight, bias, exact)


def feed_forward(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, exact: bool) -> Tensor:
    """Return gelu(x W1^T + b1) W2^T: x [T, D], w1 [F, D], b1 [F], w2 [D, F] -> [T, D].

    Args:
        exact: as in `linear_gelu`.

    The next op adds W2's bias (`mlbert.ops.api.dropout_add_layer_norm`).
    """
    return registry.implementation("feed_forward", x)(x, w1, b1, w2, exact)


def gated_feed_forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    exact: bool,
    dropout_p: float = 0.0,
    key: Key = 0,
    rows: Tensor | None = None,
) -> Tensor:
    """Return dropout(gelu(a) * b) W2^T with (a, b) = x W1^T: x [T, D] -> [T, D].

    Args:
        w1: [2 F, D], the rows of a first: one product.
        w2: [D, F].
        exact: as in `linear_gelu`.
        dropout_p, key, rows: as in `mlbert.ops.api.dropout_add_layer_norm`.
    """
    return registry.implementation("gated_feed_forward", x)(x, w1, w2, exact, dropout_p, key, rows)


def gated_gelu(pre: Tensor, exact: bool) -> Tensor:
    """Return gelu(a) * b, [T, F], for pre [T, 2 F] = (a, b); `exact` as in `linear_gelu`."""
    result: Tensor = registry.implementation("gated_gelu", pre)(pre, exact)
    return result


def gelu(pre: Tensor, exact: bool) -> Tensor:
    """Return GELU of a contiguous [T, F], without autograd; `exact` as in `linear_gelu`."""
    return registry.implementation("gelu", pre)(pre, exact)


def gelu_backward(
    d_out: Tensor, pre: Tensor, exact: bool, buffer: GradientBuffer | None = None
) -> tuple[Tensor, Tensor]:
    """Return d_out gelu'(pre), all contiguous [T, F], and its sum over tokens, float32 [F]:
    the bias gradient, in the buffer if there is one.
    """
    d_pre, d_bias = registry.implementation("gelu_backward", pre)(d_out, pre, exact, buffer)
    return d_pre, d_bias


@registry.register("gelu", "plain")
@registry.register("gelu", "native")
def _gelu(pre: Tensor, exact: bool) -> Tensor:
    return F.gelu(pre, approximate="none" if exact else "tanh")


@registry.register("gelu_backward", "plain")
@registry.register("gelu_backward", "native")
def _gelu_backward(
    d_out: Tensor, pre: Tensor, exact: bool, buffer: GradientBuffer | None = None
) -> tuple[Tensor, Tensor]:
    d_pre = torch.ops.aten.gelu_backward(d_out, pre, approximate="none" if exact else "tanh")
    return d_pre, kept_sum(d_pre.sum(0, dtype=torch.float32), buffer)


# The C kernels compute it inside of `gated_feed_forward`.
for _name in ("plain", "native"):
    registry.register("gated_gelu", _name)(reference.gated_gelu)
registry.register("linear_qkv", "plain")(reference.linear_qkv)
registry.register("gated_feed_forward", "plain")(reference.gated_feed_forward)


@registry.register("linear", "plain")
@registry.register("linear", "native")
def _plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None, has_other_users: bool) -> Tensor:
    del has_other_users
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


registry.register("linear_gelu", "plain")(reference.linear_gelu)
registry.register("feed_forward", "plain")(reference.feed_forward)


@registry.register("linear_qkv", "native")
def _native_linear_qkv(x: Tensor, *weights_and_biases: Tensor) -> Tensor:
    return _LinearQKV.apply(x, *weights_and_biases)


@registry.register("linear_gelu", "native")
def _native_linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, exact: bool) -> Tensor:
    return (_LinearExactGelu if exact else _LinearGelu).apply(
        x, weight, bias, needs_gradient(x, weight, bias)
    )


@registry.register("feed_forward", "native")
def _native_feed_forward(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, exact: bool) -> Tensor:
    return F.linear(_native_linear_gelu(x, w1, b1, exact), w2.to(x.dtype))


@registry.register("gated_feed_forward", "cublaslt")
@registry.register("gated_feed_forward", "triton")
def _gated_of_linears(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    exact: bool,
    dropout_p: float,
    key: Key,
    rows: Tensor | None,
) -> Tensor:
    inner = gated_gelu(linear(x, w1), exact)
    return linear(reference.apply_dropout(inner, dropout_p, key, rows), w2)


@registry.register("gated_feed_forward", "native")
def _native_gated_feed_forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    exact: bool,
    dropout_p: float = 0.0,
    key: Key = 0,
    rows: Tensor | None = None,
) -> Tensor:
    if dropout_threshold(dropout_p) or not needs_gradient(x, w1, w2):
        return _gated_of_linears(x, w1, w2, exact, dropout_p, key, rows)
    return _GatedFeedForward.apply(x, w1, w2, exact)


def needs_gradient(*tensors: Tensor) -> bool:
    """Return whether a backward pass may follow.

    Call it outside of a Function's forward, where this is unknown.
    """
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class _LinearQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights_and_biases: Tensor) -> Tensor:
        weights = weights_and_biases[:3]
        biases = weights_and_biases[3:]
        ctx.weight_type = weights[0].dtype
        ctx.bias_types = [bias.dtype for bias in biases]
        weight = in_type(weights, x.dtype)
        ctx.save_for_backward(x, weight)
        bias = joined(biases).to(x.dtype) if biases else None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_out = d_out.contiguous()
        d_weights = (d_out.t() @ x).to(ctx.weight_type).chunk(3)
        d_biases = sum_tokens(d_out).to(ctx.bias_types[0]).chunk(3) if ctx.bias_types else ()
        d_x = d_out @ weight if ctx.needs_input_grad[0] else None
        return (d_x, *d_weights, *d_biases)


class _LinearGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, needs_gradient: bool) -> Tensor:
        ctx.types = (weight.dtype, bias.dtype)
        ctx.consumed = False
        weight = in_type((weight,), x.dtype)
        bias = bias.float().contiguous()
        pre = x @ weight.t()
        out = torch.empty_like(pre) if needs_gradient else pre
        threads = torch.get_num_threads()
        library().bias_gelu_forward(
            pointer(pre), pointer(bias), *pre.shape, is_bf16(pre), threads, pointer(out)
        )
        if needs_gradient:
            ctx.save_for_backward(x, weight, bias, pre)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, pre = ctx.saved_tensors
        # The gradient overwrites the pre-activation, which saves one buffer of the widest layer.
        assert not ctx.consumed, "linear_gelu's backward runs once"
        ctx.consumed = True
        num_tokens, columns = pre.shape
        d_out = d_out.contiguous()
        partial = torch.empty(token_chunks(num_tokens), columns)
        library().bias_gelu_backward(
            pointer(d_out, pre.dtype),
            pointer(pre),
            pointer(bias),
            num_tokens,
            columns,
            token_chunk(num_tokens),
            is_bf16(pre),
            torch.get_num_threads(),
            pointer(pre),
            pointer(partial),
        )
        d_x = pre @ weight if ctx.needs_input_grad[0] else None
        return d_x, (pre.t() @ x).to(ctx.types[0]), partial.sum(0).to(ctx.types[1]), None


class _LinearExactGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, needs_gradient: bool) -> Tensor:
        del needs_gradient
        ctx.types = weight.dtype, bias.dtype
        weight = weight.to(x.dtype)
        pre = F.linear(x, weight, bias.to(x.dtype))
        ctx.save_for_backward(x, weight, pre)
        return F.gelu(pre)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, pre = ctx.saved_tensors
        d_pre = torch.ops.aten.gelu_backward(d_out.contiguous(), pre)
        d_x = d_pre @ weight if ctx.needs_input_grad[0] else None
        return d_x, (d_pre.t() @ x).to(ctx.types[0]), sum_tokens(d_pre).to(ctx.types[1]), None


class _GatedFeedForward(torch.autograd.Function):
    """Keeps one product of the forward pass, and computes what is between the products again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w2: Tensor, exact: bool) -> Tensor:
        ctx.weight_type = w1.dtype
        ctx.form = "none" if exact else "tanh"
        first = in_type((w1,), x.dtype)
        second = in_type((w2,), x.dtype)
        pre = x @ first.t()
        ctx.save_for_backward(x, first, second, pre)
        gate, value = pre.chunk(2, dim=1)
        return F.gelu(gate, approximate=ctx.form).mul_(value) @ second.t()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, w1, w2, pre = ctx.saved_tensors
        d_out = d_out.contiguous()
        gate, value = pre.chunk(2, dim=1)
        d_inner = d_out @ w2
        d_pre = torch.empty_like(pre)
        d_gate, d_value = d_pre.chunk(2, dim=1)
        inner = F.gelu(gate, approximate=ctx.form)
        torch.mul(d_inner, inner, out=d_value)
        torch.ops.aten.gelu_backward.grad_input(
            d_inner.mul_(value), gate, approximate=ctx.form, grad_input=d_gate
        )
        d_w2 = (d_out.t() @ inner.mul_(value)).to(ctx.weight_type)
        d_w1 = (d_pre.t() @ x).to(ctx.weight_type)
        d_x = d_pre @ w1 if ctx.needs_input_grad[0] else None
        return d_x, d_w1, d_w2, None
