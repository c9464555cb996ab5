"""LAMB as the benchmark defines it: Adam's direction with decay, scaled for each tensor by ||w|| / ||update||.

Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv 1904.00962,
algorithm 2 with phi the identity, and the benchmark's reference, whose exceptions are: LayerNorm and bias tensors
take neither weight decay nor the trust ratio; a norm of 0 makes the ratio 1; the gradient is clipped to a global norm
first. The formulas are in `mlbert.optim.adam`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mlbert.host.native import NativeUnavailable
from mlbert.optim.adam import Adam
from mlbert.optim.base import Event
from mlbert.optim.compiled import Scaling

if TYPE_CHECKING:
    from mlbert.optim.apex_lamb import ApexLamb


class Lamb(Adam):
    """LAMB; arguments, attributes and state as in `Adam`.

    The native form reads the gradient twice (norm, update) and, for tensors beyond the cache, weights and moments
    twice: 44 bytes a parameter and step at most. Its result does not depend on the number of threads.
    """

    name = "lamb"
    SCALING = Scaling.TRUST_RATIO
    _apex: ApexLamb | None = None

    def hyperparameters(self, event: Event) -> None:
        """LAMB's keys of the benchmark's log."""
        event("opt_name", "lamb")
        event("opt_lamb_epsilon", self.eps)
        event("opt_epsilon", self.eps)  # rulesets up to 2.0 name it so
        event("opt_lamb_beta_1", self.betas[0])
        event("opt_lamb_beta_2", self.betas[1])
        event("opt_lamb_weight_decay_rate", self.weight_decay)
        event("opt_gradient_clip_norm", self.max_grad_norm or 0.0)

    def _load(self, form: str) -> None:
        if form != "apex":
            super()._load(form)
            return
        if self._layout.size > 1:
            raise NativeUnavailable("it does not shard its state; set SHARDED_OPTIMIZER=off")
        if self.flat.data.device.type != "cuda":
            raise NativeUnavailable(f"it is for CUDA devices, the parameters are on {self.flat.data.device}")
        from mlbert.optim.apex_lamb import ApexLamb, find_fused_lamb

        self._apex = ApexLamb(find_fused_lamb(), self.flat, (self.exp_avg, self.exp_avg_sq), **self._numbers)

    def _update(self, grad: Tensor, lr: float, scale: float) -> None:
        if self._apex is None:
            super()._update(grad, lr, scale)
        else:
            self._apex.step(lr, self._num_updates)  # clips by itself

    def _scales(self, weight: Tensor, grad: Tensor, update: Tensor) -> Tensor:
        """||weight|| / ||update|| of each decayed parameter, else 1."""
        decayed = [piece for piece in self._pieces if piece.decay]
        weight_norms, update_norms = (self._norms_of(values, decayed) for values in (weight, update))
        usable = (weight_norms > 0) & (update_norms > 0)
        return torch.where(usable, weight_norms / update_norms, 1.0).float()
