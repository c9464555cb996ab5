"""A model's flat buffers, the optimizer on them and the reduction of gradients, where every rank updates everything."""

from __future__ import annotations

from mlbert.distributed.config import DistributedConfig
from mlbert.distributed.reduce import GradientReducer, cut_buckets
from mlbert.distributed.sharding import ShardLayout
from mlbert.distributed.world import World
from mlbert.host.errors import UserError
from mlbert.models.bert import AnyBert
from mlbert.ops.config import ComputeConfig
from mlbert.optim import methods
from mlbert.optim.base import FlatOptimizer
from mlbert.optim.config import OptimizerConfig
from mlbert.optim.flat import FlatParameters
from mlbert.optim.loss_scale import LossScale


def refuse_sharding(config: DistributedConfig, recipe: str) -> None:
    """Raise UserError if the optimizer is to be sharded: every rank of the recipe updates everything."""
    for name, value in (("SHARDED_OPTIMIZER", "off"), ("WEIGHTS_ALLGATHER", "fp32")):
        if (given := getattr(config, name.lower())) != value:
            reason = f"every rank of {recipe} updates everything"
            raise UserError("config.conflict", f"{name}={given}", reason, f"Set {name}={value}")


def refuse_bucket_clipping(config: DistributedConfig) -> None:
    """Raise UserError if each bucket of the gradient is to be clipped by itself."""
    if config.gradient_clipping == "buckets":
        raise UserError(
            "config.conflict", "GRADIENT_CLIPPING=buckets", "is the way of RECIPE=ddp_adam", "Set after or before"
        )


def whole_update(
    optimizer: OptimizerConfig,
    base_lr: float,
    distributed: DistributedConfig,
    compute: ComputeConfig,
    model: AnyBert,
    world: World,
    loss_scale: LossScale | None,
    recipe: str,
) -> tuple[FlatParameters, FlatOptimizer, GradientReducer]:
    """Return flat buffers, the optimizer on them, and the reduction of the gradient, which is clipped as a whole.

    Args:
        optimizer, distributed, compute: settings.
        base_lr: LR.
        model: on its device.
        world: started.
        loss_scale: of fp16, else None.
        recipe: its name, for errors.

    Raises:
        UserError: the settings ask for a sharded update or for clipping by bucket.
    """
    refuse_sharding(distributed, recipe)
    refuse_bucket_clipping(distributed)
    flat = FlatParameters(model.ordered_parameters(), decayed=methods.decayed(optimizer))
    buckets = cut_buckets(flat.offsets, flat.numel, distributed.bucket_mib * 2**20 // flat.grad.element_size())
    clip_before = optimizer.max_grad_norm if distributed.gradient_clipping == "before" else None
    scale, in_bf16 = loss_scale.value if loss_scale else None, distributed.gradient_reduction == "bf16"
    sync = GradientReducer(flat.parameters, flat.grad, flat.offsets, world, buckets, clip_before, scale, in_bf16)
    update = methods.make(optimizer, base_lr, distributed, compute, flat, ShardLayout.whole(flat.numel))
    return flat, update, sync
