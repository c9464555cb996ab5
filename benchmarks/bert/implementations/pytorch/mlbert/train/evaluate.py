"""Masked-LM accuracy on the whole evaluation set, sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from mlbert.data.batch import Batch
from mlbert.dist.world import World
from mlbert.models.bert import BertForPreTraining


class EvaluationSet(Protocol):
    """This rank's share of the evaluation samples."""

    num_examples: int

    def open(self) -> None:
        """First touch of the data."""

    def __iter__(self) -> Iterator[Batch]:
        """This rank's batches, the same at each pass."""


@torch.no_grad()
def evaluate(model: BertForPreTraining, batches: Iterable[Batch], world: World) -> tuple[float, float]:
    """Accuracy and mean loss over every masked token of the set.

    The accuracy is the benchmark's: hits divided by masked tokens, each token counting once. Returns the same two
    numbers on all ranks; the tokens are summed before the division, so sharding does not change the accuracy.
    """
    device = next(model.parameters()).device
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # read once, at the end: the batches need no answer
    model.eval()
    for batch in batches:
        output = model(batch.to(device))
        sums[:2] += torch.stack([output.num_correct.double(), output.mlm_loss_sum.double()])
        sums[2] += batch.num_masked
    model.train()
    world.all_reduce_sum(sums)
    num_correct, loss_sum, num_masked = sums.tolist()
    if num_masked == 0:
        raise AssertionError("the evaluation set holds no masked token")
    return num_correct / num_masked, loss_sum / num_masked
