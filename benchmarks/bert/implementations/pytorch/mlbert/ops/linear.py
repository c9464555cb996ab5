"""Linear layers: one product for Q, K and V, a product with bias and GELU,
and the two products of the feed-forward.

All products here are PyTorch's; `mlbert.ops.cublaslt` calls cublasLt. ``native`` adds C kernels for
bias + GELU, forward and backward (with the bias gradient in the same pass), and for sums over
tokens, and writes gradients in place (`mlbert.ops.weights`). Weights are converted to the
activations' dtype, and their gradients back.

Legend: T tokens, D hidden, F columns of a weight's product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mlbert.ops import forms as registry
from mlbert.ops import reference
from mlbert.ops.dropout import Key, dropout_threshold
from mlbert.ops.native_library import (
    chunk_sums,
    is_bf16,
    library,
    pointer,
    token_chunk,
    token_chunks,
    token_sums,
)
from mlbert.ops.weights import (
    GradientBuffer,
    gradient_buffer,
    in_type,
    joined,
    kept_sum,
    part_gradients,
)


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
def _plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None, has_other_users: bool) -> Tensor:
    del has_other_users
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


@registry.register("linear", "native")
def _native_linear(x: Tensor, weight: Tensor, bias: Tensor | None, has_other_users: bool) -> Tensor:
    biases = () if bias is None else (bias,)
    return _NativeLinear.apply(x, 1, has_other_users, weight, *biases)


registry.register("linear_gelu", "plain")(reference.linear_gelu)
registry.register("feed_forward", "plain")(reference.feed_forward)


@registry.register("linear_qkv", "native")
def _native_linear_qkv(x: Tensor, *weights_and_biases: Tensor) -> Tensor:
    return _NativeLinear.apply(x, 3, False, *weights_and_biases)


@registry.register("linear_gelu", "native")
def _native_linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, exact: bool) -> Tensor:
    return (_LinearExactGelu if exact else _LinearGelu).apply(
        x, weight, bias, needs_gradient(x, weight, bias)
    )


@registry.register("feed_forward", "native")
def _native_feed_forward(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, exact: bool) -> Tensor:
    return _native_linear(_native_linear_gelu(x, w1, b1, exact), w2, None, False)


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


def _weight_gradients(
    parts: Sequence[Tensor], d_out: Tensor, x: Tensor, last: bool = True
) -> tuple[Tensor | None, ...]:
    """Return d_out^T x, for d_out [T, F] and x [T, D], one tensor per part of the weight; None if
    written in place. For ``last`` see `mlbert.ops.weights.written`.
    """
    buffer = gradient_buffer(parts)
    if buffer is None:
        return part_gradients(parts, d_out.t() @ x, None)
    if buffer.adds or buffer.out.dtype != x.dtype:
        buffer.keep(d_out.t() @ x)
    else:
        torch.mm(d_out.t(), x, out=buffer.out)
    return part_gradients(parts, buffer.out, buffer, last)


def _vector_gradients(parts: Sequence[Tensor], partial: Tensor) -> tuple[Tensor | None, ...]:
    """Return the sum of ``partial`` [chunks, F], one tensor per part; None if written in place."""
    buffer = gradient_buffer(parts)
    return part_gradients(parts, chunk_sums(partial, partial.shape[1], buffer), buffer)


class NativeLinear:
    """One call of a linear layer, without autograd.

    Args:
        weights: the weight, in parts.
        biases: the bias, likewise, or nothing.
        has_other_users: as in `linear`.
    """

    NUM_SAVED = 2

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor] = (),
        has_other_users: bool = False,
    ) -> None:
        self._weights = weights
        self._biases = biases
        self._has_other_users = has_other_users

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return x W^T + b and the `NUM_SAVED` tensors that `backward` needs."""
        weight = in_type(self._weights, x.dtype)
        bias = joined(self._biases).to(x.dtype) if self._biases else None
        return F.linear(x, weight, bias), (x, weight)

    def backward(
        self, saved: Sequence[Tensor], d_out: Tensor, needs_d_x: bool
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of the parts of the weight and the bias."""
        x, weight = saved
        d_out = d_out.contiguous()
        d_weights = _weight_gradients(self._weights, d_out, x, last=not self._has_other_users)
        d_biases = _vector_gradients(self._biases, token_sums(d_out)) if self._biases else ()
        d_x = d_out @ weight if needs_d_x else None
        return (d_x, *d_weights, *d_biases)


class _NativeLinear(torch.autograd.Function):
    """A linear layer with its weight, and its bias if it has one, in ``parts``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int, has_other_users: bool, *tensors: Tensor) -> Tensor:
        ctx.linear = NativeLinear(tensors[:parts], tensors[parts:], has_other_users)
        out, saved = ctx.linear.forward(x)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        d_x, *others = ctx.linear.backward(ctx.saved_tensors, d_out, ctx.needs_input_grad[0])
        return (d_x, None, None, *others)


class NativeLinearGelu:
    """One call of a linear layer with GELU in the tanh form, without autograd."""

    NUM_SAVED = 4

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self._weight = weight
        self._bias = bias
        self._consumed = False

    def forward(self, x: Tensor, needs_gradient: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return gelu(x W^T + b) and, if a backward pass may follow, the `NUM_SAVED` tensors that
        `backward` needs.
        """
        weight = in_type((self._weight,), x.dtype)
        bias = self._bias.float().contiguous()
        pre = x @ weight.t()
        out = torch.empty_like(pre) if needs_gradient else pre
        threads = torch.get_num_threads()
        library().bias_gelu_forward(
            pointer(pre), pointer(bias), *pre.shape, is_bf16(pre), threads, pointer(out)
        )
        return out, (x, weight, bias, pre) if needs_gradient else ()

    def backward(
        self, saved: Sequence[Tensor], d_out: Tensor, needs_d_x: bool
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, the weight and the bias."""
        x, weight, bias, pre = saved
        # The gradient overwrites the pre-activation, which saves one buffer of the widest layer.
        assert not self._consumed, "linear_gelu's backward runs once"
        self._consumed = True
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
        (d_weight,) = _weight_gradients((self._weight,), pre, x)
        (d_bias,) = _vector_gradients((self._bias,), partial)
        d_x = pre @ weight if needs_d_x else None
        return d_x, d_weight, d_bias


class _LinearGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, needs_gradient: bool) -> Tensor:
        ctx.layer = NativeLinearGelu(weight, bias)
        out, saved = ctx.layer.forward(x, needs_gradient)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.layer.backward(ctx.saved_tensors, d_out, ctx.needs_input_grad[0]), None)


class _LinearExactGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, needs_gradient: bool) -> Tensor:
        del needs_gradient
        ctx.weight = weight
        ctx.bias = bias
        weight = in_type((weight,), x.dtype)
        pre = F.linear(x, weight, bias.to(x.dtype))
        ctx.save_for_backward(x, weight, pre)
        return F.gelu(pre)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, pre = ctx.saved_tensors
        d_pre = torch.ops.aten.gelu_backward(d_out.contiguous(), pre)
        (d_weight,) = _weight_gradients((ctx.weight,), d_pre, x)
        (d_bias,) = _vector_gradients((ctx.bias,), token_sums(d_pre))
        d_x = d_pre @ weight if ctx.needs_input_grad[0] else None
        return d_x, d_weight, d_bias, None


class _GatedFeedForward(torch.autograd.Function):
    """Keeps one product of the forward pass, and computes what is between the products again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w2: Tensor, exact: bool) -> Tensor:
        ctx.weights = (w1, w2)
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
        first, second = ctx.weights
        (d_w2,) = _weight_gradients((second,), d_out, inner.mul_(value))
        (d_w1,) = _weight_gradients((first,), d_pre, x)
        d_x = d_pre @ w1 if ctx.needs_input_grad[0] else None
        return d_x, d_w1, d_w2, None
