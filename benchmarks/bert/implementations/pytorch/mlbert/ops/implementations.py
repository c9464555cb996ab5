"""Loads what the forms of the ops need beyond Python: C kernels, Triton, cublasLt, CUDA kernels.

It stands above all forms, so that the registry below them knows none.
"""

from __future__ import annotations

import importlib

import torch

from mlbert.host.environment import environment
from mlbert.host.native import NativeUnavailable
from mlbert.ops import cublaslt, fmha, native_library, registry


@registry.loader("native")
def _native(kind: str) -> None:
    native_library.library()


@registry.loader("triton")
def _triton(kind: str) -> None:
    if kind == "cpu" and environment().get("TRITON_INTERPRET") != "1":
        raise NativeUnavailable("needs a CUDA device; on a CPU it is interpreted, for tests, with TRITON_INTERPRET=1")
    importlib.import_module("mlbert.ops.triton")  # registers its forms; Triton need not be installed


@registry.loader("cublaslt")
def _cublaslt(kind: str) -> None:
    cublaslt.library()


@registry.loader("fmha")
def _fmha(kind: str) -> None:
    fmha.library()
    if torch.cuda.is_available():
        fmha.check_device()
