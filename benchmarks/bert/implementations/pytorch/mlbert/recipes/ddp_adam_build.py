"""Build the recipe `mlbert.recipes.ddp_adam`."""

from __future__ import annotations

import functools

from mlbert.data.loading.config import DataConfig
from mlbert.data.loading.inputs import PreTrainingInputs
from mlbert.distributed.bucket_clipping import BucketClippingReducer
from mlbert.models.objectives import PreTraining
from mlbert.recipes import assembly, auto_precision
from mlbert.training.protocols import BuildContext, Method

choose_precision = auto_precision.choose_precision
prepare = assembly.prove_ops


def build(context: BuildContext, inputs: PreTrainingInputs) -> Method:
    """Return the method's objects. The data sets are not read before their ``open``."""
    config = context.config
    world = context.world
    data = config[DataConfig]
    objective = PreTraining(scope="rank")
    model, compute = assembly.start_model(assembly.make_pre_training, context, inputs.shape)
    clip_buckets = functools.partial(
        BucketClippingReducer, accumulation=data.gradient_accumulation_steps
    )
    update = assembly.build_replicated_update(config, model, world, "ddp_adam", clip_buckets)
    identity = {"train_batch_size": data.train_batch_size, "ranks": world.world_size}
    return assembly.make_stored_method(
        context, inputs, compute, update, identity, model=model, objective=objective
    )


build_evaluation = functools.partial(
    assembly.build_stored_evaluation, assembly.make_pre_training, PreTraining
)
