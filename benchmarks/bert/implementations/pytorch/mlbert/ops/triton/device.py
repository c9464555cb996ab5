"""What kernels ask about the device that they will run on."""

from __future__ import annotations

import torch

ACTIVATION_TYPES = (torch.float32, torch.bfloat16, torch.float16)
# For tensors that lie on no GPU: interpreted ones, and the "meta" tensors of tools/compile_kernels.py, which sets this.
assumed_capability = 90


def capability(device: torch.device) -> int:
    """Compute capability times ten: 80 for an A100, 90 for an H100 or H200, 100 for a B200."""
    if device.type != "cuda":
        return assumed_capability
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
