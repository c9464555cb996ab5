"""Load the Triton kernels, which need Triton and a device that can run them."""

from __future__ import annotations

import importlib

import torch

from mlbert.host.environment import environment
from mlbert.host.native import NativeUnavailable

HOPPER = (9, 0)  # compute capability


def load(kind: str) -> None:
    """Register the implementations ``triton`` for a kind of device.

    Raises:
        NativeUnavailable: it cannot run them.
        ImportError: Triton is not installed.
    """
    if kind == "cpu" and environment().get("TRITON_INTERPRET") != "1":
        raise NativeUnavailable(
            "needs a CUDA device (for tests on a CPU, TRITON_INTERPRET=1 runs the interpreter)"
        )
    importlib.import_module("mlbert.ops.triton")


def load_qkv(kind: str) -> None:
    """Register the implementations ``qkv``. Raises as `load`."""
    load(kind)
    importlib.import_module("mlbert.ops.triton.qkv_attention")


def load_fused(kind: str) -> None:
    """Register the implementations ``fused``. Raises as `load`."""
    load(kind)
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != HOPPER:
        raise NativeUnavailable("is for Hopper (compute capability 9.0) only")


def load_gluon_attention(kind: str) -> None:
    """Register the implementations ``gluon-attention``. Raises as `load`."""
    load_fused(kind)
    importlib.import_module("mlbert.ops.triton.gluon_attention")


def load_gluon(kind: str) -> None:
    """Register the implementations ``gluon``. Raises as `load`."""
    load_fused(kind)
    importlib.import_module("mlbert.ops.triton.gluon_product")
