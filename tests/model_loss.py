"""The loss of one batch, with divisors given on the host."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mlbert.data.batches import Batch
from mlbert.models.objectives import PreTraining


def loss_of(
    model: Any,
    batch: Batch,
    dropout: tuple[int, int] | None = None,
    counts: Sequence[int] | None = None,
    objective: Any = None,
) -> Tensor:
    """Return the loss of a batch.

    Args:
        dropout: seed and step of the dropout masks (None disables dropout).
        counts: counts of the step (default: those of the batch).
        objective: default `PreTraining`.
    """
    objective = objective or PreTraining("step")
    divisors = objective.divisors(objective.counts(batch) if counts is None else counts)
    keys = model.dropout_keys(*dropout).tolist() if dropout else None
    device = batch.input_ids.device
    return objective.loss(
        model, batch, keys, [torch.tensor(number, device=device) for number in divisors]
    )


def masked_sums(model: Any, batch: Batch) -> list[float]:
    """Return the correct predictions, summed loss and number of masked tokens, without dropout."""
    with torch.no_grad():
        return PreTraining("step").sums(model, batch).tolist()
