"""A loss scale for float16, whose smallest numbers gradients would fall below: it grows until a step overflows."""

from __future__ import annotations

import torch
from torch import Tensor

from mlbert.ops.config import ComputeConfig

LARGEST = 2.0**24  # float32 holds the gradients; beyond this a loss of 100 is near the end of its whole numbers


class LossScale:
    """A dynamic loss scale: halved where a step's gradient is not finite, doubled after `window` steps that were.

    Everything is decided on the device, so that a CUDA graph can hold it.

    Source of the rule: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.2, with the numbers
    of NVIDIA apex.

    Args:
        start: first scale.
        window: finite steps in a row after which it doubles, up to `LARGEST`.
        device: where the losses are.

    Attributes:
        value: float32 scalar that losses are multiplied by; written in place.
        finite_steps: int32 scalar, finite steps since it last changed.
    """

    def __init__(self, start: float, window: int, device: torch.device) -> None:
        self.value = torch.tensor(start, dtype=torch.float32, device=device)
        self.finite_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._window = window

    @classmethod
    def of(cls, config: ComputeConfig, device: torch.device) -> LossScale | None:
        """As the settings ask for; None but for PRECISION=fp16."""
        return cls(config.loss_scale, config.loss_scale_window, device) if config.precision == "fp16" else None

    @torch.no_grad()
    def update(self, grad_norm: Tensor) -> None:
        """After each step, on all ranks, with the norm that decided whether its update was made: float64 scalar."""
        is_finite = torch.isfinite(grad_norm)
        steps = torch.where(is_finite, self.finite_steps + 1, 0)
        is_due = steps >= self._window
        grown = torch.where(is_due, (2.0 * self.value).clamp(max=LARGEST), self.value)
        self.value.copy_(torch.where(is_finite, grown, 0.5 * self.value))
        self.finite_steps.copy_(torch.where(is_due, 0, steps))

    def state_dict(self) -> dict[str, Tensor]:
        """Both attributes."""
        return {"value": self.value, "finite_steps": self.finite_steps}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes over `state_dict`."""
        self.value.copy_(state["value"])
        self.finite_steps.copy_(state["finite_steps"])
