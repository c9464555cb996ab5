"""Triton kernels for CUDA devices.

Importing this package requires Triton and registers the implementations.
"""

from triton import knobs

from mlbert.ops.triton import (
    attention,
    cast,
    embedding,
    expand_batch,
    gate,
    gelu,
    interpreter,
    loss,
    norm,
    product,
    residual,
)

__all__ = [
    "attention",
    "cast",
    "embedding",
    "expand_batch",
    "gate",
    "gelu",
    "loss",
    "norm",
    "product",
    "residual",
]

if knobs.runtime.interpret:
    interpreter.repair()
