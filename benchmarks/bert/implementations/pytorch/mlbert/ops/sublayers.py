"""Neighboring ops of a post-norm layer as one autograd function each, if all of them run native.

The products and kernels are those of the ops one after the other, with the same results. What is
saved is the time of autograd and of the interpreter between them, which small models notice, and
the passes that add the gradients of a tensor with two readers.

Legend: T tokens, D hidden, F inner size, N heads, H head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mlbert.ops import forms as registry
from mlbert.ops.attention import NativeAttention, Queries, uses_tiles
from mlbert.ops.dropout import dropout_threshold
from mlbert.ops.linear import (
    NativeLinear,
    NativeLinearGelu,
    feed_forward,
    linear,
    needs_gradient,
)
from mlbert.ops.norm import NativeNorm, dropout_add_layer_norm_twice, output_gradients
from mlbert.ops.qkv_attention import AttentionArguments

NATIVE = "native"


def native_qkv_attention(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    num_heads: int,
    arguments: AttentionArguments,
) -> Tensor | None:
    """Return attention of the projections of x [T, D], [T, N, H], or None if it does not run
    native.

    Args:
        weights, biases: three [D, D] and three [D].
    """
    if not _run_native(x, "linear_qkv", "attention"):
        return None
    attention = _native_attention(x, num_heads, arguments)
    return _QkvAttention.apply(x, attention, num_heads, *weights, *biases)


def native_attention_of_some(
    x: Tensor,
    tokens: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    num_heads: int,
    arguments: AttentionArguments,
) -> tuple[Tensor, Tensor] | None:
    """Return attention as `native_qkv_attention` and x for some tokens, [R, N, H] and [R, D], or
    None if it does not run native.

    Queries are computed for these tokens only: in a small model's only layer, a fifth of all.

    Args:
        tokens: int64 [R].
    """
    if not _run_native(x, "linear_qkv", "attention"):
        return None
    attention = _native_attention(x, num_heads, arguments)
    if not attention.takes_queries:
        return None
    queries = Queries.of(tokens, arguments.cu_seqlens)
    return _AttentionOfSome.apply(x, attention, tokens, queries, num_heads, *weights, *biases)


def _native_attention(x: Tensor, num_heads: int, arguments: AttentionArguments) -> NativeAttention:
    assert isinstance(arguments.key, int), "C kernels take keys as numbers"
    return NativeAttention(
        arguments.cu_seqlens,
        uses_tiles(x.dtype, x.shape[1] // num_heads),
        dropout_threshold(arguments.dropout_p),
        arguments.key,
        arguments.rows,
        arguments.alibi_slopes,
        None,
        None,
        arguments.order,
    )


def linear_norm(x: Tensor, weight: Tensor, residual: Tensor, *norm: Any) -> tuple[Tensor, Tensor]:
    """Return LayerNorm(residual + dropout(x W^T + b)) twice, for two readers.

    Args:
        x: [T, F].
        weight: [D, F].
        residual: [T, D].
        norm: arguments of `mlbert.ops.norm.dropout_add_layer_norm` from ``weight`` on; b is the
            last one.
    """
    if _run_native(x, "linear", "dropout_add_layer_norm"):
        return _LinearNorm.apply(x, weight, residual, *norm)
    return dropout_add_layer_norm_twice(linear(x, weight), residual, *norm)


def feed_forward_norm(
    x: Tensor,
    residual: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    exact: bool,
    *norm: Any,
) -> tuple[Tensor, Tensor]:
    """Return LayerNorm(residual + dropout(gelu(x W1^T + b1) W2^T + b)) twice, for two readers.

    Args:
        x, residual: [T, D].
        w1, b1, w2: [F, D], [F], [D, F].
        exact: as in `mlbert.ops.linear.linear_gelu`.
        norm: as in `linear_norm`.
    """
    if not exact and _run_native(x, "linear", "linear_gelu", "dropout_add_layer_norm"):
        has_gradient = needs_gradient(x, residual, w1, b1, w2)
        return _FeedForwardNorm.apply(has_gradient, x, residual, w1, b1, w2, *norm)
    inner = feed_forward(x, w1, b1, w2, exact)
    return dropout_add_layer_norm_twice(inner, residual, *norm)


def _run_native(x: Tensor, *ops: str) -> bool:
    """Return whether these ops run native on tensors like this one."""
    selected = registry.selected(x.device)
    return registry.takes(NATIVE, x.dtype) and all(selected[op] == NATIVE for op in ops)


class _QkvAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, attention: NativeAttention, num_heads: int, *tensors: Tensor
    ) -> Tensor:
        ctx.attention = attention
        ctx.linear = NativeLinear(tensors[:3], tensors[3:])
        product, saved = ctx.linear.forward(x)
        qkv = product.view(-1, 3, num_heads, x.shape[1] // num_heads)
        out, statistics = attention.forward(qkv)
        ctx.save_for_backward(*saved, qkv, statistics)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        *saved, qkv, statistics = ctx.saved_tensors
        d_qkv = ctx.attention.backward(qkv, statistics, d_out).flatten(1)
        d_x, *others = ctx.linear.backward(saved, d_qkv, ctx.needs_input_grad[0])
        return (d_x, None, None, *others)


class _AttentionOfSome(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        attention: NativeAttention,
        tokens: Tensor,
        queries: Queries,
        num_heads: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        weights = tensors[:3]
        biases = tensors[3:]
        head_size = x.shape[1] // num_heads
        ctx.attention = attention
        ctx.queries = queries
        ctx.for_queries = NativeLinear(weights[:1], biases[:1])
        ctx.for_others = NativeLinear(weights[1:], biases[1:])
        rows = x.index_select(0, tokens)
        q, of_queries = ctx.for_queries.forward(rows)
        keys_and_values, of_others = ctx.for_others.forward(x)
        q = q.view(-1, num_heads, head_size)
        keys_and_values = keys_and_values.view(-1, 2, num_heads, head_size)
        out, statistics = attention.forward_of_queries(queries, q, keys_and_values)
        ctx.save_for_backward(tokens, *of_queries, *of_others, q, keys_and_values, statistics)
        return out, rows

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_rows: Tensor) -> tuple[Tensor | None, ...]:
        tokens, *saved, q, keys_and_values, statistics = ctx.saved_tensors
        split = NativeLinear.NUM_SAVED
        d_q, d_others = ctx.attention.backward_of_queries(
            ctx.queries, q, keys_and_values, statistics, d_out
        )
        d_x, *of_others = ctx.for_others.backward(saved[split:], d_others.flatten(1), True)
        d_x_rows, *of_queries = ctx.for_queries.backward(saved[:split], d_q.flatten(1), True)
        assert d_x is not None
        assert d_x_rows is not None
        d_x.index_add_(0, tokens, d_x_rows.add_(d_rows))
        # First all weights, then all biases.
        parts = (of_queries[:1], of_others[:2], of_queries[1:], of_others[2:])
        return (d_x, None, None, None, None, *itertools.chain.from_iterable(parts))


class _LinearNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, residual: Tensor, *norm: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.linear = NativeLinear((weight,))
        ctx.norm = NativeNorm(*norm)
        product, of_linear = ctx.linear.forward(x)
        out, of_norm = ctx.norm.forward(product, residual.contiguous())
        ctx.save_for_backward(*of_linear, *of_norm)
        return out, out.detach()

    @staticmethod
    def backward(ctx: Any, *d_outs: Tensor | None) -> tuple[Tensor | None, ...]:
        split = NativeLinear.NUM_SAVED
        saved = ctx.saved_tensors
        found = ctx.norm.backward(saved[split:], *output_gradients(*d_outs))
        d_x, d_weight = ctx.linear.backward(saved[:split], found.x, ctx.needs_input_grad[0])
        return (d_x, d_weight, found.residual, *found.of_settings())


class _FeedForwardNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        has_gradient: bool,
        x: Tensor,
        residual: Tensor,
        w1: Tensor,
        b1: Tensor,
        w2: Tensor,
        *norm: Any,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.first = NativeLinearGelu(w1, b1)
        ctx.second = NativeLinear((w2,))
        ctx.norm = NativeNorm(*norm)
        inner, of_first = ctx.first.forward(x, has_gradient)
        product, of_second = ctx.second.forward(inner)
        out, of_norm = ctx.norm.forward(product, residual.contiguous())
        ctx.save_for_backward(*of_first, *of_second, *of_norm)
        return out, out.detach()

    @staticmethod
    def backward(ctx: Any, *d_outs: Tensor | None) -> tuple[Tensor | None, ...]:
        first = NativeLinearGelu.NUM_SAVED
        second = first + NativeLinear.NUM_SAVED
        saved = ctx.saved_tensors
        found = ctx.norm.backward(saved[second:], *output_gradients(*d_outs))
        d_inner, d_w2 = ctx.second.backward(saved[first:second], found.x, needs_d_x=True)
        assert d_inner is not None
        d_x, d_w1, d_b1 = ctx.first.backward(saved[:first], d_inner, ctx.needs_input_grad[1])
        return (None, d_x, found.residual, d_w1, d_b1, d_w2, *found.of_settings())
