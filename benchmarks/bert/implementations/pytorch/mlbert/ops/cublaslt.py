"""Linear layers whose products do their surroundings as well: bias, GELU and bias gradients in cublasLt's epilogues.

What runs beside the products in other forms is done while a product's tile is still on the chip:

    forward   x W^T + b                        the bias
              gelu(x W^T + b)                  bias and GELU; the pre-activation is kept for backward
    backward  (d_out W2) gelu'(pre)            GELU's derivative and the gradient of W1's bias
              d_out^T x                        the bias gradient, where it was not had before

Sums are float32. Weight gradients come out in the weights' own type, usually float32, so nothing is rounded to the
activations' type in between. cublasLt's GELU is the tanh form, so the erf form takes the plain implementation. Where
cublasLt has no algorithm for a product, PyTorch's kernels do the same in several steps; `Library.product` says so once.
A device's cublasLt is taken only once it has reproduced the plain forms' results on a small problem (`check_results`).

Legend: T tokens, D hidden, F columns of a weight's product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mlbert.core.native import NativeUnavailable
from mlbert.ops import cublaslt_library, reference, registry
from mlbert.ops.cublaslt_library import AUX_MULTIPLE, Epilogue, Library
from mlbert.ops.linear import joined, needs_gradient

# Two bfloat16 results differ by about 0.4 %; a wrong layout or epilogue by more than 10 %.
_TOLERANCE = 0.02

_given: Library | None = None


def use(given: Library | None) -> None:
    """Takes this library in place of the one that belongs to PyTorch; None takes that again. For tests."""
    global _given
    _given = given


def library() -> Library:
    """The cublasLt in use.

    Raises:
        mlbert.core.native.NativeUnavailable: there is none.
    """
    return _given or cublaslt_library.library()


def check_results(device: torch.device | str) -> None:
    """Compares both layers of the model, forward and backward, with their plain forms on a small problem.

    Raises:
        NativeUnavailable: this cublasLt gives other numbers, or an error.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, columns = 64, 128
    x, square = draw(100, hidden).bfloat16(), [draw(hidden, hidden) / hidden**0.5 for _ in range(3)]
    feed = [x, draw(columns, hidden) / hidden**0.5, draw(columns), draw(hidden, columns) / columns**0.5]
    cases: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]] = {
        "linear_qkv": (linear_qkv, reference.linear_qkv, [x, *square, *(draw(hidden) for _ in range(3))]),
        "feed_forward": (partial(feed_forward, exact=False), partial(reference.feed_forward, exact=False), feed),
    }
    for name, (fast, plain, tensors) in cases.items():
        results = []
        for function in (fast, plain):
            inputs = [tensor.to(device).requires_grad_() for tensor in tensors]
            try:
                with torch.enable_grad():
                    out = function(*inputs)
                    results.append([out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))])
            except cublaslt_library.CublasLtError as error:
                raise NativeUnavailable(str(error)) from error
        pairs = ((a.float(), b.float()) for a, b in zip(*results, strict=True))
        if not all((a - b).norm() <= _TOLERANCE * b.norm() for a, b in pairs):
            raise NativeUnavailable(f"cublasLt's {name} gives other numbers than PyTorch's")


def _remark() -> str:
    version = library().version
    return f"cublasLt {version // 10000}.{version // 100 % 100}.{version % 100}"


@registry.register("linear_qkv", "cublaslt", remark=_remark)
def linear_qkv(x: Tensor, *weights_and_biases: Tensor) -> Tensor:
    """`mlbert.ops.linear_qkv`."""
    return _LinearQKV.apply(x, *weights_and_biases)


@registry.register("linear_gelu", "cublaslt")
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, exact: bool) -> Tensor:
    """`mlbert.ops.linear_gelu`."""
    if exact:
        return reference.linear_gelu(x, weight, bias, exact)
    return _LinearGelu.apply(x, weight, bias, needs_gradient(x, weight, bias))


@registry.register("feed_forward", "cublaslt")
def feed_forward(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, exact: bool) -> Tensor:
    """`mlbert.ops.feed_forward`."""
    if exact:
        return reference.feed_forward(x, w1, b1, w2, exact)
    return _FeedForward.apply(x, w1, b1, w2, needs_gradient(x, w1, b1, w2))


class _LinearQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights_and_biases: Tensor) -> Tensor:
        weights, biases = weights_and_biases[:3], weights_and_biases[3:]
        ctx.types = weights[0].dtype, biases[0].dtype
        x, weight, bias = x.contiguous(), joined(weights).to(x.dtype), joined(biases).to(x.dtype)
        ctx.save_for_backward(x, weight)
        out = x.new_empty(x.shape[0], weight.shape[0])
        if _product(out, x, weight, right_transposed=True, epilogue=Epilogue.BIAS, bias=bias):
            return out
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_out = d_out.contiguous()
        d_weight, d_bias = _weight_and_bias_gradient(d_out, x, ctx.types[0])
        d_x = d_out @ weight if ctx.needs_input_grad[0] else None
        return d_x, *d_weight.chunk(3), *d_bias.to(ctx.types[1]).chunk(3)


class _LinearGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, needs_gradient: bool) -> Tensor:
        ctx.types = weight.dtype, bias.dtype
        x, weight = x.contiguous(), weight.to(x.dtype)
        out, pre = _bias_gelu(x, weight, bias.to(x.dtype), needs_gradient)
        ctx.save_for_backward(x, weight, pre)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, pre = ctx.saved_tensors
        d_pre = torch.ops.aten.gelu_backward(d_out.contiguous(), pre, approximate="tanh")
        d_weight, d_bias = _weight_and_bias_gradient(d_pre, x, ctx.types[0])
        d_x = d_pre @ weight if ctx.needs_input_grad[0] else None
        return d_x, d_weight, d_bias.to(ctx.types[1]), None


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, needs_gradient: bool) -> Tensor:
        ctx.types = w1.dtype, b1.dtype, w2.dtype
        x, w1, w2 = x.contiguous(), w1.to(x.dtype).contiguous(), w2.to(x.dtype).contiguous()
        inner, pre = _bias_gelu(x, w1, b1.to(x.dtype), needs_gradient)
        ctx.save_for_backward(x, w1, w2, inner, pre)
        return F.linear(inner, w2)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, w1, w2, inner, pre = ctx.saved_tensors
        d_out = d_out.contiguous()
        d_w2 = _weight_gradient(d_out, inner, ctx.types[2])
        d_pre, d_b1 = _gelu_backward(d_out, w2, pre)
        if d_b1 is None:
            d_w1, d_b1 = _weight_and_bias_gradient(d_pre, x, ctx.types[0])
        else:
            d_w1 = _weight_gradient(d_pre, x, ctx.types[0])
        d_x = d_pre @ w1 if ctx.needs_input_grad[0] else None
        return d_x, d_w1, d_b1.to(ctx.types[1]), d_w2, None


def _product(out: Tensor, left: Tensor, right: Tensor, **arguments: Any) -> bool:
    """`Library.product`; False as well where there is nothing to multiply, which cublasLt does not take."""
    return min(*out.shape, *left.shape) > 0 and library().product(out, left, right, **arguments)


def _bias_gelu(x: Tensor, weight: Tensor, bias: Tensor, keep_pre: bool) -> tuple[Tensor, Tensor | None]:
    """gelu(x W^T + b) [T, F] and, if wanted, the pre-activation."""
    shape = x.shape[0], weight.shape[0]
    if shape[1] % AUX_MULTIPLE == 0:
        out, pre = x.new_empty(shape), x.new_empty(shape) if keep_pre else None
        epilogue = Epilogue.GELU_AUX_BIAS if keep_pre else Epilogue.GELU_BIAS
        if _product(out, x, weight, right_transposed=True, epilogue=epilogue, bias=bias, aux=pre):
            return out, pre
    pre = F.linear(x, weight, bias)
    return F.gelu(pre, approximate="tanh"), pre if keep_pre else None


def _gelu_backward(d_out: Tensor, weight: Tensor, pre: Tensor) -> tuple[Tensor, Tensor | None]:
    """(d_out W) gelu'(pre), [T, F], of d_out [T, D] and W [D, F], and its sum over tokens [F] if that came with it."""
    if pre.shape[1] % AUX_MULTIPLE == 0:
        d_pre, d_bias = torch.empty_like(pre), pre.new_empty(pre.shape[1])
        if _product(d_pre, d_out, weight, epilogue=Epilogue.DGELU_BGRAD, bias=d_bias, aux=pre):
            return d_pre, d_bias
    return torch.ops.aten.gelu_backward(d_out @ weight, pre, approximate="tanh"), None


def _weight_gradient(d_out: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """d_out^T x, [F, D] in `dtype`, of d_out [T, F] and x [T, D]."""
    d_weight = _gradient_buffer(d_out, x, dtype)
    if _product(d_weight, d_out, x, left_transposed=True):
        return d_weight.to(dtype)
    return (d_out.t() @ x).to(dtype)


def _weight_and_bias_gradient(d_out: Tensor, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`_weight_gradient`, and the sum of d_out over tokens, [F]."""
    d_weight = _gradient_buffer(d_out, x, dtype)
    d_bias = d_weight.new_empty(d_weight.shape[0])
    if _product(d_weight, d_out, x, left_transposed=True, epilogue=Epilogue.BGRADB, bias=d_bias):
        return d_weight.to(dtype), d_bias
    return _weight_gradient(d_out, x, dtype), d_out.sum(0, dtype=torch.float32)


def _gradient_buffer(d_out: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for a weight gradient, in a type that such a product can have."""
    return x.new_empty(d_out.shape[1], x.shape[1], dtype=dtype if dtype == x.dtype else torch.float32)
