"""Adam with decoupled weight decay: the base class of all Adam-like optimizers,
AdamW and StableAdamW.

With g the clipped gradient and t the number of the update, from 1:

    m = beta_1 m + (1 - beta_1) g                     v = beta_2 v + (1 - beta_2) g^2
    u = (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + eps) + weight_decay w
    w = w - lr s u

LayerNorm and bias tensors have no decay. The scale s is 1,
or one number per parameter from two sums over its elements:

    trust ratio   sqrt(sum w^2 / sum u^2), 1 if a sum is 0: decayed parameters
    rms           sqrt(n / max(n, sum g^2 / max(v / (1 - beta_2^t), eps^2))): all parameters,
                  of n elements

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101, algorithm
2. `AdamW` multiplies the decay by the learning rate, like `torch.optim.AdamW`. `DecoupledAdamW`
multiplies it only by the schedule's multiplier, like the paper and Composer's optimizer of that
name:

    w = w - lr u - (lr / base_lr) weight_decay w

This equals AdamW with a weight decay of weight_decay / base_lr. Without bias correction, AdamW is
the `AdamWeightDecayOptimizer` of the published BERT code.

`StableAdamW`: Wortsman et al., "Stable and low-precision training for large-scale vision-language
models", arXiv 2304.13013, algorithm 2. The rate, and with it the decay, is divided by max(1, RMS),
where RMS is the root mean of g^2 / max(v, eps^2) over the tensor (Adafactor's update clipping): a
smaller rate for tensors whose second moment lags behind their gradients. All tensors are scaled,
including LayerNorm and biases. Moments are stored as in Adam and bias-corrected on use, which is
equivalent to the paper's correction of the betas.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mlbert.optim.compiled import CompiledOptimizer, Formulas, UpdateScaling
from mlbert.optim.flat import FlatParameters
from mlbert.optim.shared_weights import Layout


class Adam(CompiledOptimizer):
    """An optimizer that uses Adam's direction.

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

    def __init__(
        self, flat: FlatParameters, layout: Layout, *, bias_correction: bool = True, **settings: Any
    ) -> None:
        self.bias_correction = bias_correction
        super().__init__(flat, layout, **settings)

    @property
    def _numbers(self) -> dict[str, Any]:
        return super()._numbers | {"bias_correction": self.bias_correction}

    def _corrections(self) -> tuple[float, float]:
        if not self.bias_correction:
            return super()._corrections()
        return 1.0 / (1.0 - self.betas[0] ** self._num_updates), 1.0 / (
            1.0 - self.betas[1] ** self._num_updates
        )

    def _direction(self, weight: Tensor, grad: Tensor) -> Tensor:
        correction_1, correction_2 = self._corrections()
        m = self.exp_avg
        v = self.exp_avg_sq
        m.mul_(self.betas[0]).add_(grad, alpha=1.0 - self.betas[0])
        v.mul_(self.betas[1]).addcmul_(grad, grad, value=1.0 - self.betas[1])
        update = torch.mul(v, correction_2).sqrt_().add_(self.eps)
        torch.div(m, update, out=update).mul_(correction_1)
        self._add_decay(update, weight)
        return update


class AdamW(Adam):
    """AdamW; arguments, attributes and state as in `Adam`.

    The native implementation moves 32 bytes per parameter and step:
    the gradient for its norm, then everything once.
    """

    name = LOGGED_AS = "adamw"


class DecoupledAdamW(AdamW):
    """AdamW with a decay that follows the schedule but not the size of the learning rate.

    Args:
        base_lr: the schedule's base rate; at this rate a step removes the fraction `weight_decay`
            of the weights.
        flat, layout, **settings: as in `Adam`.
    """

    name = "decoupled_adamw"
    HAS_DECOUPLED_DECAY = True

    def __init__(
        self,
        flat: FlatParameters,
        layout: Layout,
        *,
        base_lr: float,
        weight_decay: float,
        **settings: Any,
    ) -> None:
        super().__init__(flat, layout, weight_decay=weight_decay / base_lr, **settings)
        self._decay_as_set = weight_decay


class StableAdamW(AdamW):
    """StableAdamW; arguments, attributes and state as in `Adam`."""

    name = "stableadamw"
    SCALING = UpdateScaling.RMS

    def _scales(self, weight: Tensor, grad: Tensor, update: Tensor) -> Tensor:
        """Return 1 / max(1, RMS) of each parameter."""
        correction_2 = self._corrections()[1]
        norms = self._norms_of(
            grad / (self.exp_avg_sq * correction_2).clamp_(min=self.eps**2).sqrt_(), self._pieces
        )
        numels = torch.tensor(
            [float(s.numel) for s in self.flat.segments], dtype=torch.float64, device=norms.device
        )
        return (numels.sqrt() / norms.clamp(min=numels.sqrt())).float()


class DecoupledStableAdamW(StableAdamW, DecoupledAdamW):
    """StableAdamW with the decay of `DecoupledAdamW`; same arguments."""

    name = "decoupled_stableadamw"
