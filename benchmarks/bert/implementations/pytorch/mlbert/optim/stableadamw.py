"""StableAdamW: AdamW whose rate shrinks for a tensor where the second moment lags behind its gradients.

Source: Wortsman et al., "Stable and low-precision training for large-scale vision-language models", arXiv 2304.13013,
algorithm 2: the rate is divided by max(1, RMS), RMS being the root of the mean of g^2 / max(v, eps^2) over the tensor
(Adafactor's update clipping). The decay is divided with it. All tensors are scaled, LayerNorm and biases too. The
formulas are in `mlbert.optim.adamw`; moments are stored as Adam has them, and their bias is corrected where they are
used, which is the paper's correction of the betas written otherwise.
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
        """1 / max(1, RMS) of each parameter."""
        correction_2 = self._corrections()[1]
        norms = self._norms_of(grad / (self.exp_avg_sq * correction_2).clamp_(min=self.eps**2).sqrt_(), self._pieces)
        numels = torch.tensor([float(s.numel) for s in self.flat.segments], dtype=torch.float64, device=norms.device)
        return (numels.sqrt() / norms.clamp(min=numels.sqrt())).float()


class DecoupledStableAdamW(StableAdamW, DecoupledAdamW):
    """StableAdamW with `DecoupledAdamW`'s decay; arguments as there."""

    name = "decoupled_stableadamw"
