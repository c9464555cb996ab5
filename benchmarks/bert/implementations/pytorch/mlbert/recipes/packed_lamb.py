"""Packed LAMB: the MLPerf benchmark's method on packed samples.

    source config_<system>.sh && sbatch -N ${DGXNNODES} -t ${WALLTIME} run.sub      (or launch/run_and_time.sh)

Up to MAX_SEQUENCES_PER_PACK sequences share a row of max_seq_length tokens; attention never crosses a sequence. LAMB
with bias correction, the gradient clipped to global norm 1.0 (GRADIENT_CLIPPING: when), no decay and no trust ratio
for biases and LayerNorm, polynomial decay counted from step 0. The loss is the mean over all masked tokens of the step
plus the mean over all its sequences, so that ranks and accumulation steps do not change it.

On the benchmark's data (BERT-large, from the phase-1 checkpoint) the goal is masked-LM accuracy 0.720, which the
reference reaches after about 2.4 million samples at batch 448. On the text that Python carries (demo configuration,
2 CPU cores) see the README for the target and the time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from mlbert.core import schedules
from mlbert.core.continuing import fixed_settings
from mlbert.core.errors import UserError
from mlbert.core.settings import TrainConfig
from mlbert.dist.groups import ShardGroups, exchange_group
from mlbert.dist.reduce import GradientReducer, cut_buckets
from mlbert.dist.sharding import ShardedReducer, ShardLayout
from mlbert.dist.world import World
from mlbert.feed.inputs import PreTrainingInputs, inspect
from mlbert.feed.pretraining import budget_of, make_evaluation_set, make_source
from mlbert.models.bert import BertForPreTraining
from mlbert.models.evaluation import build_evaluation
from mlbert.models.export import write_weights
from mlbert.models.objectives import PreTraining
from mlbert.models.start import choose_compute, start_weights
from mlbert.models.update import refuse_bucket_clipping
from mlbert.optim import methods
from mlbert.optim.base import FlatOptimizer
from mlbert.optim.flat import FlatParameters
from mlbert.optim.loss_scale import LossScale
from mlbert.train.protocols import Method

__all__ = ["DEFAULTS", "build", "build_evaluation", "inspect"]

DEFAULTS: Mapping[str, object] = {
    "recipe": "packed_lamb",
    "data_reader": "auto",
    "init_checkpoint": None,
    "gradient_accumulation_steps": 1,
    "max_sequences_per_pack": 3,
    "bin_counts": None,
    "exchange_padding": "off",
    "exchange_by": "lengths",
    "max_seconds": None,
    "warmup_steps": 0,
    "warmup_proportion": None,
    "start_warmup_step": 0,
    "schedule": "polynomial",
    "poly_power": 1.0,
    "end_lr": None,
    "lr_decay_end": None,
    "lr_decay_steps": None,
    "lr_milestones": None,
    "lr_gamma": None,
    "lr_first_step": 0,
    "optimizer": "lamb",
    "opt_epsilon": 1e-6,
    "max_grad_norm": 1.0,
    "gradient_clipping": "after",
    "gradient_reduction": "fp32",
    "bucket_mib": 25,
    "optimizer_implementation": "ops",
    "sharded_optimizer": "off",
    "weights_allgather": "fp32",
    "seed": None,
    "target_mlm_accuracy": 0.720,
    "num_eval_examples": 10_000,
    "eval_batch_size": 16,
    "precision": "auto",
    "fp8_fast_accumulation": "forward",
    "loss_scale": 131072.0,
    "loss_scale_window": 2000,
    "join_timeout": None,
    "cpu_threads": None,
    "ops": "auto",
    "cuda_graph_mode": "none",
    "save_checkpoint_steps": 0,
    "keep_checkpoints": 2,
    "resume": False,
    "max_skipped_steps": 20,
    "synthetic_data": False,
    "log_freq": 10,
    "experiment": 0,
    "caches_cleared": False,
}


def build(
    config: TrainConfig, inputs: PreTrainingInputs, world: World, seed: int, warn: Callable[[str], None]
) -> Method:
    """The method's objects; nothing of the data sets is touched before their ``open``."""
    compute = choose_compute(config, world.device, warn)
    model = BertForPreTraining(inputs.shape, compute.dtype, fp8_products=compute.products)
    start_weights(model, config, seed, world.device, warn)
    loss_scale = LossScale.of(config, world.device)
    flat, optimizer, sync = _update(config, model, world, loss_scale)
    place = {"seed": seed, "rank": world.rank, "world_size": world.world_size}
    local = (world.local_rank, world.local_world_size)
    source = make_source(config, inputs.shape, **place, exchange=exchange_group(config, world), local=local)
    return Method(
        model=model,
        objective=PreTraining(scope="step"),
        source=source,
        evaluation=make_evaluation_set(config, inputs.shape, **place),
        flat=flat,
        sync=sync,
        optimizer=optimizer,
        schedule=schedules.make(config),
        budget=budget_of(config, source),
        precision=compute.precision,
        ops=compute.ops,
        identity={
            "model": inputs.shape.to_json(),
            "optimizer": optimizer.name,
            "train_batch_size": config.train_batch_size,
            "ranks": world.world_size,
            "train_data": inputs.train_data,
            "eval_data": inputs.eval_data,
            **fixed_settings(config),
        },
        export=functools.partial(write_weights, model, vocabulary=inputs.vocabulary),
        loss_scale=loss_scale,
    )


def _update(
    config: TrainConfig, model: BertForPreTraining, world: World, loss_scale: LossScale | None
) -> tuple[FlatParameters, FlatOptimizer, GradientReducer]:
    """Flat buffers, the optimizer on them and the reduction of their gradients over the ranks."""
    refuse_bucket_clipping(config)
    if config.sharded_optimizer == "off" and config.weights_allgather != "fp32":
        setting = f"WEIGHTS_ALLGATHER={config.weights_allgather}"
        raise UserError(setting, "weights travel only where the optimizer is sharded", "Set SHARDED_OPTIMIZER=node")
    groups = ShardGroups.of(config.sharded_optimizer, world)
    flat = FlatParameters(model.ordered_parameters(), ShardLayout.multiple(groups), methods.decayed(config))
    numel, grad = flat.padded_data.numel(), flat.padded_grad
    bucket_elements = config.bucket_mib * 2**20 // grad.element_size()
    clip_before = config.max_grad_norm if config.gradient_clipping == "before" else None
    scale, in_bf16 = loss_scale.value if loss_scale else None, config.gradient_reduction == "bf16"
    if config.sharded_optimizer == "off":
        layout = ShardLayout.whole(numel)
        buckets = cut_buckets(flat.offsets, numel, bucket_elements)
        reducer = GradientReducer(flat.parameters, grad, flat.offsets, world, buckets, clip_before, scale, in_bf16)
    else:
        layout = ShardLayout(numel, groups, bucket_elements)
        reducer = ShardedReducer(flat.parameters, grad, flat.offsets, world, layout, clip_before, scale, in_bf16)
    return flat, methods.make(config, flat, layout), reducer
