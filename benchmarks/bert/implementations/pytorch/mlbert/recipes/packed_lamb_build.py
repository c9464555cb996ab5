"""Build the recipe `mlbert.recipes.packed_lamb`."""

from __future__ import annotations

import functools

from mlbert.config.configuration import Configuration
from mlbert.data.loading.config import DataConfig
from mlbert.data.loading.inputs import PreTrainingInputs
from mlbert.distributed.config import DistributedConfig
from mlbert.distributed.groups import ShardGroups
from mlbert.distributed.sharding import ShardedReducer, ShardLayout
from mlbert.distributed.world import World
from mlbert.host.errors import UserError
from mlbert.models.bert import BertForPreTraining
from mlbert.models.objectives import PreTraining
from mlbert.ops.config import ComputeConfig
from mlbert.optim import optimizers
from mlbert.optim.config import OptimizerConfig
from mlbert.optim.flat import FlatParameters
from mlbert.recipes import assembly, auto_precision
from mlbert.recipes.assembly import Update
from mlbert.training.protocols import BuildContext, Method

choose_precision = auto_precision.choose_precision
prepare = assembly.prove_ops


def build(context: BuildContext, inputs: PreTrainingInputs) -> Method:
    """Return the method's objects. The data sets are not read before their ``open``."""
    model, compute = assembly.start_model(assembly.make_pre_training, context, inputs.shape)
    update = _update(context.config, model, context.world)
    objective = PreTraining(scope="step")
    identity = _identity(context)
    return assembly.make_stored_method(
        context, inputs, compute, update, identity, model=model, objective=objective
    )


def _identity(context: BuildContext) -> dict[str, object]:
    """Return what a resumed run must have of the batch: of all ranks, unless each one clips its own
    gradient.
    """
    batch = context.config[DataConfig].train_batch_size
    ranks = context.world.world_size
    is_clipped = context.config[OptimizerConfig].max_grad_norm is not None
    if is_clipped and context.config[DistributedConfig].gradient_clipping == "before":
        return {"train_batch_size": batch, "ranks": ranks}
    return {"global_batch_size": batch * ranks}


build_evaluation = functools.partial(
    assembly.build_stored_evaluation, assembly.make_pre_training, PreTraining
)


def _update(config: Configuration, model: BertForPreTraining, world: World) -> Update:
    """Return the update, by every rank or sharded."""
    optimizer = config[OptimizerConfig]
    distributed = config[DistributedConfig]
    if distributed.sharded_optimizer == "off":
        if distributed.weights_allgather != "fp32":
            setting = f"WEIGHTS_ALLGATHER={distributed.weights_allgather}"
            reason = "weights are sent between ranks only if the optimizer is sharded"
            raise UserError("config.conflict", setting, reason, "Set SHARDED_OPTIMIZER=node")
        return assembly.build_replicated_update(config, model, world, "packed_lamb")
    assembly.refuse_bucket_clipping(distributed)
    loss_scale = assembly.make_loss_scale(config[ComputeConfig], world.device)
    groups = ShardGroups.of(distributed.sharded_optimizer, world)
    flat = FlatParameters(
        model.ordered_parameters(), ShardLayout.multiple(groups), optimizers.decayed(optimizer)
    )
    grad = flat.padded_grad
    layout = ShardLayout(
        grad.numel(), groups, distributed.bucket_mib * 2**20 // grad.element_size()
    )
    clip_before = optimizer.max_grad_norm if distributed.gradient_clipping == "before" else None
    options = assembly.reduction_options(config, loss_scale)
    sync = ShardedReducer(
        flat.parameters, grad, flat.offsets, world, layout, clip_before, **options
    )
    update = assembly.make_optimizer(config, flat, layout)
    return Update(flat, sync, update, loss_scale)
