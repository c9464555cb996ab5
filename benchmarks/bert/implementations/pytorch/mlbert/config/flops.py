"""Count the model FLOPs of a training step: the arithmetic that the losses require,
not what an implementation runs.

A multiply-add counts 2, the backward pass twice the forward, element-wise work 0. Results that no
loss reads are not counted: padding, vocabulary logits of unmasked tokens, and the last layer's
per-token work for tokens that the heads do not read. (Published figures count the last layer on all
tokens. The last layer's queries and scores are counted for all tokens here too, although C kernels
compute them only for the tokens read.) With T tokens, hidden size D, inner size F, and sequences of
length L:

    Q K V of a layer              2 T 3 D^2
    attention scores and values   4 sum(L^2) D; in local layers, only for the keys of the window
    output and feed-forward       2 T (D^2 + 2 D F), or 3 D F if gated;
                                  in the last layer, only for the rows read
    masked-LM head                2 M (D^2 + D V) for M masked tokens
    pooler and linear layer       2 S (D^2 + D outputs) for S sequences
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from mlbert.config.bert_config import BertConfig

BACKWARD_FACTOR = 3  # forward and backward


class Counted(Protocol):
    """A batch that knows its sizes on the host; no class of PyTorch,
    so that TensorFlow's program can count too.
    """

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
    """Sizes of a batch: tokens, sum of squared sequence lengths, masked tokens, sequences, and the
    pairs of query and key in a window of local attention (0 without one)."""

    tokens: int
    squared_lengths: int
    masked: int
    sequences: int
    local_pairs: int = 0

    @classmethod
    def of(cls, batch: Counted, window: int | None = None) -> BatchWork:
        """Count one batch. Reads ``cu_seqlens``, which synchronizes the host if the batch is on an
        accelerator.

        ``window``: keys on each side in layers with local attention, if there are any.
        """
        lengths = batch.cu_seqlens.long().diff()
        squares = lengths * lengths
        local_pairs = 0
        if window is not None:
            hidden = (lengths - 1 - window).clamp(min=0)  # keys that the first query does not see
            local_pairs = int((squares - hidden * (hidden + 1)).sum())
        return cls(
            tokens=batch.num_tokens,
            squared_lengths=int(squares.sum()),
            masked=batch.num_masked,
            sequences=batch.num_samples,
            local_pairs=local_pairs,
        )


def encoder(config: BertConfig, work: BatchWork, rows_read: int) -> int:
    """Return the FLOPs of the encoder's forward pass,
    with ``rows_read`` tokens read from its last layer.
    """
    d = config.hidden_size
    num_local = config.num_local_layers
    num_global = config.num_hidden_layers - num_local
    pairs = num_global * work.squared_lengths + num_local * work.local_pairs
    attention = config.num_hidden_layers * work.tokens * 2 * 3 * d * d + 4 * pairs * d
    per_token = 2 * (d * d + d * (config.inner_rows + config.intermediate_size))
    all_tokens = (config.num_hidden_layers - 1) * work.tokens + rows_read
    return attention + all_tokens * per_token


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
    rows_read = work.tokens if config.classifier_pooling == "mean" else work.sequences
    return encoder(config, work, rows_read) + sequence_head(config, work, num_labels)


def token_classifier(config: BertConfig, work: BatchWork, num_labels: int) -> int:
    """Return the FLOPs of one forward pass of a classifier of the masked tokens."""
    size = config.hidden_size
    columns = num_labels + (size if config.is_rotary else 0)
    return encoder(config, work, work.masked) + work.masked * 2 * size * columns


def forward_flops(config: BertConfig, work: BatchWork) -> int:
    """Return the FLOPs of one forward pass of `BertForPreTraining`."""
    heads = masked_lm_head(config, work) + sequence_head(config, work, 2)
    return encoder(config, work, work.masked + work.sequences) + heads


def training_flops(config: BertConfig, work: BatchWork) -> int:
    """Return the FLOPs of forward and backward of `BertForPreTraining`."""
    return BACKWARD_FACTOR * forward_flops(config, work)
