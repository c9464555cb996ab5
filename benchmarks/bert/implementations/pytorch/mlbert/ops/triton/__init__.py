"""Triton kernels for CUDA devices.

Importing this package requires Triton and registers the implementations.
"""

from triton import knobs

from mlbert.ops.triton import (
    attention,
    cast,
    embedding,
    expand_batch,
    gelu,
    interpreter,
    loss,
    norm,
    product,
)

__all__ = ["attention", "cast", "embedding", "expand_batch", "gelu", "loss", "norm", "product"]

if knobs.runtime.interpret:
    interpreter.repair()
