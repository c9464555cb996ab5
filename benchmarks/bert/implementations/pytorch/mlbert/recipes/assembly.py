"""What the recipes' builds share: model and starting weights, evaluation, replicated update,
and the method's parts.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mlbert.config.batch_growth import BatchGrowth, Growth
from mlbert.config.bert_config import BertConfig
from mlbert.config.configuration import Configuration
from mlbert.data.formats.open import check_shape
from mlbert.data.loading.config import DataConfig
from mlbert.data.loading.inputs import PreTrainingInputs
from mlbert.data.loading.pretraining import EvalSet, budget_of, make_evaluation_set, make_source
from mlbert.data.loading.synthetic import SyntheticEvalSet
from mlbert.distributed.config import DistributedConfig
from mlbert.distributed.groups import exchange_group_size
from mlbert.distributed.reduce import GradientReducer, cut_buckets
from mlbert.distributed.sharding import ShardLayout
from mlbert.distributed.world import World
from mlbert.host import native
from mlbert.host.errors import UserError
from mlbert.models.bert import AnyBert, BertForMaskedLM, BertForPreTraining
from mlbert.models.config import ModelConfig
from mlbert.models.huggingface_model import HuggingFaceForMaskedLM
from mlbert.models.objectives import MaskedLM
from mlbert.models.weights.checkpoint_state import Report
from mlbert.models.weights.export import write_weights
from mlbert.models.weights.load import load_weights
from mlbert.ops import api as ops
from mlbert.ops import proof
from mlbert.ops.config import ComputeConfig
from mlbert.ops.cublaslt_tuning import tuned
from mlbert.ops.fp8_scaling import Products
from mlbert.ops.peak import gemm_peak_flops
from mlbert.ops.precision import compute_dtype, fp8_products
from mlbert.optim import optimizers, schedules
from mlbert.optim.config import OptimizerConfig, ScheduleConfig
from mlbert.optim.flat import FlatParameters
from mlbert.optim.loss_scale import LossScale
from mlbert.optim.optimizer import FlatOptimizer
from mlbert.recipes.model_shape import model_shape
from mlbert.training.config import EvaluationConfig, PhaseConfig
from mlbert.training.protocols import BuildContext, Method, Schedule

HUGGING_FACE = "huggingface"  # a value of MODEL_IMPLEMENTATION
AnyModel = TypeVar("AnyModel", bound=AnyBert)


@dataclass(frozen=True)
class Compute:
    """Precision and op implementations, selected by PRECISION and OPS.

    Attributes:
        dtype: of matrix products and activations.
        products: the encoder products that run in FP8, or None.
        precision: for the log, "torch.float32", "torch.bfloat16", "torch.float16",
            "fp8" or "fp8-forward".
        ops: for the log, JSON of op -> implementation.
            For Hugging Face's model only the loss is ours.
    """

    dtype: torch.dtype
    products: Products | None
    precision: str
    ops: str


def choose_compute(context: BuildContext) -> Compute:
    """Select the ops for this process.

    Raise UserError if the device or the model does not support the settings.
    """
    config = context.config[ComputeConfig]
    device = context.world.device
    warn = context.warn
    dtype = compute_dtype(context.precision, device)
    products = fp8_products(config.precision, device, config.fp8_fast_accumulation)
    chosen = ops.select(config.ops, device)
    if config.ops == "auto" and device.type == "cpu" and (problem := native.problem()):
        warn(f"warning: {problem}")
    if context.config[ModelConfig].model_implementation == HUGGING_FACE:
        if products:
            reason = "Hugging Face's model has no FP8 products"
            remedy = "Set PRECISION=bf16 or MODEL_IMPLEMENTATION=mlbert"
            raise UserError("config.conflict", f"PRECISION={config.precision}", reason, remedy)
        chosen = {"model": "transformers", "masked_cross_entropy": chosen["masked_cross_entropy"]}
    if products and device.type == "cpu":
        warn(f"PRECISION={config.precision} on a CPU is for tests: slower than bf16")
    return Compute(
        dtype, products, config.precision if products else str(dtype), json.dumps(chosen)
    )


def prove_ops(context: BuildContext, shape: BertConfig) -> None:
    """Prove the ops that the run will use; see `mlbert.ops.proof.prove`."""
    compute = context.config[ComputeConfig]
    world = context.world
    proof.prove(
        compute.ops, context.precision, shape, world.device, world.all_reduce_max, context.warn
    )


def start_weights(
    model: AnyModel,
    config: ModelConfig,
    seed: int,
    world: World,
    warn: Callable[[str], None],
    *,
    extend_context: bool = False,
) -> AnyModel:
    """Initialize the weights, move the model to the device, and load INIT_CHECKPOINT if it is set.

    All ranks call it together. With ``extend_context``, the checkpoint may have another rotary
    base.

    Raises:
        UserError: on rank 0, the checkpoint is missing, damaged, or has another shape.
    """
    model.initialize(seed)
    model.to(world.device)
    if config.init_checkpoint is not None:
        report = load_on_rank_0(model, config.init_checkpoint, world, extend_context)
        if report is not None:
            for line in report.warnings(config.init_checkpoint):
                warn(line)
    return model


def load_on_rank_0(
    model: AnyBert, checkpoint: str, world: World, extend_context: bool = False
) -> Report | None:
    """Load a checkpoint on rank 0 and send its weights to the others; return rank 0's report.

    All ranks call it together. Thousands of ranks that read one file at once would wait for it,
    and other machines need not have it.

    Raises:
        UserError: on rank 0, as `load_weights` does.
    """
    report = world.on_rank_0(
        "weights-reader", lambda: load_weights(model, checkpoint, extend_context)
    )
    for _, parameter in model.named_parameters():
        world.broadcast(parameter.detach())
    return report


MakeModel = Callable[[Configuration, BertConfig, Compute], AnyModel]


def make_pre_training(
    config: Configuration, shape: BertConfig, compute: Compute
) -> BertForPreTraining:
    """Return our model with both heads, uninitialized."""
    return BertForPreTraining(shape, compute.dtype, fp8_products=compute.products)


def make_masked_lm(
    config: Configuration, shape: BertConfig, compute: Compute
) -> BertForMaskedLM | HuggingFaceForMaskedLM:
    """Return an uninitialized masked-LM model.

    Hugging Face's pads all sequences to MAX_SEQ_LENGTH, or to the longest of the batch if that is
    none, and raises UserError as `HuggingFaceModel` does.
    """
    if config[ModelConfig].model_implementation == HUGGING_FACE:
        return HuggingFaceForMaskedLM(shape, compute.dtype, config[DataConfig].max_seq_length)
    return BertForMaskedLM(shape, compute.dtype, fp8_products=compute.products)


def start_model(
    make: MakeModel[AnyModel], context: BuildContext, shape: BertConfig
) -> tuple[AnyModel, Compute]:
    """Return a model with its starting weights, and how it computes.

    All ranks call it together. Raise UserError as `choose_compute` and `start_weights` do.
    """
    config = context.config
    compute = choose_compute(context)
    model = make(config, shape, compute)
    start_weights(
        model,
        config[ModelConfig],
        context.seed,
        context.world,
        context.warn,
        extend_context=config.or_defaults(PhaseConfig).extend_context,
    )
    return model, compute


def build_stored_evaluation(
    make: MakeModel[AnyModel], objective: type[MaskedLM], context: BuildContext
) -> tuple[AnyModel, MaskedLM, EvalSet | SyntheticEvalSet]:
    """Return model, objective and stored samples to evaluate the starting weights,
    without reading the training set.

    Raises:
        UserError: model, checkpoint or samples are missing, damaged, or do not match each other.
    """
    config = context.config
    model_config = config[ModelConfig]
    shape = model_shape(model_config)
    samples = _make_stored_evaluation_set(context, shape)
    if isinstance(samples, EvalSet):
        check_shape(samples.info, shape, model_config.bert_config_file)
    model, _ = start_model(make, context, shape)
    return model, objective(scope="step"), samples


def _make_stored_evaluation_set(
    context: BuildContext, shape: BertConfig
) -> EvalSet | SyntheticEvalSet:
    evaluation = context.config[EvaluationConfig]
    return make_evaluation_set(
        context.config[DataConfig],
        shape,
        num_examples=evaluation.num_eval_examples,
        batch_size=evaluation.eval_batch_size,
        seed=context.seed,
        rank=context.world.rank,
        world_size=context.world.world_size,
    )


class Update(NamedTuple):
    """How gradients become new weights: the fields of `Method` with these names."""

    flat: FlatParameters
    sync: GradientReducer
    optimizer: FlatOptimizer
    loss_scale: LossScale | None


def refuse_bucket_clipping(config: DistributedConfig) -> None:
    """Raise UserError if the settings clip each gradient bucket separately."""
    if config.gradient_clipping == "buckets":
        reason = "works only with RECIPE=ddp_adam"
        raise UserError(
            "config.conflict", "GRADIENT_CLIPPING=buckets", reason, "Set after or before"
        )


def build_replicated_update(
    config: Configuration,
    model: AnyBert,
    world: World,
    recipe: str,
    clip_buckets: Callable[..., GradientReducer] | None = None,
) -> Update:
    """Return an update that every rank makes of all weights.

    Gradients are clipped by global norm, or by bucket.

    Args:
        config: the run's settings.
        model: on its device.
        world: initialized.
        recipe: its name, for errors.
        clip_buckets: creates the reducer for GRADIENT_CLIPPING=buckets, if the recipe has one.

    Raises:
        UserError: the settings ask for a sharded optimizer,
            or for clipping by bucket without `clip_buckets`.
    """
    optimizer = config[OptimizerConfig]
    distributed = config[DistributedConfig]
    compute = config[ComputeConfig]
    for name, value in (("SHARDED_OPTIMIZER", "off"), ("WEIGHTS_ALLGATHER", "fp32")):
        if (given := getattr(distributed, name.lower())) != value:
            reason = f"with RECIPE={recipe}, every rank updates all parameters"
            raise UserError("config.conflict", f"{name}={given}", reason, f"Set {name}={value}")
    if clip_buckets is None:
        refuse_bucket_clipping(distributed)
    loss_scale = make_loss_scale(compute, world.device)
    flat = FlatParameters(model.ordered_parameters(), decayed=optimizers.decayed(optimizer))
    buckets = cut_buckets(
        flat.offsets, flat.numel, distributed.bucket_mib * 2**20 // flat.grad.element_size()
    )
    limit = optimizer.max_grad_norm
    options = reduction_options(config, loss_scale)
    if (
        clip_buckets is not None
        and distributed.gradient_clipping == "buckets"
        and limit is not None
    ):
        sync = clip_buckets(
            flat.parameters,
            flat.grad,
            flat.offsets,
            world,
            buckets,
            max_norm=limit,
            **options,
        )
    else:
        clip_before = limit if distributed.gradient_clipping == "before" else None
        sync = GradientReducer(
            flat.parameters, flat.grad, flat.offsets, world, buckets, clip_before, **options
        )
    layout = ShardLayout.whole(flat.numel)
    update = make_optimizer(config, flat, layout, sync.grad_norm)
    return Update(flat, sync, update, loss_scale)


def make_loss_scale(config: ComputeConfig, device: torch.device) -> LossScale | None:
    """Return the configured loss scale, or None unless PRECISION=fp16."""
    if config.precision != "fp16":
        return None
    return LossScale(config.loss_scale, config.loss_scale_window, device)


def make_optimizer(
    config: Configuration,
    flat: FlatParameters,
    layout: ShardLayout,
    known_norm: Tensor | None = None,
) -> FlatOptimizer:
    """Return the configured optimizer; arguments as in `mlbert.optim.optimizers.make`."""
    distributed = config[DistributedConfig]
    compute = config[ComputeConfig]
    return optimizers.make(
        config[OptimizerConfig],
        flat,
        layout,
        base_lr=config[ScheduleConfig].learning_rate,
        ops=compute.ops,
        precision=compute.precision,
        is_sharded=distributed.sharded_optimizer != "off",
        clipped_before=distributed.gradient_clipping != "after",
        gathered=distributed.weights_allgather,
        known_norm=known_norm,
    )


def reduction_options(config: Configuration, loss_scale: LossScale | None) -> dict[str, Any]:
    """Return the arguments of every gradient reducer:
    the loss scale, and whether gradients are sent in bfloat16.
    """
    in_bf16 = config[DistributedConfig].gradient_reduction == "bf16"
    return {"loss_scale": loss_scale.value if loss_scale else None, "in_bf16": in_bf16}


def make_method(
    context: BuildContext,
    inputs: Any,
    compute: Compute,
    update: Update,
    identity: Mapping[str, object],
    growth: Growth | None = None,
    **objects: Any,
) -> Method:
    """Return the method.

    Args:
        context, compute, update: of the run.
        inputs: `mlbert.training.protocols.Inputs`.
        identity: what a checkpoint of the recipe must match besides shape, optimizer,
            data and fixed settings.
        growth: of the batch, if it has a warm-up in steps: then the learning rate follows the
            sequences.
        objects: the other fields of `Method`.
    """
    config = context.config
    world = context.world
    same = {"model": inputs.shape.to_json(), "optimizer": update.optimizer.name}
    data = {"train_data": inputs.train_data, "eval_data": inputs.eval_data}
    fixed = config.fixed_on_resume()
    if "global_batch_size" in identity:
        fixed.pop("GRADIENT_STEPS", None)  # on more ranks, each has fewer parts of the batch
    schedule: Schedule = schedules.make(config[ScheduleConfig])
    counts_tokens = config.or_defaults(PhaseConfig).step_tokens is not None
    if isinstance(growth, BatchGrowth) and not growth.is_constant and not counts_tokens:
        schedule = schedules.InSequences.of(schedules.make(config[ScheduleConfig]), growth)
    return Method(
        **objects,
        **update._asdict(),
        schedule=schedule,
        precision=compute.precision,
        ops=compute.ops,
        identity={**same, **identity, **data, **fixed},
        peak_flops=functools.partial(gemm_peak_flops, objects["model"].dtype, world.device.type),
        tune=functools.partial(
            tuned, world.device, world.rank == 0, world.all_reduce_max, context.warn
        ),
    )


def make_stored_method(
    context: BuildContext,
    inputs: PreTrainingInputs,
    compute: Compute,
    update: Update,
    identity: Mapping[str, object],
    *,
    model: AnyBert,
    objective: MaskedLM,
) -> Method:
    """Return the method of a recipe that trains on stored samples, or synthetic ones; arguments as
    in `make_method`. The data sets are not read before their ``open``.
    """
    config = context.config
    world = context.world
    data = config[DataConfig]
    source = make_source(
        data,
        inputs.shape,
        seed=context.seed,
        rank=world.rank,
        world_size=world.world_size,
        group_size=exchange_group_size(data.exchange_padding, world),
        local=(world.local_rank, world.local_world_size),
    )
    evaluation = _make_stored_evaluation_set(context, inputs.shape)
    return make_method(
        context,
        inputs,
        compute,
        update,
        identity,
        model=model,
        objective=objective,
        source=source,
        evaluation=evaluation,
        static_shape=budget_of(data, source),
        export=functools.partial(
            write_weights, model, vocabulary=inputs.vocabulary, lower_case=inputs.lower_case
        ),
    )
