"""Packed LAMB: the MLPerf benchmark's method on packed samples.

    source config_<system>.sh && sbatch -N ${DGXNNODES} -t ${WALLTIME} run.sub      (or launch/run_and_time.sh)

Up to MAX_SEQUENCES_PER_PACK sequences share a row of max_seq_length tokens; attention never crosses a sequence. LAMB
with bias correction, the gradient clipped to global norm 1.0 (CLIP_AFTER_ALLREDUCE: when), no decay and no trust ratio
for biases and LayerNorm, polynomial decay counted from step 0. The loss is the mean over all masked tokens of the step
plus the mean over all its sequences, so that ranks and accumulation steps do not change it.

On the benchmark's data (BERT-large, from the phase-1 checkpoint) the goal is masked-LM accuracy 0.720, which the
reference reaches after about 2.4 million samples at batch 448. On the text that Python carries (demo configuration,
2 CPU cores) see the README for the target and the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mlbert.core import schedules
from mlbert.core.errors import UserError
from mlbert.core.settings import TrainConfig
from mlbert.dist.groups import ShardGroups
from mlbert.dist.reduce import GradientReducer
from mlbert.dist.sharding import ShardedReducer, ShardLayout
from mlbert.dist.world import World
from mlbert.feed.budget import MASKED_SHARE, Budget
from mlbert.feed.dali import DaliSource
from mlbert.feed.evaluation import EvalSet
from mlbert.feed.packed import PackedSource
from mlbert.feed.synthetic import SyntheticEvalSet, SyntheticSource
from mlbert.models import BertConfig, BertForPreTraining
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb
from mlbert.optim.sharded_lamb import ShardedLamb
from mlbert.store.order import contiguous
from mlbert.train.experiment import Method

REDUCTION_BUCKET_BYTES = 25 * 2**20

DEFAULTS: Mapping[str, object] = {
    "recipe": "packed_lamb",
    "data_reader": "auto",
    "init_checkpoint": None,
    "gradient_accumulation_steps": 1,
    "max_sequences_per_pack": 3,
    "max_seconds": None,
    "warmup_steps": 0,
    "warmup_proportion": None,
    "start_warmup_step": 0,
    "poly_power": 1.0,
    "opt_epsilon": 1e-6,
    "max_grad_norm": 1.0,
    "clip_after_allreduce": True,
    "optimizer_implementation": "ops",
    "sharded_optimizer": "off",
    "weights_allgather": "fp32",
    "seed": None,
    "target_mlm_accuracy": 0.720,
    "num_eval_examples": 10_000,
    "eval_batch_size": 16,
    "precision": "auto",
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


def build(config: TrainConfig, shape: BertConfig, model: BertForPreTraining, world: World, seed: int) -> Method:
    """The method's objects; nothing of the data set is touched before their ``open``."""
    flat, optimizer, reducer = _update(config, model, world)
    source, samples = _source(config, shape, world, seed), evaluation_set(config, shape, world, seed)

    def schedule(step: int) -> float:
        return schedules.polynomial_with_warmup(
            step,
            config.learning_rate,
            config.num_warmup_steps,
            config.start_warmup_step,
            config.max_steps,
            config.poly_power,
        )

    return Method(flat, source, samples, reducer, optimizer, schedule, opt_name="lamb", budget=_budget(config, source))


def _update(
    config: TrainConfig, model: BertForPreTraining, world: World
) -> tuple[FlatParameters, Lamb | ShardedLamb, GradientReducer]:
    """Flat buffers, the optimizer on them and the reduction of their gradients over the ranks."""
    clip_before = None if config.clip_after_allreduce else config.max_grad_norm
    settings: dict[str, Any] = {
        "betas": (config.opt_lamb_beta_1, config.opt_lamb_beta_2),
        "eps": config.opt_epsilon,
        "weight_decay": config.weight_decay_rate,
        "max_grad_norm": None if clip_before else config.max_grad_norm,
        "implementation": optimizer_implementation(config),
    }
    if config.sharded_optimizer != "off":
        in_nodes = config.sharded_optimizer == "node"
        groups = ShardGroups.inside_nodes(world) if in_nodes else ShardGroups.all_ranks(world)
        flat = FlatParameters(model.ordered_parameters(), ShardLayout.multiple(groups))
        layout = ShardLayout(flat.padded_data.numel(), groups, REDUCTION_BUCKET_BYTES // flat.data.element_size())
        sharded = ShardedLamb(flat, layout, **settings, gathered=config.weights_allgather)
        grad = flat.padded_grad
        return flat, sharded, ShardedReducer(flat.parameters, grad, flat.offsets, world, layout, clip_before)
    if config.weights_allgather != "fp32":
        setting = f"WEIGHTS_ALLGATHER={config.weights_allgather}"
        raise UserError(setting, "weights travel only where the optimizer is sharded", "Set SHARDED_OPTIMIZER=node")
    flat = FlatParameters(model.ordered_parameters())
    optimizer = Lamb(flat, **settings)
    reducer = GradientReducer(flat.parameters, flat.grad, flat.offsets, world, REDUCTION_BUCKET_BYTES, clip_before)
    return flat, optimizer, reducer


def optimizer_implementation(config: TrainConfig) -> str:
    """The form of the optimizer: what OPTIMIZER_IMPLEMENTATION names, or the one that goes with OPS."""
    if config.optimizer_implementation != "ops":
        return config.optimizer_implementation
    return config.ops if config.ops in ("auto", "plain", "native") else "triton"  # the others name parts of the model


def evaluation_set(config: TrainConfig, shape: BertConfig, world: World, seed: int) -> EvalSet | SyntheticEvalSet:
    """This rank's share of the evaluation samples; the training set is not needed."""
    if config.synthetic_data:
        return SyntheticEvalSet(_synthetic_source(config, shape, world, seed))
    return EvalSet(
        config.eval_dir,
        config.num_eval_examples,
        config.eval_batch_size,
        max_sequences_per_pack=config.max_sequences_per_pack,
        rank=world.rank,
        world_size=world.world_size,
        vocab_size=shape.vocab_size,
    )


def _source(config: TrainConfig, shape: BertConfig, world: World, seed: int) -> PackedSource | SyntheticSource:
    if config.synthetic_data:
        return _synthetic_source(config, shape, world, seed)
    source = DaliSource if config.data_reader == "dali" else PackedSource
    return source(
        config.input_dir,
        packs_per_step=config.train_batch_size,
        accumulation=config.gradient_accumulation_steps,
        max_sequences_per_pack=config.max_sequences_per_pack,
        seed=seed,
        rank=world.rank,
        world_size=world.world_size,
        deal=contiguous,
        vocab_size=shape.vocab_size,
    )


def _budget(config: TrainConfig, source: PackedSource | SyntheticSource) -> Budget:
    """What a micro-batch holds at most."""
    if isinstance(source, SyntheticSource):
        longest, predictions = source.max_tokens, math.ceil(MASKED_SHARE * source.max_tokens)
    else:
        longest, predictions = source.info.max_seq_length, source.info.max_predictions
    packs = config.train_batch_size // config.gradient_accumulation_steps
    return Budget.of_packs(packs, source.max_tokens, config.max_sequences_per_pack, longest, predictions)


def _synthetic_source(config: TrainConfig, shape: BertConfig, world: World, seed: int) -> SyntheticSource:
    return SyntheticSource(
        packs_per_step=config.train_batch_size,
        accumulation=config.gradient_accumulation_steps,
        max_sequences_per_pack=config.max_sequences_per_pack,
        vocab_size=shape.vocab_size,
        max_tokens=shape.max_position_embeddings,
        seed=seed,
        rank=world.rank,
        world_size=world.world_size,
    )
