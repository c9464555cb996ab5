"""Cross-entropy of the masked tokens. The gradient overwrites the logits.

Legend: M masked tokens, V vocabulary, V' columns of the logits (V padded).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mlbert.ops import forms as registry
from mlbert.ops import reference
from mlbert.ops.native_library import is_bf16, library, pointer

IGNORED = -100  # as in PyTorch's cross_entropy


def masked_cross_entropy(logits: Tensor, labels: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy and the number of correct predictions.

    Args:
        logits: [M, V'] float32 or bfloat16; columns from `vocab_size` on are ignored. The native
            and Triton backward passes overwrite them with the gradient, so nothing else may read
            them then.
        labels: int64 [M], each below `vocab_size`; rows with label -100 are ignored.
        vocab_size: V.

    Returns:
        (loss_sum, num_correct): scalars, float32 (float64 for float64) and int64; 0 for M = 0.
            The prediction is
        the lowest class with the largest logit.
    """
    return registry.implementation("masked_cross_entropy", logits)(logits, labels, vocab_size)


registry.register("masked_cross_entropy", "plain")(reference.masked_cross_entropy)


@registry.register("masked_cross_entropy", "native")
def _native(logits: Tensor, labels: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    assert labels.shape == logits.shape[:1], (
        f"{tuple(labels.shape)} labels for {logits.shape[0]} rows"
    )
    assert vocab_size <= logits.shape[1], f"{vocab_size} classes in {logits.shape[1]} columns"
    if labels.numel() and _range(labels)[0] == IGNORED:
        counted = labels != IGNORED
        logits = logits[counted]
        labels = labels[counted]
    if labels.numel():
        low, high = _range(labels)
        if low < 0 or high >= vocab_size:
            raise IndexError(f"labels {low} to {high} are not all below {vocab_size}")
    return _CrossEntropy.apply(logits, labels, vocab_size)


def _range(labels: Tensor) -> tuple[int, int]:
    # NumPy takes a fifth of the time of PyTorch's operators here.
    numbers = labels.numpy()
    return int(numbers.min()), int(numbers.max())


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
        logits = logits.contiguous()
        labels = labels.contiguous()
        rows, columns = logits.shape
        statistics = torch.empty(rows, 2)
        losses = torch.empty(rows)
        correct = torch.empty(rows, dtype=torch.uint8)
        library().cross_entropy_forward(
            pointer(logits),
            pointer(labels, torch.int64),
            rows,
            columns,
            vocab_size,
            is_bf16(logits),
            torch.get_num_threads(),
            pointer(statistics),
            pointer(losses),
            pointer(correct),
        )
        ctx.save_for_backward(logits, labels, statistics)
        ctx.vocab_size = vocab_size
        ctx.consumed = False
        num_correct = correct.sum(dtype=torch.int64)
        ctx.mark_non_differentiable(num_correct)
        return losses.sum(dtype=torch.float64).float(), num_correct

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, statistics = ctx.saved_tensors
        assert not ctx.consumed, (
            "masked_cross_entropy's backward runs once: it overwrites the logits"
        )
        ctx.consumed = True
        library().cross_entropy_backward(
            pointer(logits),
            pointer(labels),
            *logits.shape,
            ctx.vocab_size,
            float(d_loss),
            is_bf16(logits),
            torch.get_num_threads(),
            pointer(statistics),
        )
        return logits, None, None
