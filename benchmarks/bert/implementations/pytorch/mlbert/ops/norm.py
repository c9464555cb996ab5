"""LayerNorm fused with dropout and residual sum: one pass over memory each way.

Backward recomputes the masks.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mlbert.ops import forms as registry
from mlbert.ops import reference
from mlbert.ops.dropout import Key, dropout_threshold
from mlbert.ops.native_library import (
    check_rows,
    chunk_sums,
    is_bf16,
    library,
    pointer,
    token_chunk,
    token_chunks,
)
from mlbert.ops.weights import gradient_buffer, part_gradients


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

    Triton's and C's backward kernels add both gradients; with the reference autograd does, in a
    separate pass.
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
    return _DropoutAddNorm.apply(x.contiguous(), residual.contiguous(), *settings)


@registry.register("layer_norm_dropout", "native")
def _native_layer_norm_dropout(x: Tensor, *settings: Any) -> Tensor:
    return _NormDropout.apply(x.contiguous(), *settings)


class NormGradients(NamedTuple):
    """Gradients of the arguments of `NativeNorm`; None for vectors whose gradients are written in
    place.
    """

    x: Tensor
    residual: Tensor
    weight: Tensor | None
    bias: Tensor | None
    x_bias: Tensor | None

    def of_settings(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of the settings, in their order."""
        return (self.weight, self.bias, None, None, None, None, self.x_bias)


class NativeNorm:
    """The C kernels for one call, without autograd: LayerNorm(residual + dropout(x + x_bias)), or
    dropout(LayerNorm(x)) if there is no residual.

    Args:
        settings: the arguments of `dropout_add_layer_norm` from ``weight`` on.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        dropout_p: float,
        key: int,
        rows: Tensor | None,
        x_bias: Tensor | None = None,
    ) -> None:
        self._weight = weight
        self._bias = bias
        self._x_bias = x_bias
        self._eps = eps
        self._key = key
        self._threshold = dropout_threshold(dropout_p)
        self._rows = rows
        self._drops_output = False

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """Return the result, [T, D], and the tensors that `backward` needs.

        Args:
            x: [T, D], contiguous.
            residual: likewise, or None.
        """
        self._drops_output = residual is None
        num_tokens, columns = x.shape
        check_rows(self._rows, num_tokens, self._threshold)
        for vector in (self._weight, self._bias, self._x_bias):
            assert vector is None or vector.shape == (columns,), (
                f"{tuple(vector.shape)} for {columns} columns"
            )
        assert residual is None or residual.shape == x.shape, (
            f"{tuple(residual.shape)} is not {tuple(x.shape)}"
        )
        total = x if residual is None else torch.empty_like(x)
        statistics = torch.empty(num_tokens, 2)
        out = torch.empty_like(x)
        weight = self._weight.float().contiguous()
        bias = None if self._bias is None else self._bias.float().contiguous()
        x_bias = None if self._x_bias is None else self._x_bias.float().contiguous()
        library().norm_forward(
            pointer(x),
            pointer(x_bias),
            None if residual is None else pointer(residual, x.dtype),
            pointer(weight),
            pointer(bias),
            pointer(self._rows, torch.int32),
            num_tokens,
            columns,
            self._eps,
            self._key,
            self._threshold,
            int(self._drops_output),
            is_bf16(x),
            torch.get_num_threads(),
            None if residual is None else pointer(total),
            pointer(statistics),
            pointer(out),
        )
        return out, [total, statistics, weight, self._rows]

    def backward(
        self, saved: Sequence[Tensor], d_out: Tensor, d_twin: Tensor | None = None
    ) -> NormGradients:
        """Return the gradients for the gradient d_out of the result, or d_out + d_twin."""
        total, statistics, weight, rows = saved
        num_tokens, columns = total.shape
        d_out = d_out.contiguous()
        d_twin = None if d_twin is None else d_twin.contiguous()
        d_total = torch.empty_like(total)
        sums = 2 if self._x_bias is None else 3
        # Without dropout, x and residual share one gradient tensor.
        d_x = torch.empty_like(total) if self._threshold and not self._drops_output else d_total
        partial = torch.empty(token_chunks(num_tokens), sums, columns)
        library().norm_backward(
            pointer(d_out, total.dtype),
            pointer(d_twin, total.dtype),
            pointer(total),
            pointer(weight),
            pointer(statistics),
            pointer(rows),
            num_tokens,
            columns,
            token_chunk(num_tokens),
            self._key,
            self._threshold,
            int(self._drops_output),
            is_bf16(total),
            torch.get_num_threads(),
            pointer(d_total),
            pointer(d_x) if d_x is not d_total or sums == 3 else None,
            pointer(partial),
            sums,
        )
        # In the order of their sums. The kernel sums the gradient of a bias whether there is one or
        # not; it is the last.
        possible = (self._x_bias, self._weight, self._bias)
        vectors = [vector for vector in possible if vector is not None]
        buffer = gradient_buffer(vectors)
        total_sums = chunk_sums(partial.flatten(1), len(vectors) * columns, buffer)
        gradients = iter(part_gradients(vectors, total_sums, buffer))
        d_x_bias, d_weight, d_bias = (
            None if vector is None else next(gradients) for vector in possible
        )
        return NormGradients(d_x, d_total, d_weight, d_bias, d_x_bias)


def output_gradients(*gradients: Tensor | None) -> list[Tensor]:
    """Return the gradients of a tensor's readers without those that did not read it."""
    return [gradient for gradient in gradients if gradient is not None]


class _DropoutAddNorm(torch.autograd.Function):
    """Returns the result twice, so that the kernel adds the two gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.norm = NativeNorm(*settings)
        out, saved = ctx.norm.forward(x, residual)
        ctx.num_settings = len(settings)
        ctx.save_for_backward(*saved)
        return out, out.detach()

    @staticmethod
    def backward(ctx: Any, *d_outs: Tensor | None) -> tuple[Tensor | None, ...]:
        found = ctx.norm.backward(ctx.saved_tensors, *output_gradients(*d_outs))
        return (found.x, found.residual, *found.of_settings()[: ctx.num_settings])


class _NormDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *settings: Any) -> Tensor:
        ctx.norm = NativeNorm(*settings)
        out, saved = ctx.norm.forward(x, None)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.norm.backward(ctx.saved_tensors, d_out)
        return (found.x, *found.of_settings()[:-1])
