"""Build the recipe `mlbert.recipes.packed_lamb`."""

from __future__ import annotations

import functools
from collections.abc import Callable

from mlbert.config.sections import Configuration
from mlbert.data.loading.config import DataConfig
from mlbert.data.loading.inputs import PreTrainingInputs
from mlbert.data.loading.pretraining import budget_of, make_evaluation_set, make_source
from mlbert.distributed.config import DistributedConfig
from mlbert.distributed.groups import ShardGroups, exchange_group
from mlbert.distributed.reduce import GradientReducer, cut_buckets
from mlbert.distributed.sharding import ShardedReducer, ShardLayout
from mlbert.distributed.world import World
from mlbert.host.errors import UserError
from mlbert.models import assembly
from mlbert.models.assembly import choose_compute, refuse_bucket_clipping, start_weights
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
        objective=PreTraining(scope="step"),
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
    refuse_bucket_clipping(distributed)
    if distributed.sharded_optimizer == "off" and distributed.weights_allgather != "fp32":
        setting = f"WEIGHTS_ALLGATHER={distributed.weights_allgather}"
        raise UserError(
            "config.conflict",
            setting,
            "weights are sent between ranks only if the optimizer is sharded",
            "Set SHARDED_OPTIMIZER=node",
        )
    groups = ShardGroups.of(distributed.sharded_optimizer, world)
    flat = FlatParameters(model.ordered_parameters(), ShardLayout.multiple(groups), methods.decayed(optimizer))
    numel, grad = flat.padded_data.numel(), flat.padded_grad
    bucket_elements = distributed.bucket_mib * 2**20 // grad.element_size()
    clip_before = optimizer.max_grad_norm if distributed.gradient_clipping == "before" else None
    scale, in_bf16 = loss_scale.value if loss_scale else None, distributed.gradient_reduction == "bf16"
    if distributed.sharded_optimizer == "off":
        layout = ShardLayout.whole(numel)
        buckets = cut_buckets(flat.offsets, numel, bucket_elements)
        reducer = GradientReducer(flat.parameters, grad, flat.offsets, world, buckets, clip_before, scale, in_bf16)
    else:
        layout = ShardLayout(numel, groups, bucket_elements)
        reducer = ShardedReducer(flat.parameters, grad, flat.offsets, world, layout, clip_before, scale, in_bf16)
    base_lr, compute = config[ScheduleConfig].learning_rate, config[ComputeConfig]
    return flat, methods.make(optimizer, base_lr, distributed, compute, flat, layout), reducer
