"""Build the recipe `mlbert.recipes.masked_lm_text`."""

from __future__ import annotations

import functools
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from mlbert.config.batch_growth import growth_of
from mlbert.data.loading import text_run
from mlbert.data.loading.config import CorpusConfig, DataConfig, TextConfig
from mlbert.data.loading.inputs import PreTrainingInputs
from mlbert.distributed.world import World
from mlbert.models.bert import AnyBert, begin_with_frequencies
from mlbert.models.config import ModelConfig
from mlbert.models.objectives import MaskedLM
from mlbert.models.weights.export import write_weights
from mlbert.models.weights.huggingface import to_huggingface
from mlbert.models.weights.weight_files import composer_obstacle, write_composer
from mlbert.optim.config import ScheduleConfig
from mlbert.recipes import assembly, auto_precision
from mlbert.recipes.inspection import inspect_text
from mlbert.runs.config import RunConfig
from mlbert.training.config import EvaluationConfig
from mlbert.training.protocols import BuildContext, EvaluationSet, Method

choose_precision = auto_precision.choose_precision
prepare = assembly.prove_ops


def build(context: BuildContext, inputs: PreTrainingInputs) -> Method:
    """Return the method's objects.

    The data sets are not read before their ``open``, except that a ModernBERT-style model is
    initialized from the token frequencies of the first training texts.
    """
    config = context.config
    world = context.world
    model_config = config[ModelConfig]
    data = config[DataConfig]
    text = config[TextConfig]
    corpus = config[CorpusConfig]
    model, compute = assembly.start_model(assembly.make_masked_lm, context, inputs.shape)
    if inputs.shape.starts_from_text and model_config.init_checkpoint is None:
        begin_with_frequencies(model, text_run.token_counts(data, text, corpus))
    update = assembly.build_replicated_update(config, model, world, "masked_lm_text")
    identity = {
        "model_implementation": model_config.model_implementation,
        "global_batch_size": data.train_batch_size * world.world_size,  # on any number of ranks
    }

    def sum_over_ranks(rows: np.ndarray) -> np.ndarray:
        return world.all_reduce_sum(torch.from_numpy(rows)).numpy()

    growth = growth_of(config)
    source = text_run.make_source(
        data,
        text,
        corpus,
        growth,
        config[ScheduleConfig].max_steps,
        seed=context.seed,
        sum_over_ranks=sum_over_ranks,
        local=(world.local_rank, world.local_world_size),
        warn=functools.partial(_warn_once, world, context.warn),
        rank=world.rank,
        world_size=world.world_size,
    )
    return assembly.make_method(
        context,
        inputs,
        compute,
        update,
        identity,
        growth=growth,
        model=model,
        objective=MaskedLM(scope="step"),
        source=source,
        evaluation=_evaluation_set(context),
        static_shape=text_run.budget_of(data, corpus),
        export=functools.partial(_export, config[RunConfig].output_dir, model, inputs.vocabulary),
    )


def _warn_once(world: World, warn: Callable[[str], object], line: str) -> None:
    """Print a warning about this machine's disk, which other machines may share."""
    if not world.rendezvous.is_first(line):
        return
    if world.rank == 0:
        warn(line)
    else:
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
    shape = model.config
    if not shape.starts_from_text and (shape.is_rotary or composer_obstacle(shape) is None):
        write_composer(to_huggingface(model), model.config, output_dir / "latest-rank0.pt")


def _evaluation_set(context: BuildContext) -> EvaluationSet:
    config = context.config
    evaluation = config[EvaluationConfig]
    return text_run.make_evaluation_set(
        config[DataConfig],
        config[TextConfig],
        config[CorpusConfig],
        num_examples=evaluation.num_eval_examples,
        batch_size=evaluation.eval_batch_size,
        rank=context.world.rank,
        world_size=context.world.world_size,
    )


def build_evaluation(context: BuildContext) -> tuple[AnyBert, MaskedLM, EvaluationSet]:
    """Return the model, objective and evaluation set. The training set is not read."""
    config = context.config
    inputs = inspect_text(config)
    samples = _evaluation_set(context)
    model, _ = assembly.start_model(assembly.make_masked_lm, context, inputs.shape)
    return model, MaskedLM(scope="step"), samples
