"""What LAMB and AdamW share: clipping, refusal of non-finite gradients, moments, state, choice of kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mlbert.core.errors import UserError
from mlbert.core.native import NativeUnavailable
from mlbert.optim import kernels
from mlbert.optim.flat import FlatParameters
from mlbert.optim.host_copy import HostCopy

if TYPE_CHECKING:
    from mlbert.optim.apex_lamb import ApexUpdate
    from mlbert.optim.triton_lamb import TritonUpdate

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


class DeferredStepResult:
    """`StepResult` of an update that the host did not wait for; reading an attribute waits for that update alone.

    Args:
        grad_norm: float64 scalar on the device. Its value is taken now, in stream order.
    """

    def __init__(self, grad_norm: Tensor) -> None:
        self._norm = HostCopy(grad_norm)

    @property
    def grad_norm(self) -> float:
        """Global L2 norm of the gradient before clipping."""
        return float(self._norm.read())

    @property
    def skipped(self) -> bool:
        """True when the norm was not finite and nothing was changed."""
        return not math.isfinite(self.grad_norm)


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


class DeviceSteps:
    """What optimizers on flat buffers share whose update the device may do without the host, and their state.

    Attributes:
        flat: the parameters.
        device_update: the kernels of "triton", else None. `launch` can be captured in a graph with them.
    """

    flat: FlatParameters
    device_update: TritonUpdate | None = None
    _num_updates = 0

    @property
    def num_updates(self) -> int:
        """Updates made so far; a skipped step does not count. With triton, reading it waits for the device."""
        return self._num_updates if self.device_update is None else int(self.device_update.updates)

    def set_learning_rate(self, lr: float) -> None:
        """The rate of the next `launch`; with triton only."""
        assert self.device_update is not None, "triton only"
        self.device_update.lr.fill_(lr)

    def launch(self) -> None:
        """Queues one update and decides nothing on the host, so a graph can hold it; with triton only."""
        raise NotImplementedError

    def result(self) -> DeferredStepResult:
        """What the last `launch`, or its last replay, did; with triton only."""
        assert self.device_update is not None, "triton only"
        return DeferredStepResult(self.device_update.grad_norm)

    def _step_on_device(self, lr: float) -> DeferredStepResult:
        self.set_learning_rate(lr)
        self.launch()
        return self.result()

    def _take_over(self, state: Mapping[str, int | Tensor]) -> dict[str, Tensor]:
        """Checks a state, takes its number of updates and gives the moments of the whole model, to be copied.

        Raises:
            UserError: the state is incomplete or belongs to a model of another size.
        """
        moments = {}
        for key in ("exp_avg", "exp_avg_sq"):
            value = state.get(key)
            if not isinstance(value, Tensor) or value.shape != self.flat.data.shape:
                found = f"has {value.numel()} elements" if isinstance(value, Tensor) else "is missing"
                reason = f"{key} {found}, the model has {self.flat.numel} parameters"
                raise UserError("optimizer state", reason, "Use a checkpoint of this model")
            moments[key] = value
        num_updates = state.get("num_updates")
        if not isinstance(num_updates, int):
            raise UserError("optimizer state", "num_updates is missing", "Use a complete checkpoint")
        self._num_updates = num_updates
        if self.device_update is not None:
            self.device_update.updates.fill_(num_updates)
        return moments


class FlatOptimizer(DeviceSteps):
    """An Adam-type optimizer on flat buffers: two moments, decoupled weight decay, clipping to a global norm.

    Args:
        flat: the parameters; their gradient is final (summed over ranks and micro-batches) when `step` is called.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: for parameters whose segment has `decay`.
        max_grad_norm: global norm to clip to; None or 0: no clipping.
        bias_correction: divide the moments by 1 - beta^step.
        implementation: "plain" (any device), "native" (CPU, C), "triton" (CUDA; the CPU in Triton's interpreter),
            "apex" (CUDA, LAMB, where apex is installed) or "auto" (native on the CPU, triton on CUDA, where they can
            be had).
        weights_copy: bfloat16 [numel] that "triton" keeps equal to the rounded weights from the first update on.

    Attributes:
        implementation: the one in use, "plain", "native", "triton" or "apex".
        reason: why "auto" took the plain one; empty where it did not.
        device_update: the kernels of "triton", else None; with them `launch` can be captured in a graph.
        exp_avg, exp_avg_sq: float32 [numel], the moments.

    Raises:
        UserError: the native, triton or apex implementation is asked for and cannot be had.
    """

    HAS_TRUST_RATIO = False

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
        weights_copy: Tensor | None = None,
    ) -> None:
        assert implementation in ("auto", "plain", "native", "triton", "apex"), implementation
        self.flat = flat
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.max_grad_norm = max_grad_norm
        self.bias_correction = bias_correction
        self._num_updates = 0
        self.exp_avg = torch.zeros_like(flat.data)
        self.exp_avg_sq = torch.zeros_like(flat.data)
        self._weights_copy = weights_copy
        self._kernels: kernels.OptimizerKernels | None = None
        self.device_update: TritonUpdate | None = None
        self._apex: ApexUpdate | None = None
        self.implementation, self.reason = "plain", "asked for"
        if implementation != "plain":
            self._load_kernels(implementation)
        assert weights_copy is None or self.device_update, "a copy of the weights is kept by triton only"
        self._scratch = torch.empty_like(flat.data) if self.implementation == "plain" else torch.empty(0)

    def _load_kernels(self, wanted: str) -> None:
        device = self.flat.data.device
        name = wanted if wanted != "auto" else "native" if device.type == "cpu" else "triton"
        try:
            if name == "native":
                if device.type != "cpu":
                    raise NativeUnavailable(f"it is for the CPU, the parameters are on {device}")
                self._kernels = kernels.OptimizerKernels(self.flat.segments)
            elif name == "apex":
                self._apex = self._load_apex(device)
            else:
                self.device_update = self._load_triton(device)
        except (NativeUnavailable, ImportError) as error:
            if wanted != "auto":
                raise UserError(f"{name} optimizer", str(error), "Choose the plain implementation or auto") from error
            self.reason = str(error)
        else:
            self.implementation, self.reason = name, ""

    def _load_triton(self, device: torch.device) -> TritonUpdate:
        from triton import knobs

        from mlbert.optim.triton_lamb import TritonUpdate

        if device.type != "cuda" and not knobs.runtime.interpret:
            raise NativeUnavailable(f"it is for CUDA devices, the parameters are on {device}")
        return TritonUpdate(
            self.flat.segments,
            device,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            bias_correction=self.bias_correction,
            trust_ratio=self.HAS_TRUST_RATIO,
        )

    def _load_apex(self, device: torch.device) -> ApexUpdate:
        from mlbert.optim.apex_lamb import ApexUpdate, find_fused_lamb

        if device.type != "cuda" or not self.HAS_TRUST_RATIO:
            raise NativeUnavailable(f"it is for LAMB on CUDA devices, the parameters are on {device}")
        return ApexUpdate(
            find_fused_lamb(),
            self.flat,
            (self.exp_avg, self.exp_avg_sq),
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            bias_correction=self.bias_correction,
        )

    def step(self, lr: float) -> StepResult | DeferredStepResult:
        """Makes one update with learning rate `lr`; changes nothing where the gradient's norm is not finite.

        In plain form the norm decides on the host whether to update, so on a GPU it waits for the gradient; triton
        does not wait, only reading the result does.
        """
        if self.device_update is not None:
            return self._step_on_device(lr)
        grad_norm = self._grad_norm()
        if not math.isfinite(grad_norm):
            return StepResult(grad_norm, skipped=True)
        self._num_updates += 1
        if self._apex is not None:
            self._apex.step(lr, self._num_updates)
            return StepResult(grad_norm, skipped=False)
        scale = clip_scale(grad_norm, self.max_grad_norm)
        corrections = bias_corrections(self.betas, self._num_updates, self.bias_correction)
        if self._kernels is None:
            self._update_plain(lr, scale, corrections)
        else:
            scalars = kernels.Scalars(*self.betas, lr, scale, *corrections, self.eps, self.weight_decay)
            buffers = (self.flat.data, self.flat.grad, self.exp_avg, self.exp_avg_sq)
            self._update_native(self._kernels, buffers, scalars)
        return StepResult(grad_norm, skipped=False)

    def launch(self) -> None:
        """Queues one update and decides nothing on the host, so a graph can hold it; with triton only."""
        assert self.device_update is not None, "triton only"
        buffers = (self.flat.data, self.flat.grad, self.exp_avg, self.exp_avg_sq)
        self.device_update.launch(buffers, self._weights_copy)

    def exact_weights(self) -> AbstractContextManager[object]:
        """`flat.data` is the float32 weights, now and always; for an optimizer whose ranks exchange rounded ones."""
        return nullcontext()

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
        for key, moment in self._take_over(state).items():
            getattr(self, key).copy_(moment)
