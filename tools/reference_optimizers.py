"""Reference optimizers, which tests and the GPU check compare the fast implementations with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mlbert.optim.flat import is_decayed


class Reference:
    """A slow, simple optimizer in the precision of its weights.

    Args:
        weights: name -> tensor of any float dtype; updated in place.
            Names decide on decay (`flat.is_decayed`).
        betas, eps, weight_decay, max_grad_norm: as in `mlbert.optim.compiled.CompiledOptimizer`.
        decay_all: decay every weight, regardless of its name.

    Attributes:
        state: name of the optimizer's state -> name of the weight -> tensor like the weight.
    """

    STATE: tuple[str, ...]

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_grad_norm: float | None,
        decay_all: bool = False,
    ) -> None:
        self.weights = dict(weights)
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.max_grad_norm = max_grad_norm
        self.decay_all = decay_all
        self.num_updates = 0
        self.state = {
            key: {name: torch.zeros_like(weight) for name, weight in weights.items()}
            for key in self.STATE
        }

    def step(self, lr: float, grads: Mapping[str, Tensor]) -> float:
        """Update once with gradients like the weights,
        unless their global norm is not finite; return the norm.
        """
        norm = math.sqrt(sum(float(grads[name].double().square().sum()) for name in self.weights))
        if not math.isfinite(norm):
            return norm
        self.num_updates += 1
        clip = self.max_grad_norm / max(norm, self.max_grad_norm) if self.max_grad_norm else 1.0
        for name, weight in self.weights.items():
            state = {key: self.state[key][name] for key in self.STATE}
            self.update(weight, grads[name] * clip, lr, self.decay_all or is_decayed(name), state)
            for key in self.STATE:
                self.state[key][name] = state[key]
        return norm

    def update(
        self, weight: Tensor, grad: Tensor, lr: float, decayed: bool, state: dict[str, Tensor]
    ) -> None:
        """Update a weight and its state in place with its clipped gradient."""
        raise NotImplementedError


class ReferenceAdamW(Reference):
    """AdamW.

    Args:
        weights, **settings: as in `Reference`.
        bias_correction: as in `mlbert.optim.adamw.Adam`.
        base_lr: decay per step is lr / base_lr * `weight_decay` (decoupled),
            or lr * `weight_decay` if None.
    """

    STATE = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        bias_correction: bool = True,
        base_lr: float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(weights, **settings)
        self.bias_correction = bias_correction
        self.base_lr = base_lr

    def update(
        self, weight: Tensor, grad: Tensor, lr: float, decayed: bool, state: dict[str, Tensor]
    ) -> None:
        state["exp_avg"] = self.betas[0] * state["exp_avg"] + (1 - self.betas[0]) * grad
        state["exp_avg_sq"] = (
            self.betas[1] * state["exp_avg_sq"] + (1 - self.betas[1]) * grad * grad
        )
        corrections = [
            1 - beta**self.num_updates if self.bias_correction else 1.0 for beta in self.betas
        ]
        m = state["exp_avg"] / corrections[0]
        v = state["exp_avg_sq"] / corrections[1]
        update = m / (v.sqrt() + self.eps)
        if decayed:
            update = update + self.weight_decay / (self.base_lr or 1.0) * weight
        weight -= lr * self.scale(weight, update, grad, v, decayed) * update

    def scale(
        self, weight: Tensor, update: Tensor, grad: Tensor, v: Tensor, decayed: bool
    ) -> float:
        """Return the factor of this tensor's update; `v` is the bias-corrected second moment."""
        return 1.0


class ReferenceLamb(ReferenceAdamW):
    """LAMB with the exceptions of the benchmark's reference."""

    def scale(
        self, weight: Tensor, update: Tensor, grad: Tensor, v: Tensor, decayed: bool
    ) -> float:
        """Return ||weight|| / ||update||, or 1 if either is 0 or the tensor is not decayed."""
        norms = float(weight.norm()), float(update.norm())
        return norms[0] / norms[1] if decayed and all(norms) else 1.0


class ReferenceStableAdamW(ReferenceAdamW):
    """StableAdamW."""

    def scale(
        self, weight: Tensor, update: Tensor, grad: Tensor, v: Tensor, decayed: bool
    ) -> float:
        """Return 1 / max(1, sqrt(mean(g^2 / max(v, eps^2))))."""
        return 1.0 / max(1.0, math.sqrt(float((grad**2 / v.clamp(min=self.eps**2)).mean())))


class ReferenceACClip(Reference):
    """ACClip with alpha = 1."""

    STATE = ("exp_avg", "exp_avg_abs")

    def update(
        self, weight: Tensor, grad: Tensor, lr: float, decayed: bool, state: dict[str, Tensor]
    ) -> None:
        m = state["exp_avg"] = self.betas[0] * state["exp_avg"] + (1 - self.betas[0]) * grad
        tau = state["exp_avg_abs"] = (
            self.betas[1] * state["exp_avg_abs"] + (1 - self.betas[1]) * grad.abs()
        )
        update = torch.minimum(tau / (m.abs() + self.eps), torch.ones_like(tau)) * m
        if decayed:
            update = update + self.weight_decay * weight
        weight -= lr * update


class ReferenceMadgrad(Reference):
    """MADGRAD, with the decay added to the gradient."""

    STATE = ("grad_sum", "grad_sum_sq", "start")

    def __init__(self, weights: Mapping[str, Tensor], **settings: Any) -> None:
        super().__init__(weights, **settings)
        self.state["start"] = {name: weight.clone() for name, weight in weights.items()}

    def update(
        self, weight: Tensor, grad: Tensor, lr: float, decayed: bool, state: dict[str, Tensor]
    ) -> None:
        step = lr * math.sqrt(self.num_updates)
        if decayed:
            grad = grad + self.weight_decay * weight
        state["grad_sum"] = state["grad_sum"] + step * grad
        state["grad_sum_sq"] = state["grad_sum_sq"] + step * grad * grad
        z = state["start"] - state["grad_sum"] / (state["grad_sum_sq"] ** (1 / 3) + self.eps)
        weight.copy_(self.betas[0] * weight + (1 - self.betas[0]) * z)


class ReferenceSGD(Reference):
    """SGD with momentum and decoupled decay."""

    STATE = ("momentum_buffer",)

    def update(
        self, weight: Tensor, grad: Tensor, lr: float, decayed: bool, state: dict[str, Tensor]
    ) -> None:
        state["momentum_buffer"] = self.betas[0] * state["momentum_buffer"] + grad
        weight -= lr * (state["momentum_buffer"] + (self.weight_decay * weight if decayed else 0.0))
