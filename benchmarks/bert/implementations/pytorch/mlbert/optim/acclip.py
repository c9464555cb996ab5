"""ACClip: momentum clipped element by element at a running mean of the gradient's magnitude.

With g the clipped gradient:

    m = beta_1 m + (1 - beta_1) g                     tau = beta_2 tau + (1 - beta_2) |g|
    u = min(tau / (|m| + eps), 1) m + weight_decay w
    w = w - lr u

Source: Zhang et al., "Why are Adaptive Methods Good for Attention Models?", arXiv 1912.03194,
algorithm 2 with alpha = 1 (in general tau^alpha averages |g|^alpha). The decay is decoupled as in
`mlbert.optim.adamw` and skips LayerNorm and bias tensors. m and tau have no bias correction.
"""

from __future__ import annotations

from torch import Tensor

from mlbert.optim.compiled import CompiledOptimizer, Formulas


class ACClip(CompiledOptimizer):
    """ACClip; arguments as in `CompiledOptimizer`.

    Attributes:
        exp_avg, exp_avg_abs: float32 [n], m and tau of the shard.
    """

    name = LOGGED_AS = "acclip"
    STATE = ("exp_avg", "exp_avg_abs")
    FORMULAS = Formulas.ACCLIP
    exp_avg: Tensor
    exp_avg_abs: Tensor

    def _direction(self, weight: Tensor, grad: Tensor) -> Tensor:
        m = self.exp_avg
        tau = self.exp_avg_abs
        m.mul_(self.betas[0]).add_(grad, alpha=1.0 - self.betas[0])
        tau.mul_(self.betas[1]).add_(grad.abs(), alpha=1.0 - self.betas[1])
        update = (tau / m.abs().add_(self.eps)).clamp_(max=1.0).mul_(m)
        self._add_decay(update, weight)
        return update
