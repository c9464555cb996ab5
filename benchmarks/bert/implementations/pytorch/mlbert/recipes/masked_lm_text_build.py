"""Build the recipe `mlbert.recipes.masked_lm_text`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

from mlbert.config.sections import Configuration
from mlbert.data.loading import text_run
from mlbert.data.loading.config import CorpusConfig, DataConfig, TextConfig
from mlbert.data.loading.inputs import PreTrainingInputs
from mlbert.distributed.config import DistributedConfig
from mlbert.distributed.world import World
from mlbert.models.assembly import build_replicated_optimizer, choose_compute, make_masked_lm, start_weights
from mlbert.models.bert import AnyBert, begin_with_frequencies
from mlbert.models.config import ModelConfig
from mlbert.models.objectives import MaskedLM
from mlbert.models.weights.export import write_weights
from mlbert.models.weights.huggingface import to_huggingface
from mlbert.models.weights.weight_files import write_composer
from mlbert.ops.config import ComputeConfig
from mlbert.optim import schedules
from mlbert.optim.config import OptimizerConfig, ScheduleConfig
from mlbert.optim.loss_scale import LossScale
from mlbert.training.config import EvaluationConfig, RunConfig
from mlbert.training.protocols import EvaluationSet, Method


def build(
    config: Configuration, found: PreTrainingInputs, world: World, seed: int, warn: Callable[[str], None]
) -> Method:
    """Return the method's objects. The data sets are not read before their ``open``, except that a ModernBERT-style
    model is initialized from the token frequencies of the first training texts."""
    data, model_config, schedule = config[DataConfig], config[ModelConfig], config[ScheduleConfig]
    texts = data, config[TextConfig], config[CorpusConfig]
    compute = choose_compute(config[ComputeConfig], model_config, world.device, warn)
    model = make_masked_lm(model_config, data.max_seq_length, found.shape, compute)
    start_weights(model, model_config, seed, world.device, warn)
    if found.shape.is_rotary and model_config.init_checkpoint is None:
        begin_with_frequencies(model, text_run.token_counts(*texts))
    loss_scale = LossScale.of(config[ComputeConfig], world.device)
    sections = config[OptimizerConfig], schedule.learning_rate, config[DistributedConfig], config[ComputeConfig]
    flat, optimizer, sync = build_replicated_optimizer(*sections, model, world, loss_scale, "masked_lm_text")
    return Method(
        model=model,
        objective=MaskedLM(scope="step"),
        source=text_run.make_source(
            *texts, schedule.max_steps, rank=world.rank, world_size=world.world_size, seed=seed
        ),
        evaluation=text_run.make_evaluation_set(
            *texts, config[EvaluationConfig], rank=world.rank, world_size=world.world_size
        ),
        flat=flat,
        sync=sync,
        optimizer=optimizer,
        schedule=schedules.make(schedule),
        static_shape=text_run.budget_of(data, config[CorpusConfig]),
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
        export=functools.partial(_export, config[RunConfig].output_dir, model, found.vocabulary),
        loss_scale=loss_scale,
    )


def _export(
    output_dir: Path, model: AnyBert, vocabulary: Path | None, folder: Path, facts: Mapping[str, object]
) -> None:
    """Write the weights, and LOGDIR/latest-rank0.pt if Composer's programs can load this model."""
    write_weights(model, folder, facts, vocabulary)
    if not model.config.is_rotary:
        write_composer(to_huggingface(model), model.config, output_dir / "latest-rank0.pt")


def build_evaluation(
    config: Configuration, world: World, seed: int, warn: Callable[[str], None]
) -> tuple[AnyBert, MaskedLM, EvaluationSet]:
    """Return the model, objective and evaluation set. The training set is not read."""
    data, model_config = config[DataConfig], config[ModelConfig]
    texts = data, config[TextConfig], config[CorpusConfig]
    shape = text_run.inspect(model_config, *texts).shape
    samples = text_run.make_evaluation_set(
        *texts, config[EvaluationConfig], rank=world.rank, world_size=world.world_size
    )
    compute = choose_compute(config[ComputeConfig], model_config, world.device, warn)
    model = make_masked_lm(model_config, data.max_seq_length, shape, compute)
    return start_weights(model, model_config, seed, world.device, warn), MaskedLM(scope="step"), samples
