"""Build the recipe `mlbert.recipes.masked_lm_stored`."""

from __future__ import annotations

import functools

from mlbert.data.loading.config import DataConfig
from mlbert.data.loading.inputs import PreTrainingInputs
from mlbert.models.config import ModelConfig
from mlbert.models.objectives import MaskedLM
from mlbert.recipes import assembly, auto_precision
from mlbert.training.protocols import BuildContext, Method

choose_precision = auto_precision.choose_precision
prepare = assembly.prove_ops


def build(context: BuildContext, inputs: PreTrainingInputs) -> Method:
    """Return the method's objects. The data sets are not read before their ``open``."""
    model, compute = assembly.start_model(assembly.make_masked_lm, context, inputs.shape)
    config = context.config
    world = context.world
    update = assembly.build_replicated_update(config, model, world, "masked_lm_stored")
    global_batch_size = config[DataConfig].train_batch_size * world.world_size
    identity = {
        "model_implementation": config[ModelConfig].model_implementation,
        "global_batch_size": global_batch_size,  # on any number of ranks
    }
    return assembly.make_stored_method(
        context, inputs, compute, update, identity, model=model, objective=MaskedLM(scope="step")
    )


build_evaluation = functools.partial(
    assembly.build_stored_evaluation, assembly.make_masked_lm, MaskedLM
)
