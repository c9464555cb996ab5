"""Optimizers by name, made from a run's settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mlbert.core.errors import UserError
from mlbert.core.settings import TrainConfig
from mlbert.optim.acclip import ACClip
from mlbert.optim.adamw import AdamW, DecoupledAdamW
from mlbert.optim.base import FlatOptimizer
from mlbert.optim.compiled import CompiledOptimizer
from mlbert.optim.flat import FlatParameters, is_decayed
from mlbert.optim.lamb import Lamb
from mlbert.optim.madgrad import Madgrad
from mlbert.optim.sgd import SGD
from mlbert.optim.shared_weights import Layout
from mlbert.optim.stableadamw import DecoupledStableAdamW, StableAdamW

OPTIMIZERS: Mapping[str, type[CompiledOptimizer]] = {
    cls.name: cls for cls in (Lamb, AdamW, DecoupledAdamW, StableAdamW, DecoupledStableAdamW, ACClip, Madgrad, SGD)
}


def make(config: TrainConfig, flat: FlatParameters, layout: Layout, known_norm: Tensor | None = None) -> FlatOptimizer:
    """The optimizer that OPTIMIZER names, with the numbers of the settings.

    Args:
        config: of the run.
        flat: the parameters, padded as the layout wants it.
        layout: how their buffers are shared out.
        known_norm: as in `FlatOptimizer`.

    Raises:
        UserError: the form that OPTIMIZER_IMPLEMENTATION asks for cannot be had, or not sharded.
    """
    if config.optimizer_implementation == "apex" and config.sharded_optimizer != "off":
        raise UserError("apex optimizer", "it does not shard its state", "Set SHARDED_OPTIMIZER=off")
    cls = OPTIMIZERS[config.optimizer]
    numbers: dict[str, Any] = {"base_lr": config.learning_rate} if config.optimizer.startswith("decoupled") else {}
    return cls(
        flat,
        layout,
        **numbers,
        betas=(config.opt_lamb_beta_1, config.opt_lamb_beta_2),
        eps=config.opt_epsilon,
        weight_decay=config.weight_decay_rate,
        max_grad_norm=config.max_grad_norm,
        clipped_before=config.gradient_clipping != "after",
        known_norm=known_norm,
        implementation=implementation(config),
        gathered=config.weights_allgather,
        copy_dtype=None
        if config.optimizer_implementation == "apex"
        else copy_dtype(config.precision, flat.data.device),
    )


def copy_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """The type in which products read a copy of the weights; None: there is none.

    Only where kernels write it with the update. FP8 products have copies of their own.
    """
    copies = {"auto": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16}
    return copies.get(precision) if device.type == "cuda" else None


def decayed(config: TrainConfig) -> Callable[[str], bool]:
    """Tells by a parameter's name whether it is decayed: all are with DECAY_ALL, else not biases and LayerNorm."""
    return (lambda name: True) if config.decay_all else is_decayed


def implementation(config: TrainConfig) -> str:
    """The form of the optimizer: what OPTIMIZER_IMPLEMENTATION names, or the one that goes with OPS."""
    if config.optimizer_implementation != "ops":
        return config.optimizer_implementation
    return config.ops if config.ops in ("auto", "plain", "native") else "triton"  # the others name parts of the model
