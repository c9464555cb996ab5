"""BERT's encoder on the flat token stream of `Batch`: embeddings, layers, in the compute precision or in FP8.

Legend: S sequences, T tokens, R rows asked for, D hidden, N heads, H head size.

Post-LayerNorm, GELU in the tanh form. Nothing is ever padded: attention is bounded by ``cu_seqlens``, and the last
layer's per-token work is done only where the heads read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mlbert import ops
from mlbert.core.bert_config import BertConfig
from mlbert.feed.batch import Batch
from mlbert.ops import fp8

# Places of one layer (or of the embeddings, as layer 0) at which dropout draws a mask of its own.
SITE_EMBEDDINGS, SITE_ATTENTION, SITE_ATTENTION_OUTPUT, SITE_OUTPUT = range(4)
NUM_SITES = 4

# Linear layers of one encoder layer, as its FP8 scales are numbered.
QKV, ATTENTION_OUTPUT, INTERMEDIATE, OUTPUT = range(4)


class Dropout(Protocol):
    """Names the masks of one optimizer step."""

    def key(self, layer: int, site: int) -> ops.Key:
        """The 32-bit key of one mask."""


@dataclass(frozen=True)
class DropoutState:
    """Names the masks of one optimizer step: the run's seed and the step's number."""

    seed: int
    step: int

    def key(self, layer: int, site: int) -> int:
        """The 32-bit key of one mask."""
        return ops.dropout_key(self.seed, self.step, layer, site)


@dataclass(frozen=True)
class DropoutKeys:
    """The same names in memory of the device, so that a graph finds each step's.

    Attributes:
        table: int32 [layers + 1, NUM_SITES], as `ops.dropout_keys` gives it for `DropoutState`'s seed and step.
    """

    table: Tensor

    def key(self, layer: int, site: int) -> Tensor:
        """The key of one mask: an int32 scalar, part of the table."""
        return self.table[layer, site]


class BertEmbeddings(nn.Module):
    """Sum of word, position and segment embeddings, LayerNorm, dropout."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, batch: Batch, dropout: Dropout | None) -> Tensor:
        """Returns float32 [T, D]."""
        total = ops.embedding_sum(
            batch.input_ids,
            batch.segment_ids,
            batch.position_ids,
            self.word_embeddings.weight,
            self.position_embeddings.weight,
            self.token_type_embeddings.weight,
        )
        return ops.layer_norm_dropout(
            total,
            self.LayerNorm.weight,
            self.LayerNorm.bias,
            self.LayerNorm.eps,
            self.config.hidden_dropout_prob if dropout else 0.0,
            dropout.key(0, SITE_EMBEDDINGS) if dropout else 0,
            batch.dropout_rows,
        )


class _SelfAttention(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, size)
        self.value = nn.Linear(size, size)


class _DenseNorm(nn.Module):
    """A linear layer whose output is added to a residual and normalised."""

    def __init__(self, size_in: int, size_out: int, eps: float) -> None:
        super().__init__()
        self.dense = nn.Linear(size_in, size_out)
        self.LayerNorm = nn.LayerNorm(size_out, eps=eps)


class _Attention(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self = _SelfAttention(config.hidden_size)
        self.output = _DenseNorm(config.hidden_size, config.hidden_size, config.layer_norm_eps)


class _Intermediate(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)


class BertLayer(nn.Module):
    """One encoder layer. ``index`` counts from 1: layer 0 of the dropout keys is the embeddings."""

    def __init__(self, config: BertConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.index, self.dtype = config, index, dtype
        self.attention = _Attention(config)
        self.intermediate = _Intermediate(config)
        self.output = _DenseNorm(config.intermediate_size, config.hidden_size, config.layer_norm_eps)

    def forward(self, hidden_TD: Tensor, batch: Batch, dropout: Dropout | None, rows: Tensor | None) -> Tensor:
        """Encodes every token, or only those named by ``rows`` (int64 [R]): attention still reads all tokens.

        Returns [T, D], or [R, D] where rows are given, in the compute precision.
        """
        weights, biases = self._qkv_parameters()
        context_TD = self._attend(ops.linear_qkv(hidden_TD, *weights, *biases), batch, dropout)
        dropout_rows = batch.dropout_rows
        if rows is not None:
            context_TD, hidden_TD = context_TD.index_select(0, rows), hidden_TD.index_select(0, rows)
            dropout_rows = dropout_rows.index_select(0, rows)
        part, inner = self.attention.output, self.intermediate.dense
        projected = F.linear(context_TD, part.dense.weight.to(self.dtype))
        hidden_TD = ops.dropout_add_layer_norm(
            *self._norm_arguments(part, projected, hidden_TD, dropout, SITE_ATTENTION_OUTPUT, dropout_rows)
        )
        exact = self.config.hidden_act == "gelu_erf"
        projected = ops.feed_forward(hidden_TD, inner.weight, inner.bias, self.output.dense.weight, exact)
        return ops.dropout_add_layer_norm(
            *self._norm_arguments(self.output, projected, hidden_TD, dropout, SITE_OUTPUT, dropout_rows)
        )

    def forward_fp8(
        self,
        hidden: fp8.Hidden,
        batch: Batch,
        dropout: Dropout | None,
        rows: Tensor | None,
        slots: list[fp8.Slot],
        next_slot: fp8.Slot | None,
    ) -> fp8.Hidden:
        """`forward` in FP8: ``slots`` of the four linear layers, ``next_slot`` of the one after them, if any."""
        qkv = fp8.linear_qkv(hidden.product, *self._qkv_parameters(), slots[QKV], hidden.small)
        context_TD = self._attend(qkv, batch, dropout)
        residual_TD, dropout_rows = hidden.residual, batch.dropout_rows
        if rows is not None:
            context_TD, residual_TD = context_TD.index_select(0, rows), residual_TD.index_select(0, rows)
            dropout_rows = dropout_rows.index_select(0, rows)
        part, inner = self.attention.output, self.intermediate.dense
        projected = fp8.linear(context_TD, part.dense.weight, None, slots[ATTENTION_OUTPUT])
        hidden = fp8.dropout_add_layer_norm(
            *self._norm_arguments(part, projected, residual_TD, dropout, SITE_ATTENTION_OUTPUT, dropout_rows),
            slots[INTERMEDIATE],
        )
        projected = fp8.feed_forward(
            hidden.product,
            inner.weight,
            inner.bias,
            self.output.dense.weight,
            self.config.hidden_act == "gelu_erf",
            (slots[INTERMEDIATE], slots[OUTPUT]),
            hidden.small,
        )
        return fp8.dropout_add_layer_norm(
            *self._norm_arguments(self.output, projected, hidden.residual, dropout, SITE_OUTPUT, dropout_rows),
            next_slot,
        )

    def linear_weights(self) -> tuple[list[Tensor], ...]:
        """The weights of the four linear layers, each as its parts."""
        dense = (self.attention.output.dense, self.intermediate.dense, self.output.dense)
        return (self._qkv_parameters()[0], *([part.weight] for part in dense))

    def _qkv_parameters(self) -> tuple[list[Tensor], list[Tensor]]:
        parts = (self.attention.self.query, self.attention.self.key, self.attention.self.value)
        return [part.weight for part in parts], [part.bias for part in parts]

    def _attend(self, qkv: Tensor, batch: Batch, dropout: Dropout | None) -> Tensor:
        context_TNH = ops.attention(
            qkv.view(-1, 3, self.config.num_attention_heads, self.config.head_size),
            batch.cu_seqlens,
            batch.max_seqlen,
            self.config.attention_probs_dropout_prob if dropout else 0.0,
            dropout.key(self.index, SITE_ATTENTION) if dropout else 0,
            batch.dropout_rows,
        )
        return context_TNH.reshape(-1, self.config.hidden_size)

    def _norm_arguments(
        self, part: _DenseNorm, x: Tensor, residual: Tensor, dropout: Dropout | None, site: int, rows: Tensor
    ) -> tuple[Any, ...]:
        """Of LayerNorm(residual + dropout(x + the linear layer's bias))."""
        return (
            x,
            residual,
            part.LayerNorm.weight,
            part.LayerNorm.bias,
            part.LayerNorm.eps,
            self.config.hidden_dropout_prob if dropout else 0.0,
            dropout.key(self.index, site) if dropout else 0,
            rows,
            part.dense.bias,
        )


class _Encoder(nn.Module):
    def __init__(self, config: BertConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config, i + 1, dtype) for i in range(config.num_hidden_layers))


class _Pooler(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)


class BertModel(nn.Module):
    """Embeddings, encoder and pooler; ``scaling`` holds the scales of the encoder's FP8 products, if it has any."""

    def __init__(self, config: BertConfig, dtype: torch.dtype, products: fp8.Products | None = None) -> None:
        super().__init__()
        self.dtype = dtype
        self.embeddings = BertEmbeddings(config)
        self.encoder = _Encoder(config, dtype)
        self.pooler = _Pooler(config)
        self.scaling = fp8.Scaling(fp8.LINEARS_PER_LAYER * config.num_hidden_layers, products) if products else None

    def forward(self, batch: Batch, dropout: Dropout | None, last_rows: Tensor | None) -> Tensor:
        """Returns the last hidden states [T, D], or [R, D] of the rows asked for."""
        hidden_TD = self.embeddings(batch, dropout).to(self.dtype)
        if self.scaling is not None:
            return self._encode_fp8(hidden_TD, batch, dropout, last_rows, self.scaling)
        layers = self.encoder.layer
        for i, layer in enumerate(layers):
            hidden_TD = layer(hidden_TD, batch, dropout, last_rows if i == len(layers) - 1 else None)
        return hidden_TD

    def quantise_weights(self) -> None:
        """Makes the FP8 copies of all weights that changed: before a graph that is to read them, not to make them."""
        if self.scaling is None:
            return
        for i, layer in enumerate(self.encoder.layer):
            for j, weights in enumerate(layer.linear_weights()):
                fp8.quantise_weight(weights, self.scaling.slot(fp8.LINEARS_PER_LAYER * i + j))

    def _encode_fp8(
        self, hidden_TD: Tensor, batch: Batch, dropout: Dropout | None, last_rows: Tensor | None, scaling: fp8.Scaling
    ) -> Tensor:
        layers = self.encoder.layer
        hidden = fp8.Hidden(hidden_TD, hidden_TD, None)
        slots = [scaling.slot(i) for i in range(fp8.LINEARS_PER_LAYER * len(layers))]
        for i, layer in enumerate(layers):
            own, last = slots[fp8.LINEARS_PER_LAYER * i :][: fp8.LINEARS_PER_LAYER + 1], i == len(layers) - 1
            next_slot = None if last else own.pop()
            hidden = layer.forward_fp8(hidden, batch, dropout, last_rows if last else None, own, next_slot)
        return hidden.residual
