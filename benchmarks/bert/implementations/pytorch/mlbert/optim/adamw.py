"""AdamW: Adam with weight decay taken from the weights directly, in its common form and decoupled from the rate.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101, algorithm 2. `AdamW` has the
learning rate on the decay term, as `torch.optim.AdamW` has; `DecoupledAdamW` has the schedule's multiplier alone, as
the paper and Composer's optimizer of that name have:

    w = w - lr u - (lr / base_lr) weight_decay w

which is AdamW with a weight decay of weight_decay / base_lr. Without bias correction AdamW is the
`AdamWeightDecayOptimizer` of the published BERT code. The formulas are in `mlbert.optim.adam`.
"""

from __future__ import annotations

from typing import Any

from mlbert.optim.adam import Adam
from mlbert.optim.base import Event
from mlbert.optim.flat import FlatParameters
from mlbert.optim.shared_weights import Layout


class AdamW(Adam):
    """AdamW; arguments, attributes and state as in `Adam`.

    The native form touches 32 bytes a parameter and step: the gradient for its norm, then everything once.
    """

    name = "adamw"
    _decay_as_set: float | None = None

    def hyperparameters(self, event: Event) -> None:
        """Adam's keys of the benchmark's log; the weight decay as it was set."""
        event("opt_name", self.name)
        event("opt_adamw_epsilon", self.eps)
        event("opt_adamw_beta_1", self.betas[0])
        event("opt_adamw_beta_2", self.betas[1])
        event("opt_adamw_weight_decay", self.weight_decay if self._decay_as_set is None else self._decay_as_set)
        event("opt_gradient_clip_norm", self.max_grad_norm or 0.0)


class DecoupledAdamW(AdamW):
    """AdamW whose decay follows the schedule but not the size of the learning rate.

    Args:
        base_lr: the schedule's base rate, at which a step takes `weight_decay` of the weights away.
        flat, layout, **settings: as in `Adam`.
    """

    name = "decoupled_adamw"

    def __init__(
        self, flat: FlatParameters, layout: Layout, *, base_lr: float, weight_decay: float, **settings: Any
    ) -> None:
        super().__init__(flat, layout, weight_decay=weight_decay / base_lr, **settings)
        self._decay_as_set = weight_decay
