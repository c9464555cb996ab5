"""The matrix product of FP8 operands, as `mlbert.ops.fp8` takes it: by cublasLt, PyTorch's own, and their plain twin.

PyTorch's runs on cublasLt too, by the heuristic's first algorithm; called directly, algorithms can be timed
(`mlbert.ops.cublaslt_tuning`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mlbert.ops import cublaslt, registry
from mlbert.ops.cublaslt_library import Epilogue


def product(
    a: Tensor,
    b: Tensor,
    inverse_a: Tensor,
    inverse_b: Tensor,
    dtype: torch.dtype,
    fast: bool = False,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """a b^T of FP8 matrices a [M, K] and b [N, K], times the reciprocals of their scales, plus bias: [M, N] in `dtype`.

    Args:
        fast: lets the tensor cores of Hopper add with fewer bits.
        bias: [N] in `dtype`, which is bfloat16 then.
        out: where the result goes; None: new memory.
    """
    if not a.numel():
        zeros = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device) if out is None else out
        return zeros.zero_()
    result: Tensor = registry.implementation("fp8_product", a)(a, b, inverse_a, inverse_b, dtype, fast, bias, out)
    return result


def _plain_product(
    a: Tensor,
    b: Tensor,
    inverse_a: Tensor,
    inverse_b: Tensor,
    dtype: torch.dtype,
    fast: bool,
    bias: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    del fast
    result = (a.float() * inverse_a) @ (b.float() * inverse_b).t()
    result = (result if bias is None else result + bias).to(dtype)
    return result if out is None else out.copy_(result)


def _scaled_product(
    a: Tensor,
    b: Tensor,
    inverse_a: Tensor,
    inverse_b: Tensor,
    dtype: torch.dtype,
    fast: bool,
    bias: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    inside = bias if dtype != torch.float32 else None  # PyTorch has no float32 product with a bias
    options: dict[str, Any] = {"bias": inside, "out_dtype": dtype, "use_fast_accum": fast}
    options |= {} if out is None else {"out": out}
    result = torch._scaled_mm(a, b.t(), inverse_a, inverse_b, **options)
    return result if bias is None or bias is inside else result + bias


def _library_product(
    a: Tensor,
    b: Tensor,
    inverse_a: Tensor,
    inverse_b: Tensor,
    dtype: torch.dtype,
    fast: bool,
    bias: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    if bias is not None and dtype == torch.float32:
        return _scaled_product(a, b, inverse_a, inverse_b, dtype, fast, bias, out)
    result = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device) if out is None else out
    settings: dict[str, Any] = {"right_transposed": True, "inverse_left": inverse_a, "inverse_right": inverse_b}
    if bias is not None:
        settings |= {"epilogue": Epilogue.BIAS, "bias": bias}
    if cublaslt.library().product(result, a, b, fast=fast, **settings):
        return result
    return _scaled_product(a, b, inverse_a, inverse_b, dtype, fast, bias, out)


registry.register("fp8_product", "cublaslt")(_library_product)
registry.register("fp8_product", "plain")(_plain_product)
for _name in ("native", "triton"):
    registry.register("fp8_product", _name)(_scaled_product)
