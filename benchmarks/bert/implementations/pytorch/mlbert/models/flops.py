"""Model FLOPs of a training step: the arithmetic that the model asks for, not what an implementation spends.

A multiply-add counts 2, the backward pass twice the forward, element-wise work nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlbert.data.batch import Batch
from mlbert.models.config import BertConfig

BACKWARD_FACTOR = 3


@dataclass(frozen=True)
class Work:
    """What a batch holds: tokens, sum of squared sequence lengths, masked tokens, sequences."""

    tokens: int
    squared_lengths: int
    masked: int
    sequences: int

    @classmethod
    def of(cls, batch: Batch) -> Work:
        """Counts one batch (reads ``cu_seqlens``: a host synchronisation on an accelerator)."""
        lengths = torch.diff(batch.cu_seqlens.long())
        return cls(batch.num_tokens, int((lengths * lengths).sum()), batch.num_masked, batch.num_samples)


def forward_flops(config: BertConfig, work: Work) -> int:
    """FLOPs of one forward pass; every layer counted on all tokens, the masked-LM head on masked tokens only."""
    d, inner = config.hidden_size, config.intermediate_size
    layer = work.tokens * 2 * (4 * d * d + 2 * d * inner) + 4 * work.squared_lengths * d
    head = work.masked * 2 * (d * d + d * config.vocab_size)
    pooler = work.sequences * 2 * (d * d + 2 * d)
    return config.num_hidden_layers * layer + head + pooler


def training_flops(config: BertConfig, work: Work) -> int:
    """FLOPs of forward and backward."""
    return BACKWARD_FACTOR * forward_flops(config, work)
