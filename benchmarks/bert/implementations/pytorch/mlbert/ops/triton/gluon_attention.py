"""Attention in Gluon, for Hopper and heads of 64, forward and backward.

Results, saved sums and dropout masks are those of `mlbert.ops.triton.attention`. The kernels
have been compiled, and their sources have run in a model of Hopper's barriers
(``tests/unit/ops/gluon_model.py``). They have not run on a GPU, so only ``OPS=gluon-attention``
uses them.
"""

from __future__ import annotations

# mypy: disallow-untyped-defs=False
import torch
from torch import Tensor

from mlbert.ops import forms as registry
from mlbert.ops.triton.attention import Kernels, attend, triton_kernels
from mlbert.ops.triton.attention_pairs import pairs_of
from mlbert.ops.triton.gluon_attention_forward import CONSUMERS, HEAD_SIZE, ROWS, launch_forward
from mlbert.ops.triton.gluon_key_value_gradient import launch_key_value_gradient
from mlbert.ops.triton.gluon_query_gradient import launch_query_gradient

DTYPES = (torch.bfloat16, torch.float16)


def _pairs(cu_seqlens, num_tokens):
    return pairs_of(cu_seqlens, num_tokens, CONSUMERS * ROWS)


def gluon_kernels() -> Kernels:
    """Return Gluon's."""
    return Kernels(_pairs, launch_forward, launch_query_gradient, launch_key_value_gradient)


@registry.register("attention", "gluon-attention")
def attention(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p,
    key,
    rows,
    alibi_slopes=None,
    window=None,
    rotations=None,
    order=None,
) -> Tensor:
    """See `mlbert.ops.attention.attention`. What the kernels do not take runs ``triton``."""
    fits = qkv.shape[3] == HEAD_SIZE and qkv.dtype in DTYPES and alibi_slopes is None
    return attend(
        gluon_kernels() if fits else triton_kernels(),
        qkv,
        cu_seqlens,
        max_seqlen,
        dropout_p,
        key,
        rows,
        alibi_slopes,
        window,
        rotations,
        order,
    )
