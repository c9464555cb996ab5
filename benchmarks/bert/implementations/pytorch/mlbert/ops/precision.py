"""The precision of the matrix products."""

from __future__ import annotations

import torch


def compute_dtype(precision: str, device: torch.device | None = None) -> torch.dtype:
    """float32 or bfloat16; "auto" takes bfloat16 where the device (default: CPU) has hardware for its products."""
    if precision == "auto":
        fast = (device is not None and device.type == "cuda") or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if fast else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
