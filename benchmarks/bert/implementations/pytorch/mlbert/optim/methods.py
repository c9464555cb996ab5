"""Optimizers by name, made from a run's settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mlbert.distributed.config import DistributedConfig
from mlbert.host.errors import UserError
from mlbert.ops.config import ComputeConfig
from mlbert.optim.acclip import ACClip
from mlbert.optim.adamw import AdamW, DecoupledAdamW
from mlbert.optim.base import FlatOptimizer
from mlbert.optim.compiled import CompiledOptimizer
from mlbert.optim.config import OptimizerConfig
from mlbert.optim.flat import FlatParameters, is_decayed
from mlbert.optim.lamb import Lamb
from mlbert.optim.madgrad import Madgrad
from mlbert.optim.sgd import SGD
from mlbert.optim.shared_weights import Layout
from mlbert.optim.stableadamw import DecoupledStableAdamW, StableAdamW

OPTIMIZERS: Mapping[str, type[CompiledOptimizer]] = {
    cls.name: cls for cls in (Lamb, AdamW, DecoupledAdamW, StableAdamW, DecoupledStableAdamW, ACClip, Madgrad, SGD)
}


def make(
    config: OptimizerConfig,
    base_lr: float,
    distributed: DistributedConfig,
    compute: ComputeConfig,
    flat: FlatParameters,
    layout: Layout,
    known_norm: Tensor | None = None,
) -> FlatOptimizer:
    """The optimizer that OPTIMIZER names, with the numbers of the settings.

    Args:
        config: the optimizer's settings.
        base_lr: LR, which a decoupled decay is divided by.
        distributed: clipping and sharding.
        compute: number format and implementation of the ops.
        flat: the parameters, padded as the layout wants it.
        layout: how their buffers are shared out.
        known_norm: as in `FlatOptimizer`.

    Raises:
        UserError: the form that OPTIMIZER_IMPLEMENTATION asks for cannot be had, or not sharded.
    """
    if config.optimizer_implementation == "apex" and distributed.sharded_optimizer != "off":
        raise UserError("config.conflict", "apex optimizer", "it does not shard its state", "Set SHARDED_OPTIMIZER=off")
    cls = OPTIMIZERS[config.optimizer]
    numbers: dict[str, Any] = {"base_lr": base_lr} if config.optimizer.startswith("decoupled") else {}
    return cls(
        flat,
        layout,
        **numbers,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay_rate,
        max_grad_norm=config.max_grad_norm,
        clipped_before=distributed.gradient_clipping != "after",
        known_norm=known_norm,
        implementation=implementation(config, compute),
        gathered=distributed.weights_allgather,
        copy_dtype=None
        if config.optimizer_implementation == "apex"
        else copy_dtype(compute.precision, flat.data.device),
    )


def copy_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """The type in which products read a copy of the weights; None: there is none.

    Only where kernels write it with the update. FP8 products have copies of their own.
    """
    copies = {"auto": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16}
    return copies.get(precision) if device.type == "cuda" else None


def decayed(config: OptimizerConfig) -> Callable[[str], bool]:
    """Tells by a parameter's name whether it is decayed: all are with DECAY_ALL, else not biases and LayerNorm."""
    return (lambda name: True) if config.decay_all else is_decayed


def implementation(config: OptimizerConfig, compute: ComputeConfig) -> str:
    """The form of the optimizer: what OPTIMIZER_IMPLEMENTATION names, or the one that goes with OPS."""
    if config.optimizer_implementation != "ops":
        return config.optimizer_implementation
    return compute.ops if compute.ops in ("auto", "plain", "native") else "triton"  # the others name parts of the model
