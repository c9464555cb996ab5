"""The Triton form of `mlbert.ops.qkv_attention`.

The kernels of attention's backward pass store the sums over the tokens of their blocks, and round
to e5m2 themselves. For FP8, a kernel then transposes the bytes: it reads and writes one
byte a number, where the cast of a bfloat16 gradient reads two and writes two after two were
written.

None has run on a GPU, so only ``OPS=qkv`` uses it.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch

from mlbert.ops import qkv_attention
from mlbert.ops.attention import TRITON_HEAD_SIZES
from mlbert.ops.dropout import dropout_threshold
from mlbert.ops.fp8_scaling import GRADIENT, TYPES
from mlbert.ops.triton.attention import (
    AttentionSettings,
    attention_backward,
    attention_forward,
    sum_rows,
    triton_kernels,
)
from mlbert.ops.triton.cast import cast_transpose_bias, transposed_copy
from mlbert.ops.triton.device import sum_partials
from mlbert.ops.weights import kept_sum


class TritonAttentionForm:
    """See `mlbert.ops.qkv_attention.AttentionForm`."""

    def takes(self, head_size):
        """See `AttentionForm`."""
        return head_size in TRITON_HEAD_SIZES

    def forward(self, qkv, arguments):
        """See `AttentionForm`."""
        settings = AttentionSettings(
            arguments.max_seqlen, dropout_threshold(arguments.dropout_p), None
        )
        out, saved = attention_forward(
            qkv.contiguous(),
            arguments.cu_seqlens,
            settings,
            arguments.key,
            arguments.rows,
            arguments.alibi_slopes,
            None,
            arguments.order,
            True,
            triton_kernels(),
        )
        return out, (saved, settings)

    def backward(self, saved, out, d_out, buffer, scale=None, amax=None):
        """See `AttentionForm`."""
        saved, settings = saved
        num_rows = sum_rows(saved, settings)
        shape = saved.qkv.shape
        if not num_rows:
            # The kernels' blocks differ in size: sum and round in a pass of their own.
            d_qkv = torch.empty_like(saved.qkv)
            attention_backward(saved, settings, triton_kernels(), out, d_out, d_qkv)
            flat = d_qkv.flatten(1)
            if scale is None:
                return flat, kept_sum(flat.sum(0, dtype=torch.float32), buffer)
            return cast_transpose_bias(flat, scale, amax, TYPES[GRADIENT], buffer)
        sums = torch.empty(num_rows, *shape[1:], dtype=torch.float32, device=saved.qkv.device)
        kind = saved.qkv.dtype if scale is None else torch.uint8
        d_qkv = torch.empty(shape, dtype=kind, device=saved.qkv.device)
        kernels = triton_kernels()
        attention_backward(saved, settings, kernels, out, d_out, d_qkv, sums, scale, amax)
        if not shape[0]:
            sums = sums[:0]
        total = sum_partials(sums.flatten(1), buffer)
        flat = d_qkv.flatten(1)
        if scale is None:
            return flat, total
        return transposed_copy(flat.view(TYPES[GRADIENT])), total


qkv_attention.register("qkv", TritonAttentionForm())
