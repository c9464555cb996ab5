"""Count the model FLOPs of a training step: the arithmetic that the losses require, not what an implementation runs.

A multiply-add counts 2, the backward pass twice the forward, element-wise work 0. Results that no loss reads are not
counted: padding, vocabulary logits of unmasked tokens, and the last layer's per-token work for tokens that the heads
do not read. (Published figures count the last layer on all tokens.) With T tokens, hidden size D, inner size F, and
sequences of length L:

    Q K V of a layer              2 T 3 D^2
    attention scores and values   4 sum(L^2) D
    output and feed-forward       2 T (D^2 + 2 D F), or 3 D F if gated; in the last layer, only for the rows read
    masked-LM head                2 M (D^2 + D V) for M masked tokens
    pooler and linear layer       2 S (D^2 + D outputs) for S sequences
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from mlbert.config.bert_config import BertConfig

BACKWARD_FACTOR = 3  # forward and backward


class Counted(Protocol):
    """A batch that knows its sizes on the host; no class of PyTorch, so that TensorFlow's program can count too."""

    @property
    def cu_seqlens(self) -> Any:
        """Cumulative lengths, an integer tensor [S+1]."""

    @property
    def num_tokens(self) -> int:
        """Real tokens."""

    @property
    def num_masked(self) -> int:
        """Masked tokens."""

    @property
    def num_samples(self) -> int:
        """Sequences."""


@dataclass(frozen=True)
class BatchWork:
    """Sizes of a batch: tokens, sum of squared sequence lengths, masked tokens, sequences."""

    tokens: int
    squared_lengths: int
    masked: int
    sequences: int

    @classmethod
    def of(cls, batch: Counted) -> BatchWork:
        """Count one batch. Reads ``cu_seqlens``, which synchronizes the host if the batch is on an accelerator."""
        lengths = batch.cu_seqlens.long().diff()
        return cls(
            batch.num_tokens, int((lengths * lengths).sum()), batch.num_masked, batch.num_samples
        )


def encoder(config: BertConfig, work: BatchWork, rows_read: int) -> int:
    """Return the FLOPs of the encoder's forward pass, with ``rows_read`` tokens read from its last layer."""
    d = config.hidden_size
    attention = work.tokens * 2 * 3 * d * d + 4 * work.squared_lengths * d
    per_token = 2 * (d * d + d * (config.inner_rows + config.intermediate_size))
    all_tokens = (config.num_hidden_layers - 1) * work.tokens + rows_read
    return config.num_hidden_layers * attention + all_tokens * per_token


def masked_lm_head(config: BertConfig, work: BatchWork) -> int:
    """Return the FLOPs of the masked-LM head's forward pass."""
    return work.masked * 2 * (config.hidden_size**2 + config.hidden_size * config.vocab_size)


def sequence_head(config: BertConfig, work: BatchWork, outputs: int) -> int:
    """Return the FLOPs of the forward pass of the pooler and the linear layer after it."""
    return work.sequences * 2 * (config.hidden_size**2 + outputs * config.hidden_size)


def masked_lm(config: BertConfig, work: BatchWork) -> int:
    """Return the FLOPs of one forward pass of a masked-LM model."""
    return encoder(config, work, work.masked) + masked_lm_head(config, work)


def classifier(config: BertConfig, work: BatchWork, num_labels: int) -> int:
    """Return the FLOPs of one forward pass of a sequence classifier."""
    return encoder(config, work, work.sequences) + sequence_head(config, work, num_labels)


def forward_flops(config: BertConfig, work: BatchWork) -> int:
    """Return the FLOPs of one forward pass of `BertForPreTraining`."""
    heads = masked_lm_head(config, work) + sequence_head(config, work, 2)
    return encoder(config, work, work.masked + work.sequences) + heads


def training_flops(config: BertConfig, work: BatchWork) -> int:
    """Return the FLOPs of forward and backward of `BertForPreTraining`."""
    return BACKWARD_FACTOR * forward_flops(config, work)
