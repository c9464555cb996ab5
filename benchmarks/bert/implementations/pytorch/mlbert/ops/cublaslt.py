"""Linear layers with bias, GELU and bias gradients fused into the products by cublasLt's epilogues:

    forward   x W^T + b                        bias
              gelu(x W^T + b)                  bias and GELU; also stores the pre-activation for backward
    backward  (d_out W2) gelu'(pre)            GELU's derivative and the gradient of W1's bias
              d_out^T x                        bias gradient, if not computed before

Sums are float32. Weight gradients have the weights' dtype, usually float32, without rounding to the activations' dtype,
and are written or added in place (`mlbert.ops.weights`). cublasLt's GELU is the tanh form; the erf form runs plain. If
cublasLt has no algorithm for a product, PyTorch's kernels run instead, and `Library.product` warns once.

Legend: T tokens, D hidden, F columns of a weight's product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mlbert.ops import cublaslt_library, reference
from mlbert.ops import forms as registry
from mlbert.ops.cublaslt_library import AUX_MULTIPLE, Epilogue, Library
from mlbert.ops.linear import needs_gradient
from mlbert.ops.weights import gradient_room, in_type, joined, written

_override: Library | None = None


def use(given: Library | None) -> None:
    """Use this library instead of PyTorch's, for tests. None restores PyTorch's."""
    global _override
    _override = given


def library() -> Library:
    """Return the cublasLt in use.

    Raises:
        mlbert.host.native.NativeUnavailable: there is none.
    """
    return _override or cublaslt_library.library()


def _remark() -> str:
    version = library().version
    return f"cublasLt {version // 10000}.{version // 100 % 100}.{version % 100}"


@registry.register("linear_qkv", "cublaslt", remark=_remark)
def linear_qkv(x: Tensor, *weights_and_biases: Tensor) -> Tensor:
    """See `mlbert.ops.api.linear_qkv`."""
    return _CublasLtLinear.apply(x, 3, False, *weights_and_biases)


@registry.register("linear", "cublaslt")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, has_other_users: bool) -> Tensor:
    """See `mlbert.ops.api.linear`."""
    return _CublasLtLinear.apply(x, 1, has_other_users, weight, *(() if bias is None else (bias,)))


@registry.register("linear_gelu", "cublaslt")
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, exact: bool) -> Tensor:
    """See `mlbert.ops.api.linear_gelu`. The erf form runs plain."""
    if exact:
        return reference.linear_gelu(x, weight, bias, exact)
    return _CublasLtLinearGelu.apply(x, weight, bias, needs_gradient(x, weight, bias))


@registry.register("feed_forward", "cublaslt")
def feed_forward(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, exact: bool) -> Tensor:
    """See `mlbert.ops.api.feed_forward`. The erf form runs plain."""
    if exact:
        return reference.feed_forward(x, w1, b1, w2, exact)
    return _CublasLtFeedForward.apply(x, w1, b1, w2, needs_gradient(x, w1, b1, w2))


class _CublasLtLinear(torch.autograd.Function):
    """A linear layer with its weight in ``parts``; the product for Q, K and V also adds the bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int, has_other_users: bool, *tensors: Tensor) -> Tensor:
        ctx.weights, biases = tensors[:parts], tensors[parts:]
        ctx.bias_types, ctx.has_other_users = [bias.dtype for bias in biases], has_other_users
        x, weight = x.contiguous(), in_type(ctx.weights, x.dtype)
        bias = joined(biases).to(x.dtype) if biases else None
        ctx.save_for_backward(x, weight)
        if parts > 1:
            out = x.new_empty(x.shape[0], weight.shape[0])
            if _product(out, x, weight, right_transposed=True, epilogue=Epilogue.BIAS, bias=bias):
                return out
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_out = d_out.contiguous()
        d_bias = _bias_room(ctx.weights, d_out) if ctx.bias_types else None
        d_weights = _weight_gradients(ctx.weights, d_out, x, d_bias, last=not ctx.has_other_users)
        d_x = d_out @ weight if ctx.needs_input_grad[0] else None
        d_biases = () if d_bias is None else d_bias.to(ctx.bias_types[0]).chunk(len(ctx.weights))
        return d_x, None, None, *d_weights, *d_biases


class _CublasLtLinearGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, needs_gradient: bool) -> Tensor:
        ctx.weight, ctx.bias_type = weight, bias.dtype
        x, narrow = x.contiguous(), in_type((weight,), x.dtype)
        out, pre = _bias_gelu(x, narrow, bias.to(x.dtype), needs_gradient)
        ctx.save_for_backward(x, narrow, pre)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, pre = ctx.saved_tensors
        d_pre = torch.ops.aten.gelu_backward(d_out.contiguous(), pre, approximate="tanh")
        d_bias = _bias_room((ctx.weight,), d_pre)
        (d_weight,) = _weight_gradients((ctx.weight,), d_pre, x, d_bias)
        d_x = d_pre @ weight if ctx.needs_input_grad[0] else None
        return d_x, d_weight, d_bias.to(ctx.bias_type), None


class _CublasLtFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, needs_gradient: bool) -> Tensor:
        ctx.weights, ctx.bias_type = (w1, w2), b1.dtype
        x, w1, w2 = x.contiguous(), in_type((w1,), x.dtype).contiguous(), in_type((w2,), x.dtype).contiguous()
        inner, pre = _bias_gelu(x, w1, b1.to(x.dtype), needs_gradient)
        ctx.save_for_backward(x, w1, w2, inner, pre)
        return F.linear(inner, w2)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, w1, w2, inner, pre = ctx.saved_tensors
        first, second = ((weight,) for weight in ctx.weights)
        d_out = d_out.contiguous()
        (d_w2,) = _weight_gradients(second, d_out, inner)
        d_pre, d_b1 = _gelu_backward(d_out, w2, pre)
        if d_b1 is None:
            d_b1 = _bias_room(first, d_pre)
            (d_w1,) = _weight_gradients(first, d_pre, x, d_b1)
        else:
            (d_w1,) = _weight_gradients(first, d_pre, x)
        d_x = d_pre @ w1 if ctx.needs_input_grad[0] else None
        return d_x, d_w1, d_b1.to(ctx.bias_type), d_w2, None


def _product(out: Tensor, left: Tensor, right: Tensor, **arguments: Any) -> bool:
    """Call `Library.product`. Also return False for empty operands, which cublasLt does not accept."""
    return min(*out.shape, *left.shape) > 0 and library().product(out, left, right, **arguments)


def _bias_gelu(x: Tensor, weight: Tensor, bias: Tensor, keep_pre: bool) -> tuple[Tensor, Tensor | None]:
    """Return gelu(x W^T + b), [T, F], and the pre-activation if ``keep_pre``."""
    shape = x.shape[0], weight.shape[0]
    if shape[1] % AUX_MULTIPLE == 0:
        out, pre = x.new_empty(shape), x.new_empty(shape) if keep_pre else None
        epilogue = Epilogue.GELU_AUX_BIAS if keep_pre else Epilogue.GELU_BIAS
        if _product(out, x, weight, right_transposed=True, epilogue=epilogue, bias=bias, aux=pre):
            return out, pre
    pre = F.linear(x, weight, bias)
    return F.gelu(pre, approximate="tanh"), pre if keep_pre else None


def _gelu_backward(d_out: Tensor, weight: Tensor, pre: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return (d_out W) gelu'(pre), [T, F], for d_out [T, D] and W [D, F], and its sum over tokens [F] if fused."""
    if pre.shape[1] % AUX_MULTIPLE == 0:
        d_pre, d_bias = torch.empty_like(pre), pre.new_empty(pre.shape[1])
        if _product(d_pre, d_out, weight, epilogue=Epilogue.DGELU_BGRAD, bias=d_bias, aux=pre):
            return d_pre, d_bias
    return torch.ops.aten.gelu_backward(d_out @ weight, pre, approximate="tanh"), None


def _weight_gradients(
    parts: tuple[Tensor, ...], d_out: Tensor, x: Tensor, d_bias: Tensor | None = None, last: bool = True
) -> tuple[Tensor | None, ...]:
    """Return d_out^T x, for d_out [T, F] and x [T, D], one tensor per part of the weight; None if written in place.

    Args:
        d_bias: [F], written with the sum of d_out over tokens.
        last: as in `mlbert.ops.weights.written`.
    """
    room = gradient_room(parts)
    out, adds = room or (x.new_empty(d_out.shape[1], x.shape[1], dtype=_gradient_type(parts, x)), False)
    options = {"left_transposed": True, "adds": adds}
    if d_bias is None or not _product(out, d_out, x, **options, epilogue=Epilogue.BGRADB, bias=d_bias):
        if d_bias is not None:
            torch.sum(d_out, 0, dtype=d_bias.dtype, out=d_bias)
        if not _product(out, d_out, x, **options):
            product = d_out.t() @ x
            out.add_(product) if adds else out.copy_(product)
    if room is None:
        return out.to(parts[0].dtype).chunk(len(parts))
    written(parts, last)
    return (None,) * len(parts)


def _bias_room(parts: tuple[Tensor, ...], d_out: Tensor) -> Tensor:
    """Return an empty tensor for a bias gradient, of the weight gradient's dtype."""
    return d_out.new_empty(d_out.shape[1], dtype=_gradient_type(parts, d_out))


def _gradient_type(parts: tuple[Tensor, ...], x: Tensor) -> torch.dtype:
    """Return a dtype in which cublasLt can compute the weight gradient."""
    return x.dtype if parts[0].dtype == x.dtype else torch.float32
