"""The parts of a training step: assign launches to parts, and sum them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from counted.recorder import Operation
from counted.steps import Counted
from mlbert.config.bert_config import BertConfig

PRODUCTS = "encoder products"
ATTENTION = "attention"
NORMS = "norms, GELU, casts"
FILLS = "zero fills"
ADDS = "residual gradient adds"
WEIGHTS = "weight casts"
HEADS = "heads, loss, embeddings"
UPDATE = "optimizer"
CLEARING = "clearing and accumulating gradients"
COMMUNICATION = "communication"
OTHER = "other"
PARTS = (
    PRODUCTS,
    ATTENTION,
    NORMS,
    FILLS,
    ADDS,
    WEIGHTS,
    HEADS,
    UPDATE,
    CLEARING,
    COMMUNICATION,
    OTHER,
)

_FILLING = (
    "zeros",
    "new_zeros",
    "zeros_like",
    "zero_",
    "fill_",
    "full",
    "ones",
    "ones_like",
    "new_full",
)
# Triton kernels by the beginning of their module's name.
_MODULES = {
    "ops.triton.attention": ATTENTION,
    "ops.triton.loss": HEADS,
    "ops.triton.embedding": HEADS,
    "ops.triton.expand_batch": HEADS,
    "ops.triton": NORMS,
    "optim": UPDATE,
}
# PyTorch operations of the heads, losses, embeddings and the selection of rows for the last layer.
_OF_HEADS = (
    "index_select",
    "index_add",
    "index_add_",
    "slice_backward",
    "sort",
    "searchsorted",
    "cat",
    "clamp",
    "sum",
    "gelu",
    "gelu_backward",
    "tanh",
    "tanh_backward",
    "_log_softmax",
    "_log_softmax_backward_data",
    "nll_loss_forward",
    "nll_loss_backward",
)


@dataclass
class Total:
    """Totals of some launches: their number, bytes read and written, FLOPs of products."""

    launches: int = 0
    moved: int = 0
    flops: int = 0

    def add(self, operation: Operation) -> None:
        """Add one launch."""
        self.launches += 1
        self.moved += operation.moved
        self.flops += operation.flops


def totals(
    operations: Iterable[Operation], counted: Counted, config: BertConfig
) -> dict[str, Total]:
    """Return the total of each part, in the order of `PARTS`."""
    sums = {part: Total() for part in PARTS}
    for operation in operations:
        sums[part_of(operation, counted, config)].add(operation)
    return sums


def part_of(operation: Operation, counted: Counted, config: BertConfig) -> str:
    """Return the part, one of `PARTS`, that the operation belongs to."""
    if operation.kind == "collective":
        return COMMUNICATION
    if operation.flops:
        sizes = {
            size for operand in (*operation.reads, *operation.writes) for size in operand.shape
        }
        heads = {
            config.padded_vocab_size,
            counted.static_shape.masked,
            counted.static_shape.sequences,
        }
        return HEADS if sizes & heads else PRODUCTS
    if operation.kind == "triton":
        if operation.module == "ops.triton.cast" and any(
            operand.buffer == "weights" for operand in operation.reads
        ):
            is_matrix = any(
                operand.buffer == "weights" and len(operand.shape) == 2
                for operand in operation.reads
            )
            return WEIGHTS if is_matrix else NORMS
        return next(part for start, part in _MODULES.items() if operation.module.startswith(start))
    return _of_torch(operation, counted, config)


def _of_torch(operation: Operation, counted: Counted, config: BertConfig) -> str:
    if any(operand.buffer == "gradients" for operand in operation.writes):
        return CLEARING
    if operation.name in _FILLING:
        return FILLS
    if operation.name in _OF_HEADS:
        return HEADS
    if operation.name in ("add", "add_"):
        width = counted.static_shape.tokens * config.hidden_size
        is_hidden = any(
            operand.size == width * operand.dtype.itemsize for operand in operation.writes
        )
        return ADDS if is_hidden or _is_rows(operation, config) else OTHER
    if operation.name in ("_to_copy", "copy_", "clone", "cat"):
        return WEIGHTS if any(operand.buffer == "weights" for operand in operation.reads) else NORMS
    return OTHER


def _is_rows(operation: Operation, config: BertConfig) -> bool:
    """Return True for hidden states of some tokens, as in the last layer."""
    shapes = [operand.shape for operand in operation.writes]
    return all(len(shape) == 2 and shape[1] == config.hidden_size for shape in shapes)


def is_fp8(operation: Operation) -> bool:
    """Return True if the operation is an FP8 product."""
    kinds = (torch.float8_e4m3fn, torch.float8_e5m2)
    return operation.flops > 0 and any(operand.dtype in kinds for operand in operation.reads)
