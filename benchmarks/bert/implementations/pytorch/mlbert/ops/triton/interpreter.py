"""Patch Triton 3.6's interpreter so that it agrees with compiled kernels.

The interpreter stores tensors as NumPy arrays, and bfloat16 as bits in uint16. We fix four bugs:
scalar bounds of `range` fail with NumPy 2.4 and later; `tl.dot` multiplies bfloat16 bits as
integers; casts to bfloat16 truncate instead of rounding; and casts to FP8 lose the carry when the
mantissa rounds up (31.3 becomes 16). Products in float32 are summed in float64 and rounded once: in
float32, their error depends on the kernel that NumPy's BLAS chooses for the CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

_FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def repair() -> None:
    """Patch the interpreter. Call it once per process, before any kernel runs."""
    builder = interpreter.InterpreterBuilder
    cast = builder.cast_impl
    dot = builder.create_dot
    patch_tensor = interpreter._patch_lang_tensor
    cast_fp8 = builder.create_fp_to_fp

    def repaired_cast(self: Any, source: Any, to: Any) -> Any:
        types = source.dtype.scalar, to.scalar
        if types == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(_rounded_bits(source.data), tl.bfloat16)
        if types == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(_wide(source.data), tl.float32)
        return cast(self, source, to)

    def repaired_cast_fp8(self: Any, source: Any, to: Any, rounding_mode: Any) -> Any:
        if source.dtype.scalar != tl.float32 or to.scalar not in _FP8:
            return cast_fp8(self, source, to, rounding_mode)
        values = torch.from_numpy(np.ascontiguousarray(source.data)).to(_FP8[to.scalar])
        return interpreter.TensorHandle(values.view(torch.uint8).numpy(), to.scalar)

    def repaired_dot(self: Any, a: Any, b: Any, total: Any, *rest: Any) -> Any:
        a, b = (
            repaired_cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x
            for x in (a, b)
        )
        if all(x.dtype.scalar == tl.float32 for x in (a, b, total)):
            product = np.matmul(a.data, b.data, dtype=np.float64) + total.data
            return interpreter.TensorHandle(product.astype(np.float32), tl.float32)
        return dot(self, a, b, total, *rest)

    def repaired_patch(tensor: type, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    builder.cast_impl = repaired_cast
    builder.create_dot = repaired_dot
    builder.create_fp_to_fp = repaired_cast_fp8
    interpreter._patch_lang_tensor = repaired_patch


def _wide(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _rounded_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.uint16).numpy()
