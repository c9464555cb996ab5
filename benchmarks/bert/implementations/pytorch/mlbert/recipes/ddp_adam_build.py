"""Build the recipe `mlbert.recipes.ddp_adam`."""

from __future__ import annotations

import functools
from collections.abc import Callable

from mlbert.config.sections import Configuration
from mlbert.data.loading.config import DataConfig
from mlbert.data.loading.inputs import PreTrainingInputs
from mlbert.data.loading.pretraining import budget_of, make_evaluation_set, make_source
from mlbert.distributed.bucket_clipping import BucketClippingReducer
from mlbert.distributed.config import DistributedConfig
from mlbert.distributed.groups import exchange_group
from mlbert.distributed.reduce import GradientReducer, cut_buckets
from mlbert.distributed.sharding import ShardLayout
from mlbert.distributed.world import World
from mlbert.models import assembly
from mlbert.models.assembly import choose_compute, refuse_sharding, start_weights
from mlbert.models.bert import AnyBert, BertForPreTraining
from mlbert.models.config import ModelConfig
from mlbert.models.objectives import MaskedLM, PreTraining
from mlbert.models.weights.export import write_weights
from mlbert.ops.config import ComputeConfig
from mlbert.optim import optimizers as methods
from mlbert.optim import schedules
from mlbert.optim.config import OptimizerConfig, ScheduleConfig
from mlbert.optim.flat import FlatParameters
from mlbert.optim.loss_scale import LossScale
from mlbert.optim.optimizer import FlatOptimizer
from mlbert.training.config import EvaluationConfig
from mlbert.training.protocols import EvaluationSet, Method


def build(
    config: Configuration, inputs: PreTrainingInputs, world: World, seed: int, warn: Callable[[str], None]
) -> Method:
    """Return the method's objects. The data sets are not read before their ``open``."""
    data, schedule = config[DataConfig], config[ScheduleConfig]
    compute = choose_compute(config[ComputeConfig], config[ModelConfig], world.device, warn)
    model = BertForPreTraining(inputs.shape, compute.dtype, fp8_products=compute.products)
    start_weights(model, config[ModelConfig], seed, world.device, warn)
    loss_scale = LossScale.of(config[ComputeConfig], world.device)
    flat, optimizer, sync = _update(config, model, world, loss_scale)
    place = {"seed": seed, "rank": world.rank, "world_size": world.world_size}
    local = (world.local_rank, world.local_world_size)
    source = make_source(data, inputs.shape, **place, exchange=exchange_group(data, world), local=local)
    return Method(
        model=model,
        objective=PreTraining(scope="rank"),
        source=source,
        evaluation=make_evaluation_set(data, config[EvaluationConfig], inputs.shape, **place),
        flat=flat,
        sync=sync,
        optimizer=optimizer,
        schedule=schedules.make(schedule),
        static_shape=budget_of(data, source),
        precision=compute.precision,
        ops=compute.ops,
        identity={
            "model": inputs.shape.to_json(),
            "optimizer": optimizer.name,
            "train_batch_size": data.train_batch_size,
            "ranks": world.world_size,
            "train_data": inputs.train_data,
            "eval_data": inputs.eval_data,
            **config.fixed_on_resume(),
        },
        export=functools.partial(write_weights, model, vocabulary=inputs.vocabulary),
        loss_scale=loss_scale,
    )


def build_evaluation(
    config: Configuration, world: World, seed: int, warn: Callable[[str], None]
) -> tuple[AnyBert, MaskedLM, EvaluationSet]:
    """See `mlbert.models.assembly.build_evaluation`."""
    sections = config[ModelConfig], config[DataConfig], config[EvaluationConfig], config[ComputeConfig]
    return assembly.build_evaluation(*sections, world, seed, warn)


def _update(
    config: Configuration, model: BertForPreTraining, world: World, loss_scale: LossScale | None
) -> tuple[FlatParameters, FlatOptimizer, GradientReducer]:
    """Return the flat buffers, their optimizer and the reduction of their gradients over the ranks."""
    optimizer, distributed = config[OptimizerConfig], config[DistributedConfig]
    refuse_sharding(distributed, "ddp_adam")
    flat = FlatParameters(model.ordered_parameters(), decayed=methods.decayed(optimizer))
    buckets = cut_buckets(flat.offsets, flat.numel, distributed.bucket_mib * 2**20 // flat.grad.element_size())
    gradients = (flat.parameters, flat.grad, flat.offsets, world, buckets)
    clipping, limit, scale = (
        distributed.gradient_clipping,
        optimizer.max_grad_norm,
        loss_scale.value if loss_scale else None,
    )
    in_bf16, accumulation = distributed.gradient_reduction == "bf16", config[DataConfig].gradient_accumulation_steps
    sync: GradientReducer
    if clipping == "buckets" and limit is not None:
        sync = BucketClippingReducer(
            *gradients, max_norm=limit, accumulation=accumulation, loss_scale=scale, in_bf16=in_bf16
        )
    else:
        sync = GradientReducer(*gradients, limit if clipping == "before" else None, scale, in_bf16)
    base_lr, layout = config[ScheduleConfig].learning_rate, ShardLayout.whole(flat.numel)
    update = methods.make(optimizer, base_lr, distributed, config[ComputeConfig], flat, layout, sync.grad_norm)
    return flat, update, sync
