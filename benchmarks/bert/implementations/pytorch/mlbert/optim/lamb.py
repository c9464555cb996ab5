"""LAMB as the benchmark defines it: Adam's direction with decay,
scaled for each tensor by ||w|| / ||update||.

Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv
1904.00962, algorithm 2 with phi the identity, with the changes of the benchmark's reference:
LayerNorm and bias tensors use neither weight decay nor the trust ratio, a norm of 0 makes the ratio
1, and the gradient is first clipped to a global norm. The formulas are in `mlbert.optim.adamw`.

`ApexLamb` runs NVIDIA apex's FusedLAMB on the flat buffers for comparison, if apex is installed
(CUDA only). Apex has two parameter groups, with and without weight decay, instead of segments.
Parameters, gradients and moments stay views of the flat buffers. Differences from `Lamb`:

* with WEIGHT_DECAY_RATE=0, apex applies the trust ratio to no tensor,
  because it ties the ratio to the decay;
* norms are accumulated in float32;
* the host reads the gradient's norm each step to skip non-finite gradients, which apex alone would
  not do. So a CUDA graph cannot capture it.

It has never run with apex itself. Tests with a stand-in for FusedLAMB's interface cover how
segments, moments, learning rate and step number are passed.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from mlbert.host.native import NativeUnavailable
from mlbert.optim.adamw import Adam
from mlbert.optim.compiled import UpdateScaling
from mlbert.optim.flat import FlatParameters
from mlbert.optim.optimizer import Event


def find_fused_lamb() -> Any:
    """Return apex's FusedLAMB class.

    Raises:
        NativeUnavailable: apex cannot be imported, or another package has that name.
    """
    try:
        return importlib.import_module("apex.optimizers").FusedLAMB
    except (ImportError, AttributeError) as error:
        raise NativeUnavailable(f"NVIDIA apex cannot be imported ({error})") from None


class ApexLamb:
    """One FusedLAMB over all segments.

    Args:
        fused_lamb: apex's class.
        flat: the parameters.
        moments: float32 [numel] each, first and second; used in place.
        weight_decay, max_grad_norm, **numbers (betas, eps, bias_correction):
            as in `mlbert.optim.adamw.Adam`.

    Raises:
        NativeUnavailable: apex was built without its CUDA extensions.
    """

    def __init__(
        self,
        fused_lamb: Any,
        flat: FlatParameters,
        moments: tuple[Tensor, Tensor],
        *,
        weight_decay: float,
        max_grad_norm: float | None,
        **numbers: Any,
    ) -> None:
        groups = []
        for decay in (True, False):
            pairs = zip(flat.parameters, flat.segments, strict=True)
            chosen = [parameter for parameter, segment in pairs if segment.decay == decay]
            if chosen:
                groups.append({"params": chosen, "weight_decay": weight_decay if decay else 0.0})
        try:
            modes = {"adam_w_mode": True, "grad_averaging": True, "use_nvlamb": False}
            self._fused = fused_lamb(groups, max_grad_norm=max_grad_norm or 0.0, **numbers, **modes)
        except RuntimeError as error:
            raise NativeUnavailable(f"apex reports: {error}") from None
        views = [flat.views(moment).values() for moment in moments]
        for parameter, first, second in zip(flat.parameters, *views, strict=True):
            self._fused.state[parameter] = {"exp_avg": first, "exp_avg_sq": second}

    def step(self, lr: float, update: int) -> None:
        """Run update number `update`, counted from 1, with learning rate `lr`;
        apex does the clipping.
        """
        for group in self._fused.param_groups:
            group["lr"] = lr
            group["step"] = update - 1  # apex adds 1 before it updates
        self._fused.step()


class Lamb(Adam):
    """LAMB; arguments, attributes and state as in `Adam`.

    The native implementation reads the gradient twice (norm, update) and, for tensors larger than
    the cache, weights and moments twice: at most 44 bytes per parameter and step. Its result does
    not depend on the number of threads.
    """

    name = "lamb"
    SCALING = UpdateScaling.TRUST_RATIO
    IMPLEMENTATIONS = (*Adam.IMPLEMENTATIONS, "apex")
    _apex: ApexLamb | None = None

    def hyperparameters(self, event: Event) -> None:
        """Log the hyperparameters under the benchmark's LAMB keys."""
        event("opt_name", "lamb")
        event("opt_lamb_epsilon", self.eps)
        event("opt_epsilon", self.eps)  # the name in rulesets up to 2.0
        event("opt_lamb_beta_1", self.betas[0])
        event("opt_lamb_beta_2", self.betas[1])
        event("opt_lamb_weight_decay_rate", self.weight_decay)
        event("opt_gradient_clip_norm", self.max_grad_norm or 0.0)

    def _load(self, form: str) -> None:
        if form != "apex":
            super()._load(form)
            return
        if self._layout.size > 1:
            raise NativeUnavailable("its state cannot be sharded; set SHARDED_OPTIMIZER=off")
        if self.flat.data.device.type != "cuda":
            raise NativeUnavailable(
                f"it needs a CUDA device; the parameters are on {self.flat.data.device}"
            )

        self._apex = ApexLamb(
            find_fused_lamb(), self.flat, (self.exp_avg, self.exp_avg_sq), **self._numbers
        )

    def _update(self, grad: Tensor, lr: float, scale: float) -> None:
        if self._apex is None:
            super()._update(grad, lr, scale)
        else:
            self._apex.step(lr, self._num_updates)  # apex does the clipping

    def _scales(self, weight: Tensor, grad: Tensor, update: Tensor) -> Tensor:
        """Return ||weight|| / ||update|| of each decayed parameter, else 1."""
        decayed = [piece for piece in self._pieces if piece.decay]
        weight_norms, update_norms = (
            self._norms_of(values, decayed) for values in (weight, update)
        )
        return torch.where(
            (weight_norms > 0) & (update_norms > 0), weight_norms / update_norms, 1.0
        ).float()
