"""Linear layers with bias, GELU and bias gradients fused into the products by cublasLt's epilogues:

    forward   x W^T + b                        bias
              gelu(x W^T + b)                  bias and GELU;
                                               also stores the pre-activation for backward
    backward  (d_out W2) gelu'(pre)            GELU's derivative and the gradient of W1's bias
              d_out^T x                        bias gradient, if not computed before

Sums are float32. Weight gradients have the weights' dtype, usually float32, without rounding to the
activations' dtype, and are written or added in place (`mlbert.ops.weights`). If cublasLt has no
algorithm for a product, PyTorch's product runs instead, and `Library.product` warns once. GELU is a
separate kernel (`mlbert.ops.linear.gelu`) then, in the erf form, which cublasLt does not have, and
where that is faster (`mlbert.ops.cublaslt_tuning`). The forms ``triton`` have PyTorch's products
and the separate kernels only.

Legend: T tokens, D hidden, F columns of a weight's product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mlbert.ops import cublaslt_library
from mlbert.ops import forms as registry
from mlbert.ops.cublaslt_library import AUX_MULTIPLE, Epilogue, Library
from mlbert.ops.linear import gelu, gelu_backward, needs_gradient
from mlbert.ops.qkv_attention import AttentionArguments, AttentionForm
from mlbert.ops.weights import (
    GradientBuffer,
    gradient_buffer,
    in_type,
    kept_sum,
    part_gradients,
)

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


def load(kind: str) -> None:
    """Load the library. Raises as `library`."""
    library()


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
    biases = [] if bias is None else [bias]
    return _CublasLtLinear.apply(x, 1, has_other_users, weight, *biases)


@registry.register("linear_gelu", "cublaslt")
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, exact: bool) -> Tensor:
    """See `mlbert.ops.api.linear_gelu`."""
    return _FusedLinearGelu.apply(
        library(), x, weight, bias, exact, needs_gradient(x, weight, bias)
    )


@registry.register("feed_forward", "cublaslt")
def feed_forward(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, exact: bool) -> Tensor:
    """See `mlbert.ops.api.feed_forward`."""
    return _FusedFeedForward.apply(library(), x, w1, b1, w2, exact, needs_gradient(x, w1, b1, w2))


@registry.register("linear_gelu", "triton")
def _triton_linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, exact: bool) -> Tensor:
    return _FusedLinearGelu.apply(None, x, weight, bias, exact, needs_gradient(x, weight, bias))


@registry.register("feed_forward", "triton")
def _triton_feed_forward(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, exact: bool) -> Tensor:
    return _FusedFeedForward.apply(None, x, w1, b1, w2, exact, needs_gradient(x, w1, b1, w2))


class _CublasLtLinear(torch.autograd.Function):
    """A linear layer with its weight in ``parts``;
    the product for Q, K and V also adds the bias.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int, has_other_users: bool, *tensors: Tensor) -> Tensor:
        ctx.weights = tensors[:parts]
        biases = tensors[parts:]
        ctx.biases = biases
        ctx.has_other_users = has_other_users
        x = x.contiguous()
        weight = in_type(ctx.weights, x.dtype)
        bias = in_type(biases, x.dtype) if biases else None
        ctx.save_for_backward(x, weight)
        if bias is None or parts == 1:
            return F.linear(x, weight, bias)
        return _with_bias(library(), x, weight, bias)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_out = d_out.contiguous()
        d_bias = None
        buffer = gradient_buffer(ctx.biases) if ctx.biases else None
        if buffer is not None and not buffer.adds:
            d_bias = buffer.out
        elif ctx.biases:
            buffer = None  # no epilogue adds to a sum
            d_bias = d_out.new_empty(d_out.shape[1], dtype=_gradient_type(ctx.weights, d_out))
        d_weights = _weight_gradients(
            library(), ctx.weights, d_out, x, d_bias, last=not ctx.has_other_users
        )
        d_x = d_out @ weight if ctx.needs_input_grad[0] else None
        d_biases = () if d_bias is None else part_gradients(ctx.biases, d_bias, buffer)
        return d_x, None, None, *d_weights, *d_biases


def qkv_attention(
    form: AttentionForm,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    num_heads: int,
    arguments: AttentionArguments,
) -> Tensor:
    """Return attention of the projections of x [T, D], [T, N, H]; see `mlbert.ops.qkv_attention`.

    Args:
        weights, biases: three [D, D] and three [D].
    """
    return _QkvAttention.apply(form, x, num_heads, arguments, *weights, *biases)


class _QkvAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        form: AttentionForm,
        x: Tensor,
        num_heads: int,
        arguments: AttentionArguments,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.form = form
        ctx.weights = tensors[:3]
        ctx.biases = tensors[3:]
        x = x.contiguous()
        weight = in_type(ctx.weights, x.dtype)
        qkv = _with_bias(_library_if_any(x), x, weight, in_type(ctx.biases, x.dtype))
        head_size = qkv.shape[1] // (3 * num_heads)
        out, ctx.saved = form.forward(qkv.view(-1, 3, num_heads, head_size), arguments)
        ctx.save_for_backward(x, weight, out)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, out = ctx.saved_tensors
        buffer = gradient_buffer(ctx.biases)
        d_qkv, total = ctx.form.backward(ctx.saved, out, d_out, buffer)
        ctx.saved = None
        d_biases = part_gradients(ctx.biases, total, buffer)
        d_weights = _weight_gradients(_library_if_any(x), ctx.weights, d_qkv, x)
        d_x = d_qkv @ weight if ctx.needs_input_grad[1] else None
        return None, d_x, None, None, *d_weights, *d_biases


def _library_if_any(x: Tensor) -> Library | None:
    """Return the library on a GPU, or one that was given to `use`."""
    return library() if x.is_cuda or _override is not None else None


class _FusedLinearGelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        lt: Library | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        exact: bool,
        needs_gradient: bool,
    ) -> Tensor:
        ctx.lt = lt
        ctx.weight = weight
        ctx.bias = bias
        ctx.exact = exact
        x = x.contiguous()
        narrow = in_type((weight,), x.dtype)
        narrow_bias = in_type((bias,), x.dtype)
        out, pre = _bias_gelu(lt, x, narrow, narrow_bias, exact, needs_gradient)
        ctx.save_for_backward(x, narrow, pre)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, pre = ctx.saved_tensors
        buffer = gradient_buffer((ctx.bias,))
        d_pre, total = gelu_backward(d_out.contiguous(), pre, ctx.exact, buffer)
        (d_bias,) = part_gradients((ctx.bias,), total, buffer)
        (d_weight,) = _weight_gradients(ctx.lt, (ctx.weight,), d_pre, x)
        d_x = d_pre @ weight if ctx.needs_input_grad[1] else None
        return None, d_x, d_weight, d_bias, None, None


class _FusedFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        lt: Library | None,
        x: Tensor,
        w1: Tensor,
        b1: Tensor,
        w2: Tensor,
        exact: bool,
        needs_gradient: bool,
    ) -> Tensor:
        ctx.lt = lt
        ctx.weights = (w1, w2)
        ctx.bias = b1
        ctx.exact = exact
        x = x.contiguous()
        w1 = in_type((w1,), x.dtype).contiguous()
        w2 = in_type((w2,), x.dtype).contiguous()
        inner, pre = _bias_gelu(lt, x, w1, in_type((b1,), x.dtype), exact, needs_gradient)
        ctx.save_for_backward(x, w1, w2, inner, pre)
        return F.linear(inner, w2)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, w1, w2, inner, pre = ctx.saved_tensors
        first, second = ctx.weights
        d_out = d_out.contiguous()
        (d_w2,) = _weight_gradients(ctx.lt, (second,), d_out, inner)
        buffer = gradient_buffer((ctx.bias,))
        d_pre, total = _gelu_backward(ctx.lt, d_out, w2, pre, ctx.exact, buffer)
        (d_b1,) = part_gradients((ctx.bias,), total, buffer)
        (d_w1,) = _weight_gradients(ctx.lt, (first,), d_pre, x)
        d_x = d_pre @ w1 if ctx.needs_input_grad[1] else None
        return None, d_x, d_w1, d_b1, d_w2, None, None


def _product(
    lt: Library | None, out: Tensor, left: Tensor, right: Tensor, **arguments: Any
) -> bool:
    """Call `Library.product`.

    Return False without a library, and for empty operands, which cublasLt refuses.
    """
    return (
        lt is not None
        and min(*out.shape, *left.shape) > 0
        and lt.product(out, left, right, **arguments)
    )


def _with_bias(lt: Library | None, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return x W^T + b, [T, F]."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    is_done = _product(lt, out, x, weight, right_transposed=True, epilogue=Epilogue.BIAS, bias=bias)
    return out if is_done else F.linear(x, weight, bias)


def _has_gelu(lt: Library | None, exact: bool, dtype: torch.dtype, columns: int) -> bool:
    """Return whether an epilogue can compute it: the tanh form,
    whose error in float32 is ten times PyTorch's.
    """
    return lt is not None and not exact and dtype != torch.float32 and columns % AUX_MULTIPLE == 0


def _bias_gelu(
    lt: Library | None, x: Tensor, weight: Tensor, bias: Tensor, exact: bool, keep_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """Return gelu(x W^T + b), [T, F], and the pre-activation if ``keep_pre``."""
    num_tokens = x.shape[0]
    columns = weight.shape[0]
    if _has_gelu(lt, exact, x.dtype, columns):
        out = x.new_empty(num_tokens, columns)
        pre = x.new_empty(num_tokens, columns) if keep_pre else None
        epilogue = Epilogue.GELU_AUX_BIAS if keep_pre else Epilogue.GELU_BIAS
        if _product(
            lt, out, x, weight, right_transposed=True, epilogue=epilogue, bias=bias, aux=pre
        ):
            return out, pre
    out, pre = bias_gelu_apart(lt, x, weight, bias, exact)
    return out, pre if keep_pre else None


def bias_gelu_apart(
    lt: Library | None, x: Tensor, weight: Tensor, bias: Tensor, exact: bool = False
) -> tuple[Tensor, Tensor]:
    """Return gelu(x W^T + b) and x W^T + b, [T, F], by a product and a kernel."""
    pre = _with_bias(lt, x, weight, bias)
    return gelu(pre, exact), pre


def _gelu_backward(
    lt: Library | None,
    d_out: Tensor,
    weight: Tensor,
    pre: Tensor,
    exact: bool,
    buffer: GradientBuffer | None,
) -> tuple[Tensor, Tensor]:
    """Return (d_out W) gelu'(pre), [T, F], for d_out [T, D] and W [D, F],
    and its sum over tokens [F], in the buffer if there is one.
    """
    if _has_gelu(lt, exact, pre.dtype, pre.shape[1]):
        d_pre = torch.empty_like(pre)
        d_bias = pre.new_empty(pre.shape[1])
        if _product(lt, d_pre, d_out, weight, epilogue=Epilogue.DGELU_BGRAD, bias=d_bias, aux=pre):
            return d_pre, kept_sum(d_bias, buffer)
    return gelu_backward_apart(lt, d_out, weight, pre, exact, buffer)


def gelu_backward_apart(
    lt: Library | None,
    d_out: Tensor,
    weight: Tensor,
    pre: Tensor,
    exact: bool = False,
    buffer: GradientBuffer | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (d_out W) gelu'(pre) and its sum over tokens, by a product and a kernel."""
    d_inner = torch.empty_like(pre)
    if not _product(lt, d_inner, d_out, weight):
        torch.mm(d_out, weight, out=d_inner)
    return gelu_backward(d_inner, pre, exact, buffer)


def _weight_gradients(
    lt: Library | None,
    parts: tuple[Tensor, ...],
    d_out: Tensor,
    x: Tensor,
    d_bias: Tensor | None = None,
    last: bool = True,
) -> tuple[Tensor | None, ...]:
    """Return d_out^T x, for d_out [T, F] and x [T, D], one tensor per part of the weight;
    None if written in place.

    Args:
        d_bias: [F], written with the sum of d_out over tokens.
        last: as in `mlbert.ops.weights.written`.
    """
    buffer = gradient_buffer(parts)
    if buffer is None:
        out = x.new_empty(d_out.shape[1], x.shape[1], dtype=_gradient_type(parts, x))
        adds = False
    else:
        out, adds = buffer
    options = {"left_transposed": True, "adds": adds}
    if d_bias is None or not _product(
        lt, out, d_out, x, **options, epilogue=Epilogue.BGRADB, bias=d_bias
    ):
        if d_bias is not None:
            torch.sum(d_out, 0, dtype=d_bias.dtype, out=d_bias)
        if not _product(lt, out, d_out, x, **options):
            product = d_out.t() @ x
            out.add_(product) if adds else out.copy_(product)
    return part_gradients(parts, out, buffer, last)


def _gradient_type(parts: tuple[Tensor, ...], x: Tensor) -> torch.dtype:
    """Return a dtype in which cublasLt can compute the weight gradient."""
    return x.dtype if parts[0].dtype == x.dtype else torch.float32
