"""LAMB as the benchmark defines it: Adam's direction with decay, scaled for each tensor by ||w|| / ||update||.

Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv 1904.00962,
algorithm 2 with phi the identity, and the benchmark's reference, whose exceptions are: LayerNorm and bias tensors
take neither weight decay nor the trust ratio; a norm of 0 makes the ratio 1; the gradient is clipped to a global norm
first. With g the clipped gradient and t the number of the update, from 1:

    m = beta_1 m + (1 - beta_1) g                     v = beta_2 v + (1 - beta_2) g^2
    u = (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + eps) + weight_decay w
    w = w - lr (||w|| / ||u||) u

`ReferenceLamb` is this text as a program, in float64 if its tensors are; `Lamb` is what trains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from mlbert.optim.base import FlatOptimizer, StepResult, bias_corrections, clip_scale, norm_64
from mlbert.optim.flat import is_decayed
from mlbert.optim.kernels import OptimizerKernels, Scalars


class ReferenceLamb:
    """The specification: slow and plain, in the precision of the weights it is given.

    Args:
        weights: name -> tensor of any float dtype; updated in place. Names decide on decay (`flat.is_decayed`).
        betas, eps, weight_decay, max_grad_norm, bias_correction: as in `FlatOptimizer`.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_grad_norm: float | None,
        bias_correction: bool = True,
    ) -> None:
        self.weights = dict(weights)
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.max_grad_norm = max_grad_norm
        self.bias_correction = bias_correction
        self.num_updates = 0
        self.m = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.v = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}

    def step(self, lr: float, grads: Mapping[str, Tensor]) -> StepResult:
        """One update with gradients like the weights; changes nothing where their global norm is not finite."""
        grad_norm = math.sqrt(sum(float(grads[name].double().square().sum()) for name in self.weights))
        if not math.isfinite(grad_norm):
            return StepResult(grad_norm, skipped=True)
        self.num_updates += 1
        scale = clip_scale(grad_norm, self.max_grad_norm)
        beta_1, beta_2 = self.betas
        correction_1, correction_2 = bias_corrections(self.betas, self.num_updates, self.bias_correction)
        for name, weight in self.weights.items():
            grad = grads[name] * scale
            self.m[name] = m = beta_1 * self.m[name] + (1.0 - beta_1) * grad
            self.v[name] = v = beta_2 * self.v[name] + (1.0 - beta_2) * grad * grad
            update = (m * correction_1) / ((v * correction_2).sqrt() + self.eps)
            ratio = 1.0
            if is_decayed(name):
                update = update + self.weight_decay * weight
                ratio = self.trust_ratio(weight, update)
            weight -= lr * ratio * update
        return StepResult(grad_norm, skipped=False)

    def trust_ratio(self, weight: Tensor, update: Tensor) -> float:
        """||weight|| / ||update||, 1 where either is 0."""
        weight_norm, update_norm = float(weight.norm()), float(update.norm())
        return weight_norm / update_norm if weight_norm > 0.0 and update_norm > 0.0 else 1.0


class Lamb(FlatOptimizer):
    """LAMB on flat buffers; arguments, attributes and state as in `FlatOptimizer`.

    The native form reads the gradient twice (norm, update) and, for tensors beyond the cache, weights and moments
    twice: 44 bytes a parameter and step at most. Its result does not depend on the number of threads.
    """

    HAS_TRUST_RATIO = True

    def _decay_plain(self, weight: Tensor, update: Tensor) -> None:
        update.add_(weight, alpha=self.weight_decay)
        weight_norm, update_norm = norm_64(weight), norm_64(update)
        usable = (weight_norm > 0) & (update_norm > 0)
        update.mul_(torch.where(usable, weight_norm / update_norm, 1.0).float())

    def _update_native(self, native: OptimizerKernels, buffers: tuple[Tensor, ...], scalars: Scalars) -> None:
        native.lamb(buffers, scalars)
