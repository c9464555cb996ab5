"""Adam's direction with decoupled weight decay, and the three forms of every optimizer that is built on it.

With g the clipped gradient and t the number of the update, from 1:

    m = beta_1 m + (1 - beta_1) g                     v = beta_2 v + (1 - beta_2) g^2
    u = (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + eps) + weight_decay w
    w = w - lr s u

LayerNorm and bias tensors take no decay. The scale s is 1, or one number a parameter from two sums over its elements:

    trust ratio   sqrt(sum w^2 / sum u^2)                                      decayed parameters; 1 if a sum is 0
    rms           sqrt(n / max(n, sum g^2 / max(v / (1 - beta_2^t), eps^2)))   all parameters, of n elements
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from mlbert.core.native import NativeUnavailable
from mlbert.optim import native_adam
from mlbert.optim.base import FlatOptimizer
from mlbert.optim.flat import FlatParameters
from mlbert.optim.shared_weights import Layout

if TYPE_CHECKING:
    from mlbert.optim.triton_adam import TritonAdam


class Scaling(IntEnum):
    """What a parameter's update is scaled by; the numbers are those of csrc/cpu/optim.c and the Triton kernels."""

    NONE = 0
    TRUST_RATIO = 1
    RMS = 2


def bias_corrections(betas: tuple[float, float], step: int, enabled: bool) -> tuple[float, float]:
    """Factors for the first and the second moment at update `step`, counted from 1: 1 / (1 - beta^step)."""
    if not enabled:
        return 1.0, 1.0
    return 1.0 / (1.0 - betas[0] ** step), 1.0 / (1.0 - betas[1] ** step)


class Adam(FlatOptimizer):
    """An optimizer whose direction is Adam's.

    Args:
        flat, layout, **settings: as in `FlatOptimizer`.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: for parameters whose segment has `decay`.
        bias_correction: divide the moments by 1 - beta^step.

    Attributes:
        exp_avg, exp_avg_sq: float32 [n], the moments of the shard.
    """

    STATE = ("exp_avg", "exp_avg_sq")
    SCALING: ClassVar[Scaling] = Scaling.NONE
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def __init__(
        self,
        flat: FlatParameters,
        layout: Layout,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        bias_correction: bool = True,
        **settings: Any,
    ) -> None:
        self.betas, self.eps, self.weight_decay, self.bias_correction = betas, eps, weight_decay, bias_correction
        self._native: native_adam.NativeAdam | None = None
        self._triton: TritonAdam | None = None
        super().__init__(flat, layout, **settings)

    @property
    def _numbers(self) -> dict[str, Any]:
        """The numbers of the update, as other programs' forms take them."""
        own = {"betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}
        return {**own, "max_grad_norm": self._limit, "bias_correction": self.bias_correction}

    def _load(self, form: str) -> None:
        device, owners = self.flat.data.device, len(self.flat.segments)
        if form == "native":
            if device.type != "cpu":
                raise NativeUnavailable(f"it is for the CPU, the parameters are on {device}")
            self._native = native_adam.NativeAdam(self._pieces, owners, self._layout, self.SCALING)
        elif form == "triton":
            from triton import knobs

            from mlbert.optim.triton_adam import TritonAdam

            if device.type != "cuda" and not knobs.runtime.interpret:
                raise NativeUnavailable(f"it is for CUDA devices, the parameters are on {device}")
            shard = self._pieces, owners, self._layout, device
            self._triton = TritonAdam(*shard, **self._numbers, scaling=self.SCALING)
            self.grad_norm, self.can_capture = self._triton.grad_norm, True
        else:
            super()._load(form)

    @property
    def num_updates(self) -> int:
        """Updates made so far; a skipped step does not count. With triton, reading it waits for the device."""
        return self._num_updates if self._triton is None else int(self._triton.updates)

    def _set_num_updates(self, number: int) -> None:
        self._num_updates = number
        if self._triton is not None:
            self._triton.updates.fill_(number)

    def set_learning_rate(self, lr: float) -> None:
        """The rate of the next `launch`; with triton only."""
        assert self._triton is not None, "triton only"
        self._triton.lr.fill_(lr)

    @torch.no_grad()
    def launch(self) -> None:
        """Queues one update, exchange of weights included, and decides nothing on the host; with triton only."""
        assert self._triton is not None, "triton only"
        grad = self._layout.take(self.flat.padded_grad)
        buffers = (self.weights.shard, grad, self.exp_avg, self.exp_avg_sq)
        self._triton.launch(buffers, after_block=self.weights.begin_sharing)
        self.weights.finish_sharing()

    def _norm(self, grad: Tensor) -> float:
        if self._native is None:
            return super()._norm(grad)
        squares = torch.tensor(self._native.sum_squares(grad), dtype=torch.float64)
        return float(self._layout.all_reduce_sum(squares).sqrt())

    def _update(self, grad: Tensor, lr: float, scale: float) -> None:
        if self._native is None:
            super()._update(grad, lr, scale)
            return
        corrections = bias_corrections(self.betas, self._num_updates, self.bias_correction)
        scalars = native_adam.Scalars(*self.betas, lr, scale, *corrections, self.eps, self.weight_decay, self.SCALING)
        buffers = (self.weights.shard, grad, self.exp_avg, self.exp_avg_sq)
        self._native.update(buffers, scalars, after_block=self.weights.begin_sharing)

    def _direction(self, weight: Tensor, grad: Tensor) -> Tensor:
        correction_1, correction_2 = bias_corrections(self.betas, self._num_updates, self.bias_correction)
        m, v = self.exp_avg, self.exp_avg_sq
        m.mul_(self.betas[0]).add_(grad, alpha=1.0 - self.betas[0])
        v.mul_(self.betas[1]).addcmul_(grad, grad, value=1.0 - self.betas[1])
        update = torch.mul(v, correction_2).sqrt_().add_(self.eps)
        torch.div(m, update, out=update).mul_(correction_1)
        for piece in self._pieces:
            if piece.decay:
                part = slice(piece.start, piece.stop)
                update[part].add_(weight[part], alpha=self.weight_decay)
        return update
