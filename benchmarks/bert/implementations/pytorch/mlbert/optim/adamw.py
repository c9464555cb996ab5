"""AdamW: Adam with weight decay taken from the weights directly.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101, algorithm 2, with the learning
rate on the decay term as in `torch.optim.AdamW`. LayerNorm and bias tensors take no decay; the gradient is clipped to a
global norm first. With g the clipped gradient and t the number of the update, from 1:

    m = beta_1 m + (1 - beta_1) g                     v = beta_2 v + (1 - beta_2) g^2
    w = w - lr ((m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + eps) + weight_decay w)

Without bias correction this is the `AdamWeightDecayOptimizer` of the published BERT code.
"""

from __future__ import annotations

from torch import Tensor

from mlbert.optim.base import FlatOptimizer
from mlbert.optim.kernels import OptimizerKernels, Scalars
from mlbert.optim.lamb import ReferenceLamb


class ReferenceAdamW(ReferenceLamb):
    """The specification: the reference LAMB with every trust ratio 1."""

    def trust_ratio(self, weight: Tensor, update: Tensor) -> float:
        """1: AdamW does not look at norms."""
        return 1.0


class AdamW(FlatOptimizer):
    """AdamW on flat buffers; arguments, attributes and state as in `FlatOptimizer`.

    The native form touches 32 bytes a parameter and step: the gradient for its norm, then everything once.
    """

    def _update_native(self, native: OptimizerKernels, buffers: tuple[Tensor, ...], scalars: Scalars) -> None:
        native.adamw(buffers, scalars)
