"""LAMB by NVIDIA apex's FusedLAMB on the flat buffers, for a comparison where apex is installed (CUDA only).

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

from torch import Tensor

from mlbert.host.native import NativeUnavailable
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
        weight_decay, max_grad_norm, **numbers (betas, eps, bias_correction): as in `mlbert.optim.adam.Adam`.

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
