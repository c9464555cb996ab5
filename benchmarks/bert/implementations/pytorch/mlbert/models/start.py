"""A model ready to train: what computes is chosen, weights are drawn or loaded, on the rank's device."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from mlbert.host import native
from mlbert.host.errors import UserError
from mlbert.models.bert import AnyBert
from mlbert.models.config import ModelConfig
from mlbert.models.weights.load import load_weights
from mlbert.ops import api as ops
from mlbert.ops.config import ComputeConfig
from mlbert.ops.fp8_scaling import Products
from mlbert.ops.precision import compute_dtype, fp8_products

HUGGING_FACE = "huggingface"  # a value of MODEL_IMPLEMENTATION
AnyModel = TypeVar("AnyModel", bound=AnyBert)


@dataclass(frozen=True)
class Compute:
    """What computes, as PRECISION and OPS ask for.

    Attributes:
        dtype: of matrix products and activations.
        products: which of the encoder's products run in FP8; None: none.
        precision: for the log, "torch.float32", "torch.bfloat16", "torch.float16", "fp8" or "fp8-forward".
        ops: for the log, JSON of op -> implementation; of Hugging Face's model, whose ops are its own, of the loss.
    """

    dtype: torch.dtype
    products: Products | None
    precision: str
    ops: str


def choose_compute(
    config: ComputeConfig, model: ModelConfig, device: torch.device, warn: Callable[[str], None]
) -> Compute:
    """Selects the ops for this process. Raises UserError for what the device or the model does not have."""
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
    """Draws the weights, loads those of INIT_CHECKPOINT over them, and moves the model to the device.

    Raises:
        UserError: the checkpoint is missing, damaged, or of another shape.
    """
    model.initialize(seed)
    model.to(device)
    if config.init_checkpoint is not None:
        for line in load_weights(model, config.init_checkpoint).warnings(config.init_checkpoint):
            warn(line)
    return model
