"""Dynamic loss scale for float16: it keeps small gradients representable
and grows until a step overflows.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Gradients are float32; with a larger scale a loss of 100 approaches the limit of exact integers.
LARGEST = 2.0**24


class LossScale:
    """A dynamic loss scale: halved after a non-finite gradient,
    doubled after `window` finite steps in a row.

    All decisions are made on the device, so a CUDA graph can capture them.

    Source of the rule: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section
    3.2, with the constants of NVIDIA apex.

    Args:
        start: initial scale.
        window: number of finite steps in a row after which the scale doubles, up to `LARGEST`.
        device: device of the losses.

    Attributes:
        value: float32 scalar that losses are multiplied by; written in place.
        finite_steps: int32 scalar, finite steps since the last change.
    """

    def __init__(self, start: float, window: int, device: torch.device) -> None:
        self.value = torch.tensor(start, dtype=torch.float32, device=device)
        self.finite_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._window = window

    @torch.no_grad()
    def update(self, grad_norm: Tensor) -> None:
        """Update the scale after a step. Call it on all ranks.

        Args:
            grad_norm: float64 scalar, the norm that decided whether the step made its update.
        """
        is_finite = torch.isfinite(grad_norm)
        steps = torch.where(is_finite, self.finite_steps + 1, 0)
        is_due = steps >= self._window
        grown = torch.where(is_due, (2.0 * self.value).clamp(max=LARGEST), self.value)
        self.value.copy_(torch.where(is_finite, grown, 0.5 * self.value))
        self.finite_steps.copy_(torch.where(is_due, 0, steps))

    def state_dict(self) -> dict[str, Tensor]:
        """Return both attributes."""
        return {"value": self.value, "finite_steps": self.finite_steps}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy the values of a `state_dict`."""
        self.value.copy_(state["value"])
        self.finite_steps.copy_(state["finite_steps"])
