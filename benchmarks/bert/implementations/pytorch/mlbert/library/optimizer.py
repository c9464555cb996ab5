"""This package's optimizers as a `torch.optim.Optimizer`, for training loops of your own.

optimizer = mlbert.make_optimizer(model, "decoupled_adamw", lr=5e-4, weight_decay=1e-5)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from mlbert.distributed.sharding import ShardLayout
from mlbert.host.errors import UserError
from mlbert.models.bert import BertBase
from mlbert.optim.config import OPTIMIZERS
from mlbert.optim.flat import FlatParameters
from mlbert.optim.optimizer import FlatOptimizer

_STATE = "state"
_GROUPS = "param_groups"


class ModuleOptimizer(torch.optim.Optimizer):
    """An optimizer over all parameters of a module; `mlbert.make_optimizer` makes it.

    It has one parameter group, so a schedule of `torch.optim.lr_scheduler` sets the rate. A step
    with a gradient that is not finite changes nothing.

    Attributes:
        grad_norm: float64 scalar, the gradient's norm before clipping at the last step.
        implementation: "native", "triton" or "plain".
    """

    def __init__(self, flat: FlatParameters, rule: FlatOptimizer, lr: float) -> None:
        super().__init__(flat.parameters, {"lr": lr})
        self._flat = flat
        self._rule = rule
        self._gradients = list(flat.views(flat.grad).values())
        self._weights = [parameter.data_ptr() for parameter in flat.parameters]
        self.grad_norm = rule.grad_norm
        self.implementation = rule.implementation

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; return what ``closure`` returns, which computes the gradient.

        Raises UserError if the parameters are no longer where they were.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if [parameter.data_ptr() for parameter in self._flat.parameters] != self._weights:
            reason = "the model's parameters have moved to a different place in memory"
            remedy = "Move the model to its device before make_optimizer"
            raise UserError("config.conflict", "optimizer", reason, remedy)
        self._collect()
        self.grad_norm = self._rule.step(float(self.param_groups[0]["lr"]))
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to zero; ``set_to_none`` is ignored, as they stay in one buffer."""
        self._flat.zero_grad()
        for parameter, gradient in zip(self._flat.parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the update rule, and the learning rate."""
        group = {name: value for name, value in self.param_groups[0].items() if name != "params"}
        return {_STATE: self._rule.state_dict(), _GROUPS: [group]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. The model must have the weights of the same moment.

        Raises UserError if it belongs to another model.
        """
        self._rule.load_state_dict(state_dict[_STATE])
        self.param_groups[0].update(state_dict[_GROUPS][0])

    def _collect(self) -> None:
        """Copy gradients that are not in the buffer to it: those of parameters whose views a
        module's own `zero_grad` dropped.
        """
        for parameter, gradient in zip(self._flat.parameters, self._gradients, strict=True):
            found = parameter.grad
            if found is not None and found.data_ptr() == gradient.data_ptr():
                continue
            place = getattr(parameter, "place", None)
            if place is not None:
                place.before_adding()
            if found is None:
                gradient.zero_()
            else:
                gradient.copy_(found)
            parameter.grad = gradient


def make_optimizer(
    model: nn.Module,
    name: str = "adamw",
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    decay_all: bool = False,
    max_grad_norm: float | None = None,
    implementation: str = "auto",
) -> ModuleOptimizer:
    """Return an optimizer for a module, on the device where its parameters are.

    Args:
        model: any module with float32 parameters. They become views of one buffer.
        name: "lamb", "adamw", "decoupled_adamw", "stableadamw", "decoupled_stableadamw",
            "acclip", "madgrad", "sgd" or "muon".
        lr: learning rate; the decay of the decoupled rules is relative to it.
        betas, eps: of the moments.
        weight_decay: of matrices.
        decay_all: decay biases and the weights of norms, too.
        max_grad_norm: limit of the gradient's norm (None: do not clip).
        implementation: "native" (CPU), "triton" (CUDA), "plain", or "auto" for the fastest.

    Raises:
        UserError: the rule or implementation is not known or not available.
    """
    if name not in OPTIMIZERS:
        raise UserError(
            "config.choice", f"optimizer {name!r}", "is not known", "Use a valid one", OPTIMIZERS
        )
    cls = OPTIMIZERS.load(name)
    parameters = _ordered_parameters(model)
    matrices = {key for key, parameter in parameters.items() if parameter.ndim > 1}
    flat = FlatParameters(parameters.items(), decayed=lambda key: decay_all or key in matrices)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # Gradients must pass autograd's hooks, by which DistributedDataParallel reduces them.
        for parameter in flat.parameters:
            del parameter.place  # type: ignore[attr-defined]
    numbers: dict[str, Any] = {"base_lr": lr} if cls.HAS_DECOUPLED_DECAY else {}
    rule: FlatOptimizer = cls(
        flat,
        ShardLayout.whole(flat.numel),
        **numbers,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        implementation=implementation,
    )
    return ModuleOptimizer(flat, rule, lr)


def _ordered_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters to train, those of our encoders in their best order."""
    found: dict[nn.Parameter, str] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, BertBase):
            for name, parameter in module.ordered_parameters():
                found[parameter] = f"{prefix}.{name}"
    for name, parameter in model.named_parameters():
        found.setdefault(parameter, name)
    return {name: parameter for parameter, name in found.items() if parameter.requires_grad}
