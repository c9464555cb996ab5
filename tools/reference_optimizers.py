"""The specifications of the optimizers as plain programs, which tests and the GPU check compare the fast forms with."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from mlbert.optim.flat import is_decayed


class ReferenceAdamW:
    """AdamW: slow and plain, in the precision of the weights it is given.

    Args:
        weights: name -> tensor of any float dtype; updated in place. Names decide on decay (`flat.is_decayed`).
        betas, eps, weight_decay, max_grad_norm, bias_correction: as in `mlbert.optim.adam.Adam`.
        base_lr: the decay's share of a step is lr / base_lr times `weight_decay` (decoupled); None: lr times it.
        decay_all: whatever the names.
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
        base_lr: float | None = None,
        decay_all: bool = False,
    ) -> None:
        self.weights = dict(weights)
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.max_grad_norm, self.bias_correction = max_grad_norm, bias_correction
        self.base_lr, self.decay_all = base_lr, decay_all
        self.num_updates = 0
        self.m = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.v = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}

    def step(self, lr: float, grads: Mapping[str, Tensor]) -> float:
        """One update with gradients like the weights; nothing where their global norm, returned, is not finite."""
        norm = math.sqrt(sum(float(grads[name].double().square().sum()) for name in self.weights))
        if not math.isfinite(norm):
            return norm
        self.num_updates += 1
        clip = self.max_grad_norm / max(norm, self.max_grad_norm) if self.max_grad_norm else 1.0
        corrections = [1 - beta**self.num_updates if self.bias_correction else 1.0 for beta in self.betas]
        for name, weight in self.weights.items():
            grad = grads[name] * clip
            self.m[name] = self.betas[0] * self.m[name] + (1 - self.betas[0]) * grad
            self.v[name] = self.betas[1] * self.v[name] + (1 - self.betas[1]) * grad * grad
            m, v = self.m[name] / corrections[0], self.v[name] / corrections[1]
            update = m / (v.sqrt() + self.eps)
            decayed = self.decay_all or is_decayed(name)
            if decayed:
                update = update + self.weight_decay / (self.base_lr or 1.0) * weight
            weight -= lr * self.scale(weight, update, grad, v, decayed) * update
        return norm

    def scale(self, weight: Tensor, update: Tensor, grad: Tensor, v: Tensor, decayed: bool) -> float:
        """What this tensor's update is multiplied by; `v` is the second moment without its bias."""
        return 1.0


class ReferenceLamb(ReferenceAdamW):
    """LAMB with the exceptions of the benchmark's reference."""

    def scale(self, weight: Tensor, update: Tensor, grad: Tensor, v: Tensor, decayed: bool) -> float:
        """||weight|| / ||update||, 1 where either is 0 or the tensor is not decayed."""
        norms = float(weight.norm()), float(update.norm())
        return norms[0] / norms[1] if decayed and all(norms) else 1.0


class ReferenceStableAdamW(ReferenceAdamW):
    """StableAdamW."""

    def scale(self, weight: Tensor, update: Tensor, grad: Tensor, v: Tensor, decayed: bool) -> float:
        """1 / max(1, root of the mean of g^2 / max(v, eps^2))."""
        return 1.0 / max(1.0, math.sqrt(float((grad**2 / v.clamp(min=self.eps**2)).mean())))
