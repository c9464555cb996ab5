"""Build the recipe `mlbert.recipes.masked_lm_text`."""

from __future__ import annotations

import functools
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlbert.config.sections import Configuration
from mlbert.data.loading import text_run
from mlbert.data.loading.config import CorpusConfig, DataConfig, TextConfig
from mlbert.data.loading.inputs import PreTrainingInputs
from mlbert.distributed.world import World
from mlbert.models.bert import AnyBert, begin_with_frequencies
from mlbert.models.config import ModelConfig
from mlbert.models.objectives import MaskedLM
from mlbert.models.weights.export import write_weights
from mlbert.models.weights.huggingface import to_huggingface
from mlbert.models.weights.weight_files import write_composer
from mlbert.optim.config import ScheduleConfig
from mlbert.recipes import assembly
from mlbert.training.config import EvaluationConfig, RunConfig
from mlbert.training.protocols import EvaluationSet, Method


def build(
    config: Configuration,
    found: PreTrainingInputs,
    world: World,
    seed: int,
    warn: Callable[[str], None],
) -> Method:
    """Return the method's objects. The data sets are not read before their ``open``, except that a ModernBERT-style
    model is initialized from the token frequencies of the first training texts."""
    data = config[DataConfig]
    model_config = config[ModelConfig]
    texts = data, config[TextConfig], config[CorpusConfig]
    model, compute = assembly.start_model(
        assembly.make_masked_lm, config, found.shape, world, seed, warn
    )
    if found.shape.is_rotary and model_config.init_checkpoint is None:
        begin_with_frequencies(model, text_run.token_counts(*texts))
    update = assembly.build_replicated_update(config, model, world, "masked_lm_text")
    identity = {
        "model_implementation": model_config.model_implementation,
        "global_batch_size": data.train_batch_size * world.world_size,  # on any number of ranks
    }
    evaluation = config[EvaluationConfig]
    place = dict[str, Any](rank=world.rank, world_size=world.world_size)

    def sum_over_ranks(rows: np.ndarray) -> np.ndarray:
        return world.all_reduce_sum(torch.from_numpy(rows)).numpy()

    return assembly.make_method(
        config,
        found,
        compute,
        update,
        identity,
        model=model,
        objective=MaskedLM(scope="step"),
        source=text_run.make_source(
            *texts,
            config[ScheduleConfig].max_steps,
            seed=seed,
            sum_over_ranks=sum_over_ranks,
            local=(world.local_rank, world.local_world_size),
            warn=warn if world.rank == 0 else _print_warning,
            **place,
        ),
        evaluation=text_run.make_evaluation_set(*texts, evaluation, **place),
        static_shape=text_run.budget_of(data, config[CorpusConfig]),
        export=functools.partial(_export, config[RunConfig].output_dir, model, found.vocabulary),
    )


def _print_warning(line: str) -> None:
    """Print a warning about this machine's disk, which rank 0 does not see."""
    print(f"{socket.gethostname()}: {line}", file=sys.stderr, flush=True)


def _export(
    output_dir: Path,
    model: AnyBert,
    vocabulary: Path | None,
    folder: Path,
    facts: Mapping[str, object],
) -> None:
    """Write the weights, and LOGDIR/latest-rank0.pt if Composer's programs can load this model."""
    write_weights(model, folder, facts, vocabulary)
    if not model.config.is_rotary:
        write_composer(to_huggingface(model), model.config, output_dir / "latest-rank0.pt")


def build_evaluation(
    config: Configuration, world: World, seed: int, warn: Callable[[str], None]
) -> tuple[AnyBert, MaskedLM, EvaluationSet]:
    """Return the model, objective and evaluation set. The training set is not read."""
    texts = config[DataConfig], config[TextConfig], config[CorpusConfig]
    shape = text_run.inspect(config[ModelConfig], *texts).shape
    rank = world.rank
    world_size = world.world_size
    samples = text_run.make_evaluation_set(
        *texts, config[EvaluationConfig], rank=rank, world_size=world_size
    )
    model, _ = assembly.start_model(assembly.make_masked_lm, config, shape, world, seed, warn)
    return model, MaskedLM(scope="step"), samples
