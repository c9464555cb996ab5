"""The public ops are what this module imports. `select` chooses the implementation of each once.

Importing it registers the implementations whose modules can be imported anywhere; the others are
registered by the loaders in `mlbert.ops.config.FORMS`.
"""

from __future__ import annotations

from mlbert.ops import cublaslt, fmha, fp8, fp8_casts
from mlbert.ops.attention import attention, capture_obstacle, sequence_order
from mlbert.ops.dropout import Key, dropout_key, dropout_keys
from mlbert.ops.dropout import keep_mask as dropout_keep_mask
from mlbert.ops.embedding import embedding_sum
from mlbert.ops.forms import describe, select
from mlbert.ops.linear import (
    feed_forward,
    gated_feed_forward,
    gated_gelu,
    linear,
    linear_gelu,
    linear_qkv,
)
from mlbert.ops.loss import masked_cross_entropy
from mlbert.ops.norm import (
    add_dropout,
    dropout_add_layer_norm,
    dropout_add_layer_norm_twice,
    layer_norm_dropout,
)
from mlbert.ops.qkv_attention import AttentionArguments
from mlbert.ops.reference import apply_dropout
from mlbert.ops.rotary import rotations
from mlbert.ops.sublayers import (
    feed_forward_norm,
    linear_norm,
    native_attention_of_some,
    native_qkv_attention,
)
