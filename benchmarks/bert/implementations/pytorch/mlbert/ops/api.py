"""The public ops are what this module imports. `select` chooses the implementation of each once.

This module also registers the loaders of C kernels, Triton, cublasLt and CUDA kernels, so that the
registry does not depend on any implementation.
"""

from __future__ import annotations

import importlib

import torch

from mlbert.host.environment import environment
from mlbert.host.native import NativeUnavailable
from mlbert.ops import cublaslt, fmha, fp8, fp8_casts, native_library
from mlbert.ops import forms as registry
from mlbert.ops.attention import attention, capture_obstacle
from mlbert.ops.dropout import Key, dropout_key, dropout_keys
from mlbert.ops.dropout import keep_mask as dropout_keep_mask
from mlbert.ops.embedding import embedding_sum
from mlbert.ops.forms import describe, select
from mlbert.ops.linear import (
    feed_forward,
    gated_feed_forward,
    linear,
    linear_gelu,
    linear_qkv,
)
from mlbert.ops.loss import masked_cross_entropy
from mlbert.ops.norm import dropout_add_layer_norm, dropout_add_layer_norm_twice, layer_norm_dropout
from mlbert.ops.reference import apply_dropout, gated_gelu
from mlbert.ops.rotary import rotations


def _load_triton(kind: str) -> None:
    if kind == "cpu" and environment().get("TRITON_INTERPRET") != "1":
        raise NativeUnavailable(
            "needs a CUDA device (for tests on a CPU, TRITON_INTERPRET=1 runs the interpreter)"
        )
    # Registers its implementations; Triton may not be installed.
    importlib.import_module("mlbert.ops.triton")


def _load_fused(kind: str) -> None:
    _load_triton(kind)
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        raise NativeUnavailable("is for Hopper (compute capability 9.0) only")


registry.LOADERS["native"] = lambda kind: native_library.library()
registry.LOADERS["triton"] = _load_triton
registry.LOADERS["cublaslt"] = lambda kind: cublaslt.library()
registry.LOADERS["fused"] = _load_fused
registry.LOADERS["fmha"] = lambda kind: fmha.check_device()
