"""SGD with momentum (heavy ball, not Nesterov's) and decoupled weight decay.

With g the clipped gradient:

    m = momentum m + g
    w = w - lr (m + weight_decay w)

Source: Polyak, "Some methods of speeding up the convergence of iteration methods", 1964. The decay, which is not part
of m, follows Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101, algorithm 1, but the
learning rate multiplies m, not g, as in `torch.optim.SGD`. LayerNorm and bias tensors have no decay.
"""

from __future__ import annotations

from torch import Tensor

from mlbert.optim.compiled import CompiledOptimizer, Formulas
from mlbert.optim.optimizer import Event


class SGD(CompiledOptimizer):
    """SGD; arguments as in `CompiledOptimizer`. The second beta and eps are unused.

    Attributes:
        momentum_buffer: float32 [n], m of the shard.
    """

    name = "sgd"
    STATE = ("momentum_buffer",)
    FORMULAS = Formulas.SGD
    momentum_buffer: Tensor

    def hyperparameters(self, event: Event) -> None:
        """Log the hyperparameters under keys like the benchmark's."""
        event("opt_name", self.name)
        event("opt_sgd_momentum", self.betas[0])
        event("opt_sgd_weight_decay", self.weight_decay)
        event("opt_gradient_clip_norm", self.max_grad_norm or 0.0)

    def _direction(self, weight: Tensor, grad: Tensor) -> Tensor:
        update = self.momentum_buffer.mul_(self.betas[0]).add_(grad).clone()
        self._add_decay(update, weight)
        return update
