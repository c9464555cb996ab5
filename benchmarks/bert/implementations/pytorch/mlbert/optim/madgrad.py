"""MADGRAD: dual averaging from the initial weights, with the cube root of summed squares,
and momentum.

With g the clipped gradient, plus weight_decay w for decayed parameters; t the number of the update,
from 1; x the initial weights; c = 1 - momentum:

    lambda = lr sqrt(t)
    s = s + lambda g                                  nu = nu + lambda g^2
    z = x - s / (cbrt(nu) + eps)                      w = (1 - c) w + c z

Source: Defazio and Jelassi, "Adaptivity without Compromise: A Momentumized, Adaptive, Dual Averaged
Gradient Method for Stochastic Optimization", arXiv 2101.11075, algorithm 1, which counts updates
from 0. The algorithm has no decay. As in the authors' code, decay is an L2 penalty added to the
gradient; they recommend smaller values than with other optimizers, often 0. LayerNorm and bias
tensors have none. Each update computes the weights from x, so x is state.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from mlbert.optim.compiled import CompiledOptimizer, Formulas
from mlbert.optim.flat import FlatParameters
from mlbert.optim.shared_weights import Layout


class Madgrad(CompiledOptimizer):
    """MADGRAD; arguments as in `CompiledOptimizer`. The second beta is unused.

    Attributes:
        grad_sum, grad_sum_sq: float32 [n], s and nu of the shard.
        start: float32 [n], x of the shard: the weights at construction, or those of a loaded state.
    """

    name = LOGGED_AS = "madgrad"
    LOGGED = ("epsilon", "momentum", "weight_decay")
    STATE = ("grad_sum", "grad_sum_sq", "start")
    FORMULAS = Formulas.MADGRAD
    grad_sum: Tensor
    grad_sum_sq: Tensor
    start: Tensor

    def __init__(self, flat: FlatParameters, layout: Layout, **settings: Any) -> None:
        super().__init__(flat, layout, **settings)
        self.start.copy_(self.weights.shard)
        self._lambda = 0.0

    def _update(self, grad: Tensor, lr: float, scale: float) -> None:
        self._lambda = lr * math.sqrt(self._num_updates)
        # The plain direction already includes the learning rate in its sums.
        super()._update(grad, 1.0 if self._native is None else self._lambda, scale)

    def _direction(self, weight: Tensor, grad: Tensor) -> Tensor:
        self._add_decay(grad, weight)
        self.grad_sum.add_(grad, alpha=self._lambda)
        self.grad_sum_sq.addcmul_(grad, grad, value=self._lambda)
        update = self.grad_sum_sq.pow(1.0 / 3.0).add_(self.eps)
        update = self.grad_sum.div(update).sub_(self.start)  # -z
        return update.add_(weight).mul_(1.0 - self.betas[0])
