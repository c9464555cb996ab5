"""Build the recipe `mlbert.recipes.masked_lm_stored`."""

from __future__ import annotations

import functools
from collections.abc import Callable

from mlbert.config.sections import Configuration
from mlbert.data.loading.config import DataConfig
from mlbert.data.loading.inputs import PreTrainingInputs
from mlbert.distributed.world import World
from mlbert.models.config import ModelConfig
from mlbert.models.objectives import MaskedLM
from mlbert.recipes import assembly
from mlbert.training.protocols import Method


def build(
    config: Configuration,
    found: PreTrainingInputs,
    world: World,
    seed: int,
    warn: Callable[[str], None],
) -> Method:
    """Return the method's objects. The data sets are not read before their ``open``."""
    model, compute = assembly.start_model(
        assembly.make_masked_lm, config, found.shape, world, seed, warn
    )
    update = assembly.build_replicated_update(config, model, world, "masked_lm_stored")
    identity = {
        "model_implementation": config[ModelConfig].model_implementation,
        "global_batch_size": config[DataConfig].train_batch_size
        * world.world_size,  # on any number of ranks
    }
    run = config, found, world, seed, compute
    return assembly.make_stored_method(
        *run, update, identity, model=model, objective=MaskedLM(scope="step")
    )


build_evaluation = functools.partial(
    assembly.build_stored_evaluation, assembly.make_masked_lm, MaskedLM
)
