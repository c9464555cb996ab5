"""StableAdamW: AdamW with a smaller rate for tensors whose second moment lags behind their gradients.

Source: Wortsman et al., "Stable and low-precision training for large-scale vision-language models", arXiv 2304.13013,
algorithm 2. The rate, and with it the decay, is divided by max(1, RMS), where RMS is the root mean of g^2 / max(v,
eps^2) over the tensor (Adafactor's update clipping). All tensors are scaled, including LayerNorm and biases. The
formulas are in `mlbert.optim.adamw`. Moments are stored as in Adam and bias-corrected on use, which is equivalent to
the paper's correction of the betas.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mlbert.optim.adamw import AdamW, DecoupledAdamW
from mlbert.optim.compiled import UpdateScaling


class StableAdamW(AdamW):
    """StableAdamW; arguments, attributes and state as in `Adam`."""

    name = "stableadamw"
    SCALING = UpdateScaling.RMS

    def _scales(self, weight: Tensor, grad: Tensor, update: Tensor) -> Tensor:
        """Return 1 / max(1, RMS) of each parameter."""
        correction_2 = self._corrections()[1]
        norms = self._norms_of(grad / (self.exp_avg_sq * correction_2).clamp_(min=self.eps**2).sqrt_(), self._pieces)
        numels = torch.tensor([float(s.numel) for s in self.flat.segments], dtype=torch.float64, device=norms.device)
        return (numels.sqrt() / norms.clamp(min=numels.sqrt())).float()


class DecoupledStableAdamW(StableAdamW, DecoupledAdamW):
    """StableAdamW with the decay of `DecoupledAdamW`; same arguments."""

    name = "decoupled_stableadamw"
