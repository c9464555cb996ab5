"""What LAMB and AdamW share: clipping, the refusal of non-finite gradients, moments, state and the native kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mlbert.core.errors import UserError
from mlbert.core.native import NativeUnavailable
from mlbert.optim import kernels
from mlbert.optim.flat import FlatParameters

NORM_CHUNK = 1 << 20  # elements squared in float64 at a time; bounds the temporary


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        grad_norm: global L2 norm of the gradient before clipping.
        skipped: True when the norm was not finite and nothing was changed.
    """

    grad_norm: float
    skipped: bool


def clip_scale(grad_norm: float, max_grad_norm: float | None) -> float:
    """Factor that brings a gradient of this global norm down to `max_grad_norm` (1 where it is shorter already)."""
    return max_grad_norm / max(grad_norm, max_grad_norm) if max_grad_norm else 1.0


def bias_corrections(betas: tuple[float, float], step: int, enabled: bool) -> tuple[float, float]:
    """Factors for the first and the second moment at update `step`, counted from 1: 1 / (1 - beta^step)."""
    if not enabled:
        return 1.0, 1.0
    return 1.0 / (1.0 - betas[0] ** step), 1.0 / (1.0 - betas[1] ** step)


def norm_64(x: Tensor) -> Tensor:
    """L2 norm of a flat tensor, accumulated in float64; a float64 scalar on the tensor's device."""
    chunks = [torch.linalg.vector_norm(chunk, dtype=torch.float64) for chunk in x.split(NORM_CHUNK)]
    return chunks[0] if len(chunks) == 1 else torch.linalg.vector_norm(torch.stack(chunks))


class FlatOptimizer:
    """An Adam-type optimizer on flat buffers: two moments, decoupled weight decay, clipping to a global norm.

    Args:
        flat: the parameters; their gradient is final (summed over ranks and micro-batches) when `step` is called.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: for parameters whose segment has `decay`.
        max_grad_norm: global norm to clip to; None or 0: no clipping.
        bias_correction: divide the moments by 1 - beta^step.
        implementation: "plain" (any device), "native" (CPU, C) or "auto" (native where it can be had).

    Attributes:
        implementation: the one in use, "plain" or "native".
        reason: why "auto" did not take the native one; empty where it did.
        num_updates: updates made so far; a skipped step does not count.
        exp_avg, exp_avg_sq: float32 [numel], the moments.

    Raises:
        UserError: the native implementation is asked for and cannot be had.
    """

    def __init__(
        self,
        flat: FlatParameters,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_grad_norm: float | None,
        bias_correction: bool = True,
        implementation: str = "auto",
    ) -> None:
        assert implementation in ("auto", "plain", "native"), implementation
        self.flat = flat
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.max_grad_norm = max_grad_norm
        self.bias_correction = bias_correction
        self.num_updates = 0
        self.exp_avg = torch.zeros_like(flat.data)
        self.exp_avg_sq = torch.zeros_like(flat.data)
        self._kernels, self.reason = self._load_kernels(implementation)
        self.implementation = "plain" if self._kernels is None else "native"
        self._scratch = torch.empty_like(flat.data) if self._kernels is None else torch.empty(0)

    def _load_kernels(self, implementation: str) -> tuple[kernels.OptimizerKernels | None, str]:
        if implementation == "plain":
            return None, "asked for"
        if self.flat.data.device.type != "cpu":
            reason = f"the native optimizer is for the CPU, the parameters are on {self.flat.data.device}"
        else:
            try:
                return kernels.OptimizerKernels(self.flat.segments), ""
            except NativeUnavailable as error:
                reason = str(error)
        if implementation == "native":
            raise UserError("native optimizer", reason, "Choose the plain implementation or auto")
        return None, reason

    def step(self, lr: float) -> StepResult:
        """Makes one update with learning rate `lr`; changes nothing where the gradient's norm is not finite.

        The norm decides on the host whether to update, so on a GPU this waits for the gradient.
        """
        grad_norm = self._grad_norm()
        if not math.isfinite(grad_norm):
            return StepResult(grad_norm, skipped=True)
        self.num_updates += 1
        scale = clip_scale(grad_norm, self.max_grad_norm)
        corrections = bias_corrections(self.betas, self.num_updates, self.bias_correction)
        if self._kernels is None:
            self._update_plain(lr, scale, corrections)
        else:
            scalars = kernels.Scalars(*self.betas, lr, scale, *corrections, self.eps, self.weight_decay)
            buffers = (self.flat.data, self.flat.grad, self.exp_avg, self.exp_avg_sq)
            self._update_native(self._kernels, buffers, scalars)
        return StepResult(grad_norm, skipped=False)

    def _grad_norm(self) -> float:
        if self._kernels is not None:
            return math.sqrt(self._kernels.sum_squares(self.flat.grad))
        return float(norm_64(self.flat.grad))

    @torch.no_grad()
    def _update_plain(self, lr: float, scale: float, corrections: tuple[float, float]) -> None:
        m, v, update = self.exp_avg, self.exp_avg_sq, self._scratch
        torch.mul(self.flat.grad, scale, out=update)
        m.mul_(self.betas[0]).add_(update, alpha=1.0 - self.betas[0])
        v.mul_(self.betas[1]).addcmul_(update, update, value=1.0 - self.betas[1])
        torch.mul(v, corrections[1], out=update).sqrt_().add_(self.eps)
        torch.div(m, update, out=update).mul_(corrections[0])
        for segment in self.flat.segments:
            if segment.decay:
                part = slice(segment.offset, segment.offset + segment.numel)
                self._decay_plain(self.flat.data[part], update[part])
        self.flat.data.sub_(update, alpha=lr)

    def _decay_plain(self, weight: Tensor, update: Tensor) -> None:
        """Makes Adam's direction of one decayed parameter the optimizer's update, in place."""
        update.add_(weight, alpha=self.weight_decay)

    def _update_native(
        self, native: kernels.OptimizerKernels, buffers: tuple[Tensor, ...], scalars: kernels.Scalars
    ) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, int | Tensor]:
        """The moments (the live buffers, float32 [numel], not copies) and the number of updates."""
        return {"num_updates": self.num_updates, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def load_state_dict(self, state: Mapping[str, int | Tensor]) -> None:
        """Takes over a state that `state_dict` gave, by copy.

        Raises:
            UserError: the state is incomplete or belongs to a model of another size.
        """
        for key in ("exp_avg", "exp_avg_sq"):
            value = state.get(key)
            if not isinstance(value, Tensor) or value.shape != self.flat.data.shape:
                found = f"has {value.numel()} elements" if isinstance(value, Tensor) else "is missing"
                reason = f"{key} {found}, the model has {self.flat.numel} parameters"
                raise UserError("optimizer state", reason, "Use a checkpoint of this model")
        num_updates = state.get("num_updates")
        if not isinstance(num_updates, int):
            raise UserError("optimizer state", "num_updates is missing", "Use a complete checkpoint")
        self.num_updates = num_updates
        for key, target in (("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)):
            source = state[key]
            assert isinstance(source, Tensor)
            target.copy_(source)
