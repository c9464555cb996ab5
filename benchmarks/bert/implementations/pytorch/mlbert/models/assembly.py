"""Build the model, the evaluation and the replicated optimizer of a run from its settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.open import check_shape
from mlbert.data.loading.config import DataConfig
from mlbert.data.loading.pretraining import EvalSet, make_evaluation_set
from mlbert.data.loading.synthetic import SyntheticEvalSet
from mlbert.distributed.config import DistributedConfig
from mlbert.distributed.reduce import GradientReducer, cut_buckets
from mlbert.distributed.sharding import ShardLayout
from mlbert.distributed.world import World
from mlbert.host import native
from mlbert.host.errors import UserError
from mlbert.models.bert import AnyBert, BertForMaskedLM, BertForPreTraining, BertForSequenceClassification
from mlbert.models.config import ModelConfig
from mlbert.models.huggingface_model import HuggingFaceForMaskedLM, HuggingFaceForSequenceClassification
from mlbert.models.objectives import MaskedLM, PreTraining
from mlbert.models.weights.load import load_weights
from mlbert.ops import api as ops
from mlbert.ops.config import ComputeConfig
from mlbert.ops.fp8_scaling import Products
from mlbert.ops.precision import compute_dtype, fp8_products
from mlbert.optim import optimizers as methods
from mlbert.optim.config import OptimizerConfig
from mlbert.optim.flat import FlatParameters
from mlbert.optim.loss_scale import LossScale
from mlbert.optim.optimizer import FlatOptimizer
from mlbert.training.config import EvaluationConfig

HUGGING_FACE = "huggingface"  # a value of MODEL_IMPLEMENTATION
AnyModel = TypeVar("AnyModel", bound=AnyBert)


@dataclass(frozen=True)
class Compute:
    """Precision and op implementations, selected by PRECISION and OPS.

    Attributes:
        dtype: of matrix products and activations.
        products: the encoder products that run in FP8, or None.
        precision: for the log, "torch.float32", "torch.bfloat16", "torch.float16", "fp8" or "fp8-forward".
        ops: for the log, JSON of op -> implementation. For Hugging Face's model only the loss is ours.
    """

    dtype: torch.dtype
    products: Products | None
    precision: str
    ops: str


def choose_compute(
    config: ComputeConfig, model: ModelConfig, device: torch.device, warn: Callable[[str], None]
) -> Compute:
    """Select the ops for this process. Raise UserError if the device or the model does not support the settings."""
    dtype = compute_dtype(config.precision, device)
    products = fp8_products(config.precision, device, config.fp8_fast_accumulation)
    chosen = ops.select(config.ops, device)
    if config.ops == "auto" and device.type == "cpu" and (problem := native.problem()):
        warn(f"warning: {problem}")
    if model.model_implementation == HUGGING_FACE:
        if products:
            reason = "Hugging Face's model has no FP8 products"
            raise UserError(
                "config.conflict",
                f"PRECISION={config.precision}",
                reason,
                "Set PRECISION=bf16 or MODEL_IMPLEMENTATION=mlbert",
            )
        chosen = {"model": "transformers", "masked_cross_entropy": chosen["masked_cross_entropy"]}
    if products and device.type == "cpu":
        warn(f"PRECISION={config.precision} on a CPU is for tests: slower than bf16")
    return Compute(dtype, products, config.precision if products else str(dtype), json.dumps(chosen))


def start_weights(
    model: AnyModel, config: ModelConfig, seed: int, device: torch.device, warn: Callable[[str], None]
) -> AnyModel:
    """Initialize the weights, move the model to the device, and load INIT_CHECKPOINT if it is set.

    Raises:
        UserError: the checkpoint is missing, damaged, or has another shape.
    """
    model.initialize(seed)
    model.to(device)
    if config.init_checkpoint is not None:
        for line in load_weights(model, config.init_checkpoint).warnings(config.init_checkpoint):
            warn(line)
    return model


def make_masked_lm(
    config: ModelConfig, max_seq_length: int | None, shape: BertConfig, compute: Compute
) -> BertForMaskedLM | HuggingFaceForMaskedLM:
    """Return an uninitialized masked-LM model. Hugging Face's pads all sequences to ``max_seq_length``, or to the
    longest of the batch if that is None, and raises UserError as `HuggingFaceModel` does."""
    if config.model_implementation == HUGGING_FACE:
        return HuggingFaceForMaskedLM(shape, compute.dtype, max_seq_length)
    return BertForMaskedLM(shape, compute.dtype, fp8_products=compute.products)


def make_classifier(
    config: ModelConfig, max_seq_length: int | None, shape: BertConfig, num_labels: int, compute: Compute
) -> BertForSequenceClassification | HuggingFaceForSequenceClassification:
    """Return a model with ``num_labels`` outputs per sequence (1 for regression); see `make_masked_lm`."""
    if config.model_implementation == HUGGING_FACE:
        return HuggingFaceForSequenceClassification(shape, num_labels, compute.dtype, max_seq_length)
    return BertForSequenceClassification(shape, num_labels, compute.dtype, fp8_products=compute.products)


MakeModel = Callable[[BertConfig, Compute], AnyBert]


def make_pre_training(shape: BertConfig, compute: Compute) -> BertForPreTraining:
    """Return our model with both heads, uninitialized."""
    return BertForPreTraining(shape, compute.dtype, fp8_products=compute.products)


def build_evaluation(
    model_config: ModelConfig,
    data: DataConfig,
    evaluation: EvaluationConfig,
    compute_config: ComputeConfig,
    world: World,
    seed: int,
    warn: Callable[[str], None],
    make_model: MakeModel = make_pre_training,
    objective: type[MaskedLM] = PreTraining,
) -> tuple[AnyBert, MaskedLM, EvalSet | SyntheticEvalSet]:
    """Return model, objective and samples to evaluate the starting weights, without reading the training set.

    Raises:
        UserError: model, checkpoint or samples are missing, damaged, or do not match each other.
    """
    shape = BertConfig.from_json(model_config.bert_config_file).with_options(model_config.model_options)
    samples = make_evaluation_set(data, evaluation, shape, seed=seed, rank=world.rank, world_size=world.world_size)
    if isinstance(samples, EvalSet):
        check_shape(samples.info, shape, model_config.bert_config_file)
    model = make_model(shape, choose_compute(compute_config, model_config, world.device, warn))
    return start_weights(model, model_config, seed, world.device, warn), objective(scope="step"), samples


def refuse_sharding(config: DistributedConfig, recipe: str) -> None:
    """Raise UserError if the settings shard the optimizer: every rank of the recipe updates all weights."""
    for name, value in (("SHARDED_OPTIMIZER", "off"), ("WEIGHTS_ALLGATHER", "fp32")):
        if (given := getattr(config, name.lower())) != value:
            reason = f"every rank of {recipe} updates everything"
            raise UserError("config.conflict", f"{name}={given}", reason, f"Set {name}={value}")


def refuse_bucket_clipping(config: DistributedConfig) -> None:
    """Raise UserError if the settings clip each gradient bucket separately."""
    if config.gradient_clipping == "buckets":
        raise UserError(
            "config.conflict", "GRADIENT_CLIPPING=buckets", "is the way of RECIPE=ddp_adam", "Set after or before"
        )


def build_replicated_optimizer(
    optimizer: OptimizerConfig,
    base_lr: float,
    distributed: DistributedConfig,
    compute: ComputeConfig,
    model: AnyBert,
    world: World,
    loss_scale: LossScale | None,
    recipe: str,
) -> tuple[FlatParameters, FlatOptimizer, GradientReducer]:
    """Return the flat buffers, the optimizer on them, and the gradient reducer. Gradients are clipped by global norm.

    Args:
        optimizer, distributed, compute: settings.
        base_lr: LR.
        model: on its device.
        world: initialized.
        loss_scale: for fp16, else None.
        recipe: its name, for errors.

    Raises:
        UserError: the settings ask for a sharded optimizer or for clipping by bucket.
    """
    refuse_sharding(distributed, recipe)
    refuse_bucket_clipping(distributed)
    flat = FlatParameters(model.ordered_parameters(), decayed=methods.decayed(optimizer))
    buckets = cut_buckets(flat.offsets, flat.numel, distributed.bucket_mib * 2**20 // flat.grad.element_size())
    clip_before = optimizer.max_grad_norm if distributed.gradient_clipping == "before" else None
    scale, in_bf16 = loss_scale.value if loss_scale else None, distributed.gradient_reduction == "bf16"
    sync = GradientReducer(flat.parameters, flat.grad, flat.offsets, world, buckets, clip_before, scale, in_bf16)
    update = methods.make(optimizer, base_lr, distributed, compute, flat, ShardLayout.whole(flat.numel))
    return flat, update, sync
