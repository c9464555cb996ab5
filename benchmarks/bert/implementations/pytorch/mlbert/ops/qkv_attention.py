"""Attention whose backward pass leaves the gradient as the product before it, for Q, K and V, reads
it: with its sum over tokens, which is the bias gradient, and for FP8 products in e5m2.

Elsewhere, the product's backward pass reads the gradient once more, to sum it (in bfloat16, as an
epilogue of the weight gradient's product) and to round it (FP8). Implementations are an
`AttentionForm`, whose two directions the ops ``qkv_attention`` and ``fp8_qkv_attention`` run one
after the other, to be verified. The plain ones are never used in training.

Legend: T tokens, U tokens rounded up to a multiple of 16, N heads, H head size, D = N H.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mlbert.ops import forms as registry
from mlbert.ops import reference
from mlbert.ops.dropout import Key
from mlbert.ops.forms import NOT_USED
from mlbert.ops.fp8_casts import plain_quantize
from mlbert.ops.fp8_scaling import GRADIENT, TYPES, Quantized
from mlbert.ops.weights import GradientBuffer, kept_sum

OP = "qkv_attention"
FP8_OP = "fp8_qkv_attention"


class AttentionArguments(NamedTuple):
    """Arguments of `mlbert.ops.attention.attention` after the first, without windows and rotations,
    which no form has.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    dropout_p: float
    key: Key
    rows: Tensor | None
    alibi_slopes: Tensor | None
    order: Tensor

    def attend(self, qkv: Tensor) -> Tensor:
        """Return the reference's result."""
        return reference.attention(
            qkv,
            self.cu_seqlens,
            self.max_seqlen,
            self.dropout_p,
            self.key,
            self.rows,
            self.alibi_slopes,
        )


class AttentionForm(Protocol):
    """Attention without autograd, in two directions."""

    def takes(self, head_size: int) -> bool:
        """Return whether there are kernels for this H."""

    def forward(self, qkv: Tensor, arguments: AttentionArguments) -> tuple[Tensor, Any]:
        """Return attention of qkv [T, 3, N, H], [T, N, H], and what backward needs besides it."""

    def backward(
        self,
        saved: Any,
        out: Tensor,
        d_out: Tensor,
        buffer: GradientBuffer | None,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> tuple[Tensor | Quantized, Tensor]:
        """Return the gradient of qkv, and its sum over tokens before rounding, float32 [3 D].

        Args:
            saved, out: of forward.
            d_out: gradient of out.
            buffer: memory for the sum.
            scale, amax: float32 scalars, to return the gradient in FP8: times scale in e5m2,
                rows [T, 3 D] and columns [3 D, U]; amax is raised to its largest magnitude. Else
                it is [T, 3 D] in the dtype of qkv.
        """


class PlainAttentionForm:
    """The reference."""

    def takes(self, head_size: int) -> bool:
        """See `AttentionForm`."""
        return True

    def forward(self, qkv: Tensor, arguments: AttentionArguments) -> tuple[Tensor, Any]:
        """See `AttentionForm`."""
        return arguments.attend(qkv), (qkv, arguments)

    def backward(
        self,
        saved: Any,
        out: Tensor,
        d_out: Tensor,
        buffer: GradientBuffer | None,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> tuple[Tensor | Quantized, Tensor]:
        """See `AttentionForm`."""
        del out
        qkv, arguments = saved
        with torch.enable_grad():
            # In float32, so that the sum is of numbers that are not rounded.
            leaf = qkv.detach().float().requires_grad_()
            result = arguments.attend(leaf)
            (wide,) = torch.autograd.grad(result, leaf, d_out.float())
        wide = wide.flatten(1)
        total = kept_sum(wide.sum(0), buffer)
        if scale is None or amax is None:
            return wide.to(qkv.dtype), total
        return plain_quantize(wide, scale, amax, TYPES[GRADIENT]), total


_forms: dict[str, AttentionForm] = {}


def register(name: str, form: AttentionForm) -> None:
    """Register a form for both ops."""
    _forms[name] = form
    registry.register(OP, name)(functools.partial(_both_directions, form))
    registry.register(FP8_OP, name)(functools.partial(_both_directions, form))


def chosen(op: str, x: Tensor, num_heads: int) -> AttentionForm | None:
    """Return the selected form for the heads of x [T, D], or None for attention and product
    apart.
    """
    name = registry.selected(x.device)[op]
    if name in NOT_USED or not registry.takes(name, x.dtype) or x.dtype == torch.float32:
        return None
    form = _forms[name]
    return form if form.takes(x.shape[1] // num_heads) else None


def _both_directions(
    form: AttentionForm,
    qkv: Tensor,
    d_out: Tensor,
    arguments: AttentionArguments,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor | Quantized, Tensor]:
    """Return attention, its gradient, and the gradient's sum."""
    with torch.no_grad():
        out, saved = form.forward(qkv, arguments)
        gradient, total = form.backward(saved, out, d_out, None, scale, amax)
    return out, gradient, total


for _name in NOT_USED:
    register(_name, PlainAttentionForm())
