"""LayerNorm fused with dropout and residual sum: one pass over memory each way.

Backward recomputes the masks.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mlbert.ops import forms as registry
from mlbert.ops import reference
from mlbert.ops.dropout import Key, dropout_threshold
from mlbert.ops.native_library import (
    check_rows,
    is_bf16,
    library,
    pointer,
    token_chunk,
    token_chunks,
)
from mlbert.ops.weights import gradient_buffer, part_gradients, summed


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    key: Key,
    rows: Tensor | None,
    x_bias: Tensor | None = None,
) -> Tensor:
    """Return LayerNorm(residual + dropout(x + x_bias)).

    Args:
        x, residual: [T, D] float32 or bfloat16, of one dtype.
        weight, bias: [D], LayerNorm's; bias may be None.
        eps: added to the variance.
        dropout_p: in [0, 1), rounded to 1/256.
        key: `dropout_key` of this site.
        rows: int32 [T], the mask row of each token; may be None without dropout.
        x_bias: [D] or None, the bias of the linear layer before it; adding it here saves a pass.

    Returns:
        [T, D] of the dtype of x.
    """
    return dropout_add_layer_norm_twice(
        x, residual, weight, bias, eps, dropout_p, key, rows, x_bias
    )[0]


def dropout_add_layer_norm_twice(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the result of `dropout_add_layer_norm` twice, for two readers.

    Triton's backward kernel adds both gradients; in other implementations autograd does,
    in a separate pass.
    """
    first, second = registry.implementation("dropout_add_layer_norm", x)(x, *arguments)
    return first, second


def layer_norm_dropout(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    key: Key,
    rows: Tensor | None,
) -> Tensor:
    """Return dropout(LayerNorm(x)); arguments as in `dropout_add_layer_norm`."""
    return registry.implementation("layer_norm_dropout", x)(
        x, weight, bias, eps, dropout_p, key, rows
    )


def add_dropout(
    residual: Tensor, x: Tensor, dropout_p: float, key: Key, rows: Tensor | None
) -> Tensor:
    """Return residual + dropout(x), [T, D]; arguments as in `dropout_add_layer_norm`."""
    result: Tensor = registry.implementation("add_dropout", x)(residual, x, dropout_p, key, rows)
    return result


for _name in ("plain", "native"):
    registry.register("add_dropout", _name)(reference.add_dropout)
registry.register("layer_norm_dropout", "plain")(reference.layer_norm_dropout)


@registry.register("dropout_add_layer_norm", "plain")
def _plain_dropout_add_layer_norm(*arguments: Any) -> tuple[Tensor, Tensor]:
    out = reference.dropout_add_layer_norm(*arguments)
    return out, out


@registry.register("dropout_add_layer_norm", "native")
def _native_dropout_add_layer_norm(
    x: Tensor, residual: Tensor, *settings: Any
) -> tuple[Tensor, Tensor]:
    out = _DropoutNorm.apply(x.contiguous(), residual.contiguous(), False, *settings)
    return out, out


@registry.register("layer_norm_dropout", "native")
def _native_layer_norm_dropout(x: Tensor, *settings: Any) -> Tensor:
    return _DropoutNorm.apply(x.contiguous(), None, True, *settings, None)


class _DropoutNorm(torch.autograd.Function):
    """`drop_output` False: LayerNorm(residual + dropout(x + x_bias)); True: dropout(LayerNorm(x)).

    ``settings`` are the arguments of `dropout_add_layer_norm` from ``weight`` on.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, drop_output: bool, *settings: Any
    ) -> Tensor:
        weight, bias, eps, dropout_p, key, rows, x_bias = settings
        threshold = dropout_threshold(dropout_p)
        num_tokens, columns = x.shape
        check_rows(rows, num_tokens, threshold)
        for vector in (weight, bias, x_bias):
            assert vector is None or vector.shape == (columns,), (
                f"{tuple(vector.shape)} for {columns} columns"
            )
        assert residual is None or residual.shape == x.shape, (
            f"{tuple(residual.shape)} is not {tuple(x.shape)}"
        )
        total = x if drop_output else torch.empty_like(x)
        statistics = torch.empty(num_tokens, 2)
        out = torch.empty_like(x)
        wide_weight = weight.float().contiguous()
        wide_bias = None if bias is None else bias.float().contiguous()
        wide_x_bias = None if x_bias is None else x_bias.float().contiguous()
        residual_pointer = None if residual is None else pointer(residual, x.dtype)
        library().norm_forward(
            pointer(x),
            pointer(wide_x_bias),
            residual_pointer,
            pointer(wide_weight),
            pointer(wide_bias),
            pointer(rows, torch.int32),
            num_tokens,
            columns,
            eps,
            key,
            threshold,
            int(drop_output),
            is_bf16(x),
            torch.get_num_threads(),
            None if drop_output else pointer(total),
            pointer(statistics),
            pointer(out),
        )
        ctx.save_for_backward(total, statistics, wide_weight, rows)
        ctx.dropout = (key, threshold)
        ctx.drop_output = drop_output
        # In the order of their sums.
        ctx.vectors = (x_bias, weight, bias)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        total, statistics, weight, rows = ctx.saved_tensors
        key, threshold = ctx.dropout
        num_tokens, columns = total.shape
        d_out = d_out.contiguous()
        d_total = torch.empty_like(total)
        sums = 2 if ctx.vectors[0] is None else 3
        # Without dropout, x and residual share one gradient tensor.
        d_x = torch.empty_like(total) if threshold and not ctx.drop_output else d_total
        chunk = token_chunk(num_tokens)
        partial = torch.empty(token_chunks(num_tokens), sums, columns)
        library().norm_backward(
            pointer(d_out, total.dtype),
            pointer(total),
            pointer(weight),
            pointer(statistics),
            pointer(rows),
            num_tokens,
            columns,
            chunk,
            key,
            threshold,
            int(ctx.drop_output),
            is_bf16(total),
            torch.get_num_threads(),
            pointer(d_total),
            pointer(d_x) if d_x is not d_total or sums == 3 else None,
            pointer(partial),
            sums,
        )
        # The kernel sums the gradient of a bias whether there is one or not; it is the last.
        vectors = [vector for vector in ctx.vectors if vector is not None]
        buffer = gradient_buffer(vectors)
        total_sums = summed(partial.flatten(1)[:, : len(vectors) * columns], buffer)
        gradients = iter(part_gradients(vectors, total_sums, buffer))
        d_x_bias, d_weight, d_bias = (
            None if vector is None else next(gradients) for vector in ctx.vectors
        )
        return (
            d_x,
            None if ctx.drop_output else d_total,
            None,
            d_weight,
            d_bias,
            None,
            None,
            None,
            None,
            d_x_bias,
        )
