"""Build the recipe `mlbert.recipes.masked_lm_stored`."""

from __future__ import annotations

import functools
from collections.abc import Callable

from mlbert.config.bert_config import BertConfig
from mlbert.config.sections import Configuration
from mlbert.data.loading.config import DataConfig
from mlbert.data.loading.inputs import PreTrainingInputs
from mlbert.data.loading.pretraining import budget_of, make_evaluation_set, make_source
from mlbert.distributed.config import DistributedConfig
from mlbert.distributed.groups import exchange_group
from mlbert.distributed.world import World
from mlbert.models import assembly
from mlbert.models.assembly import Compute, build_replicated_optimizer, choose_compute, make_masked_lm, start_weights
from mlbert.models.bert import AnyBert
from mlbert.models.config import ModelConfig
from mlbert.models.objectives import MaskedLM
from mlbert.models.weights.export import write_weights
from mlbert.ops.config import ComputeConfig
from mlbert.optim import schedules
from mlbert.optim.config import OptimizerConfig, ScheduleConfig
from mlbert.optim.loss_scale import LossScale
from mlbert.training.config import EvaluationConfig
from mlbert.training.protocols import EvaluationSet, Method


def build(
    config: Configuration, found: PreTrainingInputs, world: World, seed: int, warn: Callable[[str], None]
) -> Method:
    """Return the method's objects. The data sets are not read before their ``open``."""
    data, model_config, schedule = config[DataConfig], config[ModelConfig], config[ScheduleConfig]
    compute = choose_compute(config[ComputeConfig], model_config, world.device, warn)
    model = make_masked_lm(model_config, data.max_seq_length, found.shape, compute)
    start_weights(model, model_config, seed, world.device, warn)
    loss_scale = LossScale.of(config[ComputeConfig], world.device)
    sections = config[OptimizerConfig], schedule.learning_rate, config[DistributedConfig], config[ComputeConfig]
    flat, optimizer, sync = build_replicated_optimizer(*sections, model, world, loss_scale, "masked_lm_stored")
    place = {"rank": world.rank, "world_size": world.world_size, "seed": seed}
    local = (world.local_rank, world.local_world_size)
    source = make_source(data, found.shape, **place, exchange=exchange_group(data, world), local=local)
    return Method(
        model=model,
        objective=MaskedLM(scope="step"),
        source=source,
        evaluation=make_evaluation_set(data, config[EvaluationConfig], found.shape, **place),
        flat=flat,
        sync=sync,
        optimizer=optimizer,
        schedule=schedules.make(schedule),
        static_shape=budget_of(data, source),
        precision=compute.precision,
        ops=compute.ops,
        identity={
            "model": found.shape.to_json(),
            "model_implementation": model_config.model_implementation,
            "optimizer": optimizer.name,
            "global_batch_size": data.train_batch_size * world.world_size,  # on any number of ranks
            "train_data": found.train_data,
            "eval_data": found.eval_data,
            **config.fixed_on_resume(),
        },
        export=functools.partial(write_weights, model, vocabulary=found.vocabulary),
        loss_scale=loss_scale,
    )


def build_evaluation(
    config: Configuration, world: World, seed: int, warn: Callable[[str], None]
) -> tuple[AnyBert, MaskedLM, EvaluationSet]:
    """See `mlbert.models.assembly.build_evaluation`."""
    model_config, data = config[ModelConfig], config[DataConfig]

    def make_model(shape: BertConfig, compute: Compute) -> AnyBert:
        return make_masked_lm(model_config, data.max_seq_length, shape, compute)

    sections = model_config, data, config[EvaluationConfig], config[ComputeConfig]
    return assembly.build_evaluation(*sections, world, seed, warn, make_model, MaskedLM)
