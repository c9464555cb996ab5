"""Masked-LM only, on stored samples: MosaicML's entries to MLPerf Training v2.1 (open division).

    benchmarks/bert/implementations/composer/run_and_time.sh -c methods      (or: mlbert train --config config.yaml)

* model      MODEL_IMPLEMENTATION: our unpadded encoder, or Hugging Face's padded one; no pooler, no next-sentence head
* loss       mean over all masked tokens of the step; next-sentence labels are not read
* update     decoupled AdamW with decay on every tensor (DECAY_ALL); the gradient is not clipped
* rate       a ramp, then a multiplier for each milestone passed; the second update repeats the first one's rate, 0, as
             Composer's schedulers do (LR_FIRST_STEP=-1)
* data       samples that were masked when they were made, at whatever rate; one sequence a row

Dropout is the shape's: MODEL_OPTIONS switches it off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from mlbert.core import schedules
from mlbert.core.errors import UserError
from mlbert.core.settings import TrainConfig
from mlbert.dist.groups import exchange_group
from mlbert.dist.reduce import GradientReducer, cut_buckets
from mlbert.dist.sharding import ShardLayout
from mlbert.dist.world import World
from mlbert.feed.evaluation import EvalSet
from mlbert.feed.inputs import PreTrainingInputs, inspect
from mlbert.feed.pretraining import budget_of, make_evaluation_set, make_source
from mlbert.feed.synthetic import SyntheticEvalSet
from mlbert.models import evaluation
from mlbert.models.bert import AnyBert, BertForMaskedLM
from mlbert.models.choose import make_masked_lm
from mlbert.models.export import write_weights
from mlbert.models.huggingface_model import HuggingFaceForMaskedLM
from mlbert.models.objectives import MaskedLM
from mlbert.models.start import choose_compute, start_weights
from mlbert.optim import methods
from mlbert.optim.base import FlatOptimizer
from mlbert.optim.flat import FlatParameters
from mlbert.optim.loss_scale import LossScale
from mlbert.train.protocols import Method

__all__ = ["DEFAULTS", "build", "build_evaluation", "inspect"]

DEFAULTS: Mapping[str, object] = {
    "recipe": "masked_lm",
    "model_implementation": "mlbert",
    "model_options": None,
    "data_reader": "auto",
    "init_checkpoint": None,
    "gradient_accumulation_steps": 1,
    "average_packing_rate": 1.0,
    "max_sequences_per_pack": 1,
    "bin_counts": None,
    "exchange_padding": "off",
    "exchange_by": "lengths",
    "max_seconds": None,
    "warmup_steps": 0,
    "warmup_proportion": None,
    "start_warmup_step": 0,
    "schedule": "multistep",
    "poly_power": 1.0,
    "end_lr": None,
    "lr_decay_end": None,
    "lr_decay_steps": None,
    "lr_milestones": None,
    "lr_gamma": None,
    "lr_first_step": -1,
    "optimizer": "decoupled_adamw",
    "opt_epsilon": 1e-6,
    "decay_all": True,
    "max_grad_norm": None,
    "gradient_clipping": "after",
    "bucket_mib": 25,
    "optimizer_implementation": "ops",
    "sharded_optimizer": "off",
    "weights_allgather": "fp32",
    "seed": None,
    "target_mlm_accuracy": 0.720,
    "num_eval_examples": 10_000,
    "eval_batch_size": 16,
    "precision": "auto",
    "loss_scale": 131072.0,
    "loss_scale_window": 2000,
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
    model = start_weights(make_masked_lm(config, inputs.shape, compute), config, seed, world.device, warn)
    loss_scale = LossScale.of(config, world.device)
    flat, optimizer, sync = _update(config, model, world, loss_scale)
    place = {"seed": seed, "rank": world.rank, "world_size": world.world_size}
    source = make_source(config, inputs.shape, **place, exchange=exchange_group(config, world))
    return Method(
        model=model,
        objective=MaskedLM(scope="step"),
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
            "model_implementation": config.model_implementation,
            "optimizer": optimizer.name,
            "train_batch_size": config.train_batch_size,
            "train_data": inputs.train_data,
            "eval_data": inputs.eval_data,
        },
        export=functools.partial(write_weights, model, vocabulary=inputs.vocabulary),
        loss_scale=loss_scale,
    )


def build_evaluation(
    config: TrainConfig, world: World, seed: int, warn: Callable[[str], None]
) -> tuple[AnyBert, MaskedLM, EvalSet | SyntheticEvalSet]:
    """See `mlbert.models.evaluation.build_evaluation`."""
    return evaluation.build_evaluation(config, world, seed, warn, make_masked_lm, MaskedLM)


def _update(
    config: TrainConfig,
    model: BertForMaskedLM | HuggingFaceForMaskedLM,
    world: World,
    loss_scale: LossScale | None,
) -> tuple[FlatParameters, FlatOptimizer, GradientReducer]:
    """Flat buffers, the optimizer on them and the reduction of their gradients over the ranks."""
    for name, value in (("SHARDED_OPTIMIZER", "off"), ("WEIGHTS_ALLGATHER", "fp32")):
        if (given := getattr(config, name.lower())) != value:
            raise UserError(f"{name}={given}", "every rank of masked_lm updates everything", f"Set {name}={value}")
    if config.gradient_clipping == "buckets":
        raise UserError("GRADIENT_CLIPPING=buckets", "is the way of RECIPE=ddp_adam", "Set after or before")
    flat = FlatParameters(model.ordered_parameters(), decayed=methods.decayed(config))
    buckets = cut_buckets(flat.offsets, flat.numel, config.bucket_mib * 2**20 // flat.grad.element_size())
    clip_before = config.max_grad_norm if config.gradient_clipping == "before" else None
    scale = loss_scale.value if loss_scale else None
    sync = GradientReducer(flat.parameters, flat.grad, flat.offsets, world, buckets, clip_before, scale)
    return flat, methods.make(config, flat, ShardLayout.whole(flat.numel)), sync
