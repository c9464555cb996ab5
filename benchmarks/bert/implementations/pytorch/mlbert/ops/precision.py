"""Select the precision of matrix products."""

from __future__ import annotations

import torch

from mlbert.host.errors import UserError
from mlbert.ops.fp8_scaling import Products

FP8_CAPABILITY = (8, 9)


def compute_dtype(precision: str, device: torch.device | None = None) -> torch.dtype:
    """Return the dtype of activations and of products that are not in FP8:
    float32, bfloat16 or float16.

    "auto" means bfloat16 if the device (default: CPU) has a matrix unit for it. A training run on a
    CPU does not ask this: it times both formats (`mlbert.recipes.auto_precision`).
    """
    if precision == "auto":
        fast = (device is not None and device.type == "cuda") or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if fast else torch.float32
    return {"fp32": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16)


def small_model_precision(device: torch.device) -> str:
    """Return "bf16" or "fp32", whichever a small model is expected to train faster in.

    Unlike `compute_dtype`, this is bf16 with AVX-512 too: a model of 2 layers x 128 trained 1.4
    times as fast.
    """
    return "bf16" if device.type == "cuda" or has_bf16_products() else "fp32"


def has_bf16_products() -> bool:
    """Return whether this processor has instructions for products in bfloat16."""
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


def fp8_products(
    precision: str, device: torch.device, fast_accumulation: str = "forward"
) -> Products | None:
    """Return which encoder products run in FP8: all for "fp8",
    the forward ones for "fp8-forward", else None.

    Args:
        fast_accumulation: the setting FP8_FAST_ACCUMULATION.

    Raises:
        UserError: the GPU does not support FP8. CPUs do, slower than bfloat16, for tests.
    """
    if precision not in ("fp8", "fp8-forward"):
        return None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        capability = "{}.{}".format(*FP8_CAPABILITY)
        reason = f"{name} does not support FP8 (compute capability {capability} or higher does)"
        raise UserError(
            "device.unavailable", f"PRECISION={precision}", reason, "Set PRECISION=bf16"
        )
    if precision == "fp8":
        return Products(fast=fast_accumulation == "all")
    return Products(input_gradient=False, weight_gradient=False)
