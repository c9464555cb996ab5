"""LAMB as the benchmark defines it: Adam's direction with decay, scaled for each tensor by ||w|| / ||update||.

Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv 1904.00962,
algorithm 2 with phi the identity, and the benchmark's reference, whose exceptions are: LayerNorm and bias tensors
take neither weight decay nor the trust ratio; a norm of 0 makes the ratio 1; the gradient is clipped to a global norm
first. The formulas are in `mlbert.optim.adamw`.

LAMB by NVIDIA apex's FusedLAMB on the flat buffers, for a comparison where apex is installed (CUDA only).

Apex knows parameter groups in place of segments: one with weight decay, one without; parameters, gradients and
moments stay views of the flat buffers. What differs from `mlbert.optim.lamb`:

* with WEIGHT_DECAY_RATE=0 apex takes the trust ratio of no tensor, since there it belongs to the decay;
* norms are accumulated in float32;
* the host reads the gradient's norm each step, to leave out what is not finite: apex alone would not. So no graph can
  hold it.

Never run here: what has been tested, with a stand-in of FusedLAMB's interface, is how segments, moments, rate and
step number are handed over.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from mlbert.host.native import NativeUnavailable
from mlbert.optim.adamw import Adam
from mlbert.optim.base import Event
from mlbert.optim.compiled import UpdateScaling
from mlbert.optim.flat import FlatParameters


def find_fused_lamb() -> Any:
    """Apex's class.

    Raises:
        NativeUnavailable: apex cannot be imported, or is another package of that name.
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
        weight_decay, max_grad_norm, **numbers (betas, eps, bias_correction): as in `mlbert.optim.adamw.Adam`.

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
            raise NativeUnavailable(f"apex says: {error}") from None
        views = [flat.views(moment).values() for moment in moments]
        for parameter, first, second in zip(flat.parameters, *views, strict=True):
            self._fused.state[parameter] = {"exp_avg": first, "exp_avg_sq": second}

    def step(self, lr: float, update: int) -> None:
        """Update number `update`, from 1, with learning rate `lr`; clips by itself."""
        for group in self._fused.param_groups:
            group["lr"] = lr
            group["step"] = update - 1  # apex adds 1 before it updates
        self._fused.step()


class Lamb(Adam):
    """LAMB; arguments, attributes and state as in `Adam`.

    The native form reads the gradient twice (norm, update) and, for tensors beyond the cache, weights and moments
    twice: 44 bytes a parameter and step at most. Its result does not depend on the number of threads.
    """

    name = "lamb"
    SCALING = UpdateScaling.TRUST_RATIO
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
