"""DDP with Adam for large batches: every rank's gradient is clipped bucket by bucket while backward goes on.

    PYTHON=... DGXSYSTEM=<system> INPUT_DIR=... EVAL_DIR=... CHECKPOINTDIR_PHASE1=... ./run_multinode.sh
    source config_<system>.sh && sbatch -N ${DGXNNODES} -t ${WALLTIME} run.sub

The method of Samsung's submissions to MLPerf Training v2.0 and v2.1 (open division), from their public description:

* loss       mean over this rank's masked tokens plus mean over its sequences; the ranks' gradients are averaged
* gradient   GRADIENT_CLIPPING=buckets: each full bucket is clipped to MAX_GRAD_NORM / sqrt(buckets) and its mean over
             the ranks starts (`mlbert.dist.bucket_clipping`); no pass over the whole gradient, no wait
* update     Adam with decoupled decay, none for biases and LayerNorm
* rate       a ramp that begins below step 0, then a line to END_LR at LR_DECAY_END; updates count from 1
* data       single sequences; BIN_COUNTS of each rank's batch from each length bin, and EXCHANGE_PADDING deals them out
             so that ranks have about equally many tokens (`mlbert.store.deals`)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from mlbert.core import schedules
from mlbert.core.continuing import fixed_settings
from mlbert.core.settings import TrainConfig
from mlbert.dist.bucket_clipping import BucketClippingReducer
from mlbert.dist.groups import exchange_group
from mlbert.dist.reduce import GradientReducer, cut_buckets
from mlbert.dist.sharding import ShardLayout
from mlbert.dist.world import World
from mlbert.feed.inputs import PreTrainingInputs, inspect
from mlbert.feed.pretraining import budget_of, make_evaluation_set, make_source
from mlbert.models.bert import BertForPreTraining
from mlbert.models.evaluation import build_evaluation
from mlbert.models.export import write_weights
from mlbert.models.objectives import PreTraining
from mlbert.models.start import choose_compute, start_weights
from mlbert.models.update import refuse_sharding
from mlbert.optim import methods
from mlbert.optim.base import FlatOptimizer
from mlbert.optim.flat import FlatParameters
from mlbert.optim.loss_scale import LossScale
from mlbert.train.protocols import Method

__all__ = ["DEFAULTS", "build", "build_evaluation", "inspect"]

DEFAULTS: Mapping[str, object] = {
    "recipe": "ddp_adam",
    "data_reader": "auto",
    "init_checkpoint": None,
    "gradient_accumulation_steps": 1,
    "max_sequences_per_pack": 1,
    "bin_counts": None,
    "exchange_padding": "group",
    "exchange_by": "lengths",
    "max_seconds": None,
    "warmup_steps": 0,
    "warmup_proportion": None,
    "start_warmup_step": 0,
    "schedule": "linear",
    "poly_power": 1.0,
    "end_lr": None,
    "lr_decay_end": None,
    "lr_decay_steps": None,
    "lr_milestones": None,
    "lr_gamma": None,
    "lr_first_step": 1,
    "optimizer": "adamw",
    "opt_epsilon": 1e-9,
    "max_grad_norm": 1.0,
    "gradient_clipping": "buckets",
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
        objective=PreTraining(scope="rank"),
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
    refuse_sharding(config)
    flat = FlatParameters(model.ordered_parameters(), decayed=methods.decayed(config))
    buckets = cut_buckets(flat.offsets, flat.numel, config.bucket_mib * 2**20 // flat.grad.element_size())
    gradients = (flat.parameters, flat.grad, flat.offsets, world, buckets)
    clipping, limit, scale = config.gradient_clipping, config.max_grad_norm, loss_scale.value if loss_scale else None
    in_bf16, accumulation = config.gradient_reduction == "bf16", config.gradient_accumulation_steps
    sync: GradientReducer
    if clipping == "buckets" and limit is not None:
        sync = BucketClippingReducer(
            *gradients, max_norm=limit, accumulation=accumulation, loss_scale=scale, in_bf16=in_bf16
        )
    else:
        sync = GradientReducer(*gradients, limit if clipping == "before" else None, scale, in_bf16)
    return flat, methods.make(config, flat, ShardLayout.whole(flat.numel), sync.grad_norm), sync
