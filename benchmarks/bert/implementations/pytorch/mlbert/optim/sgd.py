"""SGD with momentum (heavy ball, not Nesterov's) and decoupled weight decay.

With g the clipped gradient:

    m = momentum m + g
    w = w - lr (m + weight_decay w)

Source: Polyak, "Some methods of speeding up the convergence of iteration methods", 1964. The decay,
which is not part of m, follows Loshchilov and Hutter, "Decoupled Weight Decay Regularization",
arXiv 1711.05101, algorithm 1, but the learning rate multiplies m, not g, as in `torch.optim.SGD`.
LayerNorm and bias tensors have no decay.
"""

from __future__ import annotations

from torch import Tensor

from mlbert.optim.compiled import CompiledOptimizer, Formulas


class SGD(CompiledOptimizer):
    """SGD; arguments as in `CompiledOptimizer`. The second beta and eps are unused.

    Attributes:
        momentum_buffer: float32 [n], m of the shard.
    """

    name = LOGGED_AS = "sgd"
    LOGGED = ("momentum", "weight_decay")
    STATE = ("momentum_buffer",)
    FORMULAS = Formulas.SGD
    momentum_buffer: Tensor

    def _direction(self, weight: Tensor, grad: Tensor) -> Tensor:
        update = self.momentum_buffer.mul_(self.betas[0]).add_(grad).clone()
        self._add_decay(update, weight)
        return update
