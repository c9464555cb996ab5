"""Model FLOPs of a training step: the arithmetic that the losses ask for, not what an implementation spends.

A multiply-add counts 2, the backward pass twice the forward, element-wise work nothing. What no loss reads is not
counted: padding, vocabulary logits of unmasked tokens, and the last layer's per-token work outside masked tokens and
[CLS]. Published figures count the last layer on all tokens; ``dense`` gives these.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlbert.core.bert_config import BertConfig
from mlbert.feed.batch import Batch
from mlbert.feed.host_batch import HostBatch

BACKWARD_FACTOR = 3


@dataclass(frozen=True)
class Work:
    """What a batch holds: tokens, sum of squared sequence lengths, masked tokens, sequences."""

    tokens: int
    squared_lengths: int
    masked: int
    sequences: int

    @classmethod
    def of(cls, batch: Batch | HostBatch) -> Work:
        """Counts one batch (reads ``cu_seqlens``: a host synchronisation where an accelerator has them)."""
        lengths = torch.diff(batch.cu_seqlens.long())
        return cls(batch.num_tokens, int((lengths * lengths).sum()), batch.num_masked, batch.num_samples)


def forward_flops(config: BertConfig, work: Work, dense: bool = False) -> int:
    """FLOPs of one forward pass; ``dense`` counts the last layer on all tokens."""
    d, inner = config.hidden_size, config.intermediate_size
    attention = work.tokens * 2 * 3 * d * d + 4 * work.squared_lengths * d
    per_token = 2 * (d * d + 2 * d * inner)
    last_tokens = work.tokens if dense else work.masked + work.sequences
    full_layers = config.num_hidden_layers - 1
    encoder = config.num_hidden_layers * attention + (full_layers * work.tokens + last_tokens) * per_token
    head = work.masked * 2 * (d * d + d * config.vocab_size)
    pooler = work.sequences * 2 * (d * d + 2 * d)
    return encoder + head + pooler


def training_flops(config: BertConfig, work: Work, dense: bool = False) -> int:
    """FLOPs of forward and backward."""
    return BACKWARD_FACTOR * forward_flops(config, work, dense)
