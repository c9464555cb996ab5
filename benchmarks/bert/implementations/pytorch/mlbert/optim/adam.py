"""Adam's direction with decoupled weight decay, and what every optimizer that is built on it shares.

With g the clipped gradient and t the number of the update, from 1:

    m = beta_1 m + (1 - beta_1) g                     v = beta_2 v + (1 - beta_2) g^2
    u = (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + eps) + weight_decay w
    w = w - lr s u

LayerNorm and bias tensors take no decay. The scale s is 1, or one number a parameter from two sums over its elements:

    trust ratio   sqrt(sum w^2 / sum u^2)                                      decayed parameters; 1 if a sum is 0
    rms           sqrt(n / max(n, sum g^2 / max(v / (1 - beta_2^t), eps^2)))   all parameters, of n elements
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mlbert.optim.compiled import CompiledOptimizer, Formulas
from mlbert.optim.flat import FlatParameters
from mlbert.optim.shared_weights import Layout


class Adam(CompiledOptimizer):
    """An optimizer whose direction is Adam's.

    Args:
        flat, layout, **settings: as in `CompiledOptimizer`.
        bias_correction: divide the moments by 1 - beta^step.

    Attributes:
        exp_avg, exp_avg_sq: float32 [n], the moments of the shard.
    """

    STATE = ("exp_avg", "exp_avg_sq")
    FORMULAS = Formulas.ADAM
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def __init__(self, flat: FlatParameters, layout: Layout, *, bias_correction: bool = True, **settings: Any) -> None:
        self.bias_correction = bias_correction
        super().__init__(flat, layout, **settings)

    @property
    def _numbers(self) -> dict[str, Any]:
        return super()._numbers | {"bias_correction": self.bias_correction}

    def _corrections(self) -> tuple[float, float]:
        if not self.bias_correction:
            return super()._corrections()
        return 1.0 / (1.0 - self.betas[0] ** self._num_updates), 1.0 / (1.0 - self.betas[1] ** self._num_updates)

    def _direction(self, weight: Tensor, grad: Tensor) -> Tensor:
        correction_1, correction_2 = self._corrections()
        m, v = self.exp_avg, self.exp_avg_sq
        m.mul_(self.betas[0]).add_(grad, alpha=1.0 - self.betas[0])
        v.mul_(self.betas[1]).addcmul_(grad, grad, value=1.0 - self.betas[1])
        update = torch.mul(v, correction_2).sqrt_().add_(self.eps)
        torch.div(m, update, out=update).mul_(correction_1)
        self._add_decay(update, weight)
        return update
