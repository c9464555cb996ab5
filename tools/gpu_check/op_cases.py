"""Every op as the model calls it: arguments of real shapes, and the arithmetic and memory traffic that it must have.

Traffic counts each tensor that has to be read or written once, what the backward pass needs of the forward pass
included; an implementation that moves more reaches a smaller rate.

Legend: S sequences, T tokens, M masked tokens, N heads, H head size, D hidden, F inner size, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlbert.config.bert_config import BertConfig
from mlbert.data.loading.batches import Batch
from mlbert.models.flops import BatchWork
from mlbert.ops.api import dropout_key

SEED = 5


@dataclass(frozen=True)
class Cost:
    """FLOPs, or bytes where `flops` is 0, of the forward and of the backward pass."""

    flops: tuple[float, float] = (0.0, 0.0)
    bytes: tuple[float, float] = (0.0, 0.0)

    def rate(self, seconds: float, which: slice) -> tuple[float, str]:
        """(TFLOP/s or TB/s, unit) of the forward ([0:1]), the backward ([1:2]) or both passes ([0:2])."""
        computes = any(self.flops)
        amounts = self.flops if computes else self.bytes
        return sum(list(amounts)[which]) / seconds / 1e12, "TFLOP/s" if computes else "TB/s"


@dataclass(frozen=True)
class Case:
    """One call of an op.

    Attributes:
        op: its name in the registry.
        name: of this variant.
        arguments: draw -> the positional arguments; floating ones are of the wanted type, other numbers each draw.
        gradient_of: places of the arguments whose gradients are taken.
        cost: of one call.
    """

    op: str
    name: str
    arguments: Callable[[int], tuple[Any, ...]]
    gradient_of: tuple[int, ...]
    cost: Cost


class OpCases:
    """The ops' cases for one batch of a model in one precision.

    Args:
        config: shape of the model.
        batch: on the device; gives T, M and the lengths.
        dtype: of the activations.
    """

    def __init__(self, config: BertConfig, batch: Batch, dtype: torch.dtype) -> None:
        self.config, self.batch, self.dtype = config, batch, dtype
        self.device = batch.input_ids.device
        self.element = torch.finfo(dtype).bits // 8
        self.work = BatchWork.of(batch)
        self._key = dropout_key(SEED, 1, 2, 3)

    def random(self, *shape: int, dtype: torch.dtype | None = None, draw: int = 0) -> Tensor:
        """Normal numbers on the device, rounded to bfloat16 first; the same for the same shape and draw."""
        generator = torch.Generator(self.device).manual_seed(SEED + sum(shape) + (draw << 32))
        values = torch.randn(shape, generator=generator, device=self.device).bfloat16()
        return values.to(dtype or self.dtype)

    def all(self) -> list[Case]:
        """The cases whose speed matters, at the model's dropout rates."""
        return [
            self.attention(self.config.attention_probs_dropout_prob),
            self.dropout_add_layer_norm(),
            self.layer_norm_dropout(),
            self.masked_cross_entropy(),
            self.embedding_sum(),
            self.linear_qkv(),
            self.linear_gelu(),
            self.feed_forward(),
        ]

    def attention(self, dropout: float, alibi: bool = False) -> Case:
        """Backward: five products where forward has two."""
        config, batch = self.config, self.batch
        shape = (batch.num_tokens, 3, config.num_attention_heads, config.head_size)
        flops = 4.0 * self.work.squared_lengths * config.hidden_size

        def arguments(draw: int) -> tuple[Any, ...]:
            slopes = torch.linspace(0.5, 0.01, shape[2], device=self.device) if alibi else None
            rows = batch.dropout_rows
            return (
                self.random(*shape, draw=draw),
                batch.cu_seqlens,
                batch.max_seqlen,
                dropout,
                self._key,
                rows,
                slopes,
            )

        name = f"attention{'' if dropout else ' without dropout'}{' with ALiBi' if alibi else ''}"
        return Case("attention", name, arguments, (0,), Cost(flops=(flops, 2.5 * flops)))

    def dropout_add_layer_norm(self) -> Case:
        """Reads x and the residual, writes their sum and the result; backward reads two and writes two."""
        size, tokens = self.config.hidden_size, self.batch.num_tokens
        moved = 4.0 * tokens * size * self.element

        def arguments(draw: int) -> tuple[Any, ...]:
            weight, bias, x_bias = (self.random(size, dtype=torch.float32, draw=3 * draw + i) for i in range(3))
            x, residual = self.random(tokens, size, draw=draw), self.random(tokens, size, draw=draw).flip(0)
            probability = self.config.hidden_dropout_prob
            return (x, residual, weight, bias, 1e-12, probability, self._key, self.batch.dropout_rows, x_bias)

        cost = Cost(bytes=(moved, moved))
        return Case("dropout_add_layer_norm", "dropout_add_layer_norm", arguments, (0, 1, 2, 3, 8), cost)

    def layer_norm_dropout(self) -> Case:
        """The embeddings' norm, float32."""
        size, tokens = self.config.hidden_size, self.batch.num_tokens
        moved = 4.0 * tokens * size

        def arguments(draw: int) -> tuple[Any, ...]:
            weight, bias = (
                self.random(size, dtype=torch.float32, draw=draw),
                self.random(size, dtype=torch.float32, draw=draw).flip(0),
            )
            x, probability = self.random(tokens, size, dtype=torch.float32, draw=draw), self.config.hidden_dropout_prob
            return (x, weight, bias, 1e-12, probability, self._key, self.batch.dropout_rows)

        cost = Cost(bytes=(2 * moved, 3 * moved))
        return Case("layer_norm_dropout", "layer_norm_dropout", arguments, (0, 1, 2), cost)

    def masked_cross_entropy(self) -> Case:
        """Reads the logits; backward reads them and writes the gradient over them."""
        shape = (self.batch.num_masked, self.config.padded_vocab_size)
        moved = float(shape[0] * shape[1] * self.element)

        def arguments(draw: int) -> tuple[Any, ...]:
            return (self.random(*shape, draw=draw), self.batch.masked_labels, self.config.vocab_size)

        cost = Cost(bytes=(moved, 2 * moved))
        return Case("masked_cross_entropy", "masked_cross_entropy", arguments, (0,), cost)

    def embedding_sum(self) -> Case:
        """Float32 tables. Counts a word row and a result a token; backward a gradient a token and the word table."""
        config, batch, size = self.config, self.batch, self.config.hidden_size
        moved = 4.0 * batch.num_tokens * size
        table = 4.0 * config.padded_vocab_size * size

        def arguments(draw: int) -> tuple[Any, ...]:
            rows = (config.padded_vocab_size, config.max_position_embeddings, config.type_vocab_size)
            tables = (self.random(n, size, dtype=torch.float32, draw=draw) for n in rows)
            return (batch.input_ids, batch.segment_ids, batch.position_ids, *tables)

        cost = Cost(bytes=(2 * moved, moved + table))
        return Case("embedding_sum", "embedding_sum", arguments, (3, 4, 5), cost)

    def linear_qkv(self) -> Case:
        """Three weights and biases in float32, cast in the op."""
        size, tokens = self.config.hidden_size, self.batch.num_tokens
        flops = 2.0 * tokens * size * 3 * size

        def arguments(draw: int) -> tuple[Any, ...]:
            weights = (self.random(size, size, dtype=torch.float32, draw=draw) * size**-0.5 for _ in range(3))
            biases = (self.random(size, dtype=torch.float32, draw=draw) for _ in range(3))
            return (self.random(tokens, size, draw=draw), *weights, *biases)

        return Case("linear_qkv", "linear_qkv", arguments, tuple(range(7)), Cost(flops=(flops, 2 * flops)))

    def linear_gelu(self) -> Case:
        """Weight and bias in float32, cast in the op."""
        size, inner, tokens = self.config.hidden_size, self.config.intermediate_size, self.batch.num_tokens
        flops = 2.0 * tokens * size * inner

        def arguments(draw: int) -> tuple[Any, ...]:
            weight = self.random(inner, size, dtype=torch.float32, draw=draw) * size**-0.5
            return (
                self.random(tokens, size, draw=draw),
                weight,
                self.random(inner, dtype=torch.float32, draw=draw),
                False,
            )

        return Case("linear_gelu", "linear_gelu", arguments, (0, 1, 2), Cost(flops=(flops, 2 * flops)))

    def feed_forward(self) -> Case:
        """Two products; weights and bias in float32, cast in the op."""
        size, inner, tokens = self.config.hidden_size, self.config.intermediate_size, self.batch.num_tokens
        flops = 4.0 * tokens * size * inner

        def arguments(draw: int) -> tuple[Any, ...]:
            w1 = self.random(inner, size, dtype=torch.float32, draw=draw) * size**-0.5
            w2 = self.random(size, inner, dtype=torch.float32, draw=draw) * inner**-0.5
            bias = self.random(inner, dtype=torch.float32, draw=draw)
            return (self.random(tokens, size, draw=draw), w1, bias, w2, False)

        return Case("feed_forward", "feed_forward", arguments, (0, 1, 2, 3), Cost(flops=(flops, 2 * flops)))
