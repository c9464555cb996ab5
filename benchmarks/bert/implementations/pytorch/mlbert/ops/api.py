"""Kernels and their plain twins. Each op is one public function here; which implementation runs is decided once by
`select`, and `describe` reports it.
"""

from mlbert.ops import fp8, fp8_casts, implementations
from mlbert.ops.attention import attention, capture_obstacle
from mlbert.ops.dropout import Key, dropout_key, dropout_keys
from mlbert.ops.dropout import keep_mask as dropout_keep_mask
from mlbert.ops.embedding import embedding_sum
from mlbert.ops.linear import feed_forward, linear, linear_gelu, linear_qkv
from mlbert.ops.loss import masked_cross_entropy
from mlbert.ops.norm import dropout_add_layer_norm, dropout_add_layer_norm_twice, layer_norm_dropout
from mlbert.ops.reference import apply_dropout, gated_gelu
from mlbert.ops.registry import describe, select
from mlbert.ops.rotary import rotary, rotations

__all__ = [
    "Key",
    "apply_dropout",
    "attention",
    "capture_obstacle",
    "describe",
    "dropout_add_layer_norm",
    "dropout_add_layer_norm_twice",
    "dropout_keep_mask",
    "dropout_key",
    "dropout_keys",
    "embedding_sum",
    "feed_forward",
    "fp8",
    "fp8_casts",
    "gated_gelu",
    "implementations",
    "layer_norm_dropout",
    "linear",
    "linear_gelu",
    "linear_qkv",
    "masked_cross_entropy",
    "rotary",
    "rotations",
    "select",
]
