"""A model's flat buffers, the optimizer on them and the reduction of gradients, where every rank updates everything."""

from __future__ import annotations

from mlbert.core.errors import UserError
from mlbert.core.settings import TrainConfig
from mlbert.dist.reduce import GradientReducer, cut_buckets
from mlbert.dist.sharding import ShardLayout
from mlbert.dist.world import World
from mlbert.models.bert import AnyBert
from mlbert.optim import methods
from mlbert.optim.base import FlatOptimizer
from mlbert.optim.flat import FlatParameters
from mlbert.optim.loss_scale import LossScale


def refuse_sharding(config: TrainConfig) -> None:
    """Raises UserError: the optimizer is to be shared out over ranks."""
    for name, value in (("SHARDED_OPTIMIZER", "off"), ("WEIGHTS_ALLGATHER", "fp32")):
        if (given := getattr(config, name.lower())) != value:
            reason = f"every rank of {config.recipe} updates everything"
            raise UserError(f"{name}={given}", reason, f"Set {name}={value}")


def refuse_bucket_clipping(config: TrainConfig) -> None:
    """Raises UserError: each bucket of the gradient is to be clipped by itself."""
    if config.gradient_clipping == "buckets":
        raise UserError("GRADIENT_CLIPPING=buckets", "is the way of RECIPE=ddp_adam", "Set after or before")


def whole_update(
    config: TrainConfig, model: AnyBert, world: World, loss_scale: LossScale | None
) -> tuple[FlatParameters, FlatOptimizer, GradientReducer]:
    """The objects, with the gradient clipped as a whole. Raises UserError: the settings ask for another way."""
    refuse_sharding(config)
    refuse_bucket_clipping(config)
    flat = FlatParameters(model.ordered_parameters(), decayed=methods.decayed(config))
    buckets = cut_buckets(flat.offsets, flat.numel, config.bucket_mib * 2**20 // flat.grad.element_size())
    clip_before = config.max_grad_norm if config.gradient_clipping == "before" else None
    scale, in_bf16 = loss_scale.value if loss_scale else None, config.gradient_reduction == "bf16"
    sync = GradientReducer(flat.parameters, flat.grad, flat.offsets, world, buckets, clip_before, scale, in_bf16)
    return flat, methods.make(config, flat, ShardLayout.whole(flat.numel)), sync
