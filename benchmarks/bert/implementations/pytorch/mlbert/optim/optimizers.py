"""Create the optimizer that a run's settings name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mlbert.host.errors import UserError
from mlbert.optim.config import OPTIMIZERS, OptimizerConfig
from mlbert.optim.flat import FlatParameters, is_decayed
from mlbert.optim.optimizer import FlatOptimizer
from mlbert.optim.shared_weights import Layout


def make(
    config: OptimizerConfig,
    flat: FlatParameters,
    layout: Layout,
    *,
    base_lr: float,
    ops: str,
    precision: str,
    is_sharded: bool,
    clipped_before: bool,
    gathered: str,
    known_norm: Tensor | None = None,
) -> FlatOptimizer:
    """Return the optimizer that OPTIMIZER names, with the configured hyperparameters.

    Args:
        config: the optimizer's settings.
        flat: the parameters, padded for the layout.
        layout: how their buffers are sharded.
        base_lr: LR, the divisor of a decoupled decay.
        ops: OPS, the implementation of the ops.
        precision: PRECISION, the format of matrix products.
        is_sharded: whether SHARDED_OPTIMIZER shards the state.
        clipped_before: whether gradients are clipped before the optimizer gets them.
        gathered: format in which a sharded optimizer sends new weights.
        known_norm: as in `FlatOptimizer`.

    Raises:
        UserError: the implementation that OPTIMIZER_IMPLEMENTATION names is not available,
            or the optimizer cannot be sharded.
    """
    cls = OPTIMIZERS.load(config.optimizer)
    is_apex = config.optimizer_implementation == "apex"
    if is_sharded and (is_apex or not cls.CAN_SHARD):
        subject = "apex optimizer" if cls.CAN_SHARD else f"OPTIMIZER={config.optimizer}"
        raise UserError(
            "config.conflict", subject, "its state cannot be sharded", "Set SHARDED_OPTIMIZER=off"
        )
    numbers: dict[str, Any] = {}
    if cls.HAS_DECOUPLED_DECAY:
        numbers["base_lr"] = base_lr
    return cls(
        flat,
        layout,
        **numbers,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay_rate,
        max_grad_norm=config.max_grad_norm,
        clipped_before=clipped_before,
        known_norm=known_norm,
        implementation=implementation(config, ops),
        gathered=gathered,
        copy_dtype=None if is_apex else copy_dtype(precision, flat.data.device),
    )


def copy_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype of the weight copy that matrix products read, or None for no copy.

    Only devices with kernels that write the copy during the update have one.
    FP8 products keep their own copies.
    """
    copies = {"auto": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16}
    return copies.get(precision) if device.type == "cuda" else None


def decayed(config: OptimizerConfig) -> Callable[[str], bool]:
    """Return a function from a parameter's name to whether it is decayed:
    all if DECAY_ALL, else all but biases and LayerNorm.
    """
    return (lambda name: True) if config.decay_all else is_decayed


def implementation(config: OptimizerConfig, ops: str) -> str:
    """Return the optimizer's implementation: OPTIMIZER_IMPLEMENTATION,
    or the one that matches OPS.
    """
    if config.optimizer_implementation != "ops":
        return config.optimizer_implementation
    if ops == "fastest":
        return "auto"
    # Other values concern the model.
    return ops if ops in ("auto", "plain", "native") else "triton"
