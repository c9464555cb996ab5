"""Triton kernels for CUDA devices. Importing the package needs Triton and registers its forms of the ops."""

from triton import knobs

from mlbert.ops.triton import attention, cast, embedding, interpreter, loss, norm, norm_fp8

__all__ = ["attention", "cast", "embedding", "loss", "norm", "norm_fp8"]

if knobs.runtime.interpret:
    interpreter.repair()
