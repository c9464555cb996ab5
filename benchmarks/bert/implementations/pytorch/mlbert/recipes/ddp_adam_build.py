"""Build the recipe `mlbert.recipes.ddp_adam`."""

from __future__ import annotations

import functools
from collections.abc import Callable

from mlbert.config.sections import Configuration
from mlbert.data.loading.config import DataConfig
from mlbert.data.loading.inputs import PreTrainingInputs
from mlbert.distributed.bucket_clipping import BucketClippingReducer
from mlbert.distributed.world import World
from mlbert.models.objectives import PreTraining
from mlbert.recipes import assembly
from mlbert.training.protocols import Method


def build(
    config: Configuration,
    inputs: PreTrainingInputs,
    world: World,
    seed: int,
    warn: Callable[[str], None],
) -> Method:
    """Return the method's objects. The data sets are not read before their ``open``."""
    data = config[DataConfig]
    objective = PreTraining(scope="rank")
    model, compute = assembly.start_model(
        assembly.make_pre_training, config, inputs.shape, world, seed, warn
    )
    clip_buckets = functools.partial(
        BucketClippingReducer, accumulation=data.gradient_accumulation_steps
    )
    update = assembly.build_replicated_update(config, model, world, "ddp_adam", clip_buckets)
    identity = {"train_batch_size": data.train_batch_size, "ranks": world.world_size}
    run = config, inputs, world, seed, compute
    return assembly.make_stored_method(*run, update, identity, model=model, objective=objective)


build_evaluation = functools.partial(
    assembly.build_stored_evaluation, assembly.make_pre_training, PreTraining
)
