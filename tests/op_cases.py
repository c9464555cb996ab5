"""The ops as the model calls them: arguments of real shapes.

Legend: S sequences, T tokens, M masked tokens, N heads, H head size, D hidden, F inner size,
V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import Batch
from mlbert.ops.api import dropout_key

SEED = 5


@dataclass(frozen=True)
class Case:
    """One call of an op.

    Attributes:
        op: name in the registry.
        arguments: returns the positional arguments of a draw; each draw has other numbers.
        gradient_of: positions of the arguments whose gradients are computed.
        variant: added to the op's name.
    """

    op: str
    arguments: Callable[[int], tuple[Any, ...]]
    gradient_of: tuple[int, ...]
    variant: str = ""

    @property
    def name(self) -> str:
        """Return the name of the op and the variant."""
        return self.op + self.variant


class OpCases:
    """The ops' cases for one batch of a model in one precision.

    Args:
        config: shape of the model.
        batch: batch on the device.
        dtype: dtype of the activations.
    """

    def __init__(self, config: BertConfig, batch: Batch, dtype: torch.dtype) -> None:
        self.config = config
        self.batch = batch
        self.dtype = dtype
        self.device = batch.input_ids.device
        self._key = dropout_key(SEED, 1, 2, 3)

    def random(self, *shape: int, dtype: torch.dtype | None = None, draw: int = 0) -> Tensor:
        """Return normal numbers rounded to bfloat16, always the same for a shape and draw."""
        generator = torch.Generator(self.device).manual_seed(SEED + sum(shape) + (draw << 32))
        values = torch.randn(shape, generator=generator, device=self.device).bfloat16()
        return values.to(dtype or self.dtype)

    def all(self) -> list[Case]:
        """Return a case of each of these ops, with the model's dropout rates."""
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
        """Return a case with this dropout rate, with or without ALiBi's slopes."""
        config = self.config
        batch = self.batch
        heads = config.num_attention_heads

        def arguments(draw: int) -> tuple[Any, ...]:
            slopes = torch.linspace(0.5, 0.01, heads, device=self.device) if alibi else None
            return (
                self.random(batch.num_tokens, 3, heads, config.head_size, draw=draw),
                batch.cu_seqlens,
                batch.max_seqlen,
                dropout,
                self._key,
                batch.dropout_rows,
                slopes,
            )

        variant = f"{'' if dropout else ' without dropout'}{' with ALiBi' if alibi else ''}"
        return Case("attention", arguments, (0,), variant)

    def dropout_add_layer_norm(self) -> Case:
        """Return a case with a residual and a bias of x."""
        size = self.config.hidden_size
        tokens = self.batch.num_tokens

        def arguments(draw: int) -> tuple[Any, ...]:
            weight = self.random(size, dtype=torch.float32, draw=3 * draw)
            bias = self.random(size, dtype=torch.float32, draw=3 * draw + 1)
            x_bias = self.random(size, dtype=torch.float32, draw=3 * draw + 2)
            x = self.random(tokens, size, draw=draw)
            residual = self.random(tokens, size, draw=draw).flip(0)
            probability = self.config.hidden_dropout_prob
            return (
                x,
                residual,
                weight,
                bias,
                1e-12,
                probability,
                self._key,
                self.batch.dropout_rows,
                x_bias,
            )

        return Case("dropout_add_layer_norm", arguments, (0, 1, 2, 3, 8))

    def layer_norm_dropout(self) -> Case:
        """Return the case of the embeddings' norm, in float32."""
        size = self.config.hidden_size
        tokens = self.batch.num_tokens

        def arguments(draw: int) -> tuple[Any, ...]:
            x = self.random(tokens, size, dtype=torch.float32, draw=draw)
            weight = self.random(size, dtype=torch.float32, draw=draw)
            bias = weight.flip(0)
            probability = self.config.hidden_dropout_prob
            return (x, weight, bias, 1e-12, probability, self._key, self.batch.dropout_rows)

        return Case("layer_norm_dropout", arguments, (0, 1, 2))

    def masked_cross_entropy(self) -> Case:
        """Return a case with the masked tokens of the batch."""
        num_masked = self.batch.num_masked
        columns = self.config.padded_vocab_size

        def arguments(draw: int) -> tuple[Any, ...]:
            return (
                self.random(num_masked, columns, draw=draw),
                self.batch.masked_labels,
                self.config.vocab_size,
            )

        return Case("masked_cross_entropy", arguments, (0,))

    def embedding_sum(self) -> Case:
        """Return a case with float32 tables."""
        config = self.config
        batch = self.batch
        size = self.config.hidden_size

        def arguments(draw: int) -> tuple[Any, ...]:
            rows = (
                config.padded_vocab_size,
                config.max_position_embeddings,
                config.type_vocab_size,
            )
            tables = (self.random(n, size, dtype=torch.float32, draw=draw) for n in rows)
            return (batch.input_ids, batch.segment_ids, batch.position_ids, *tables)

        return Case("embedding_sum", arguments, (3, 4, 5))

    def linear_qkv(self) -> Case:
        """Return a case with separate parameters for Q, K and V."""
        size = self.config.hidden_size
        return self._linear("linear_qkv", [(size, size)] * 3 + [(size,)] * 3)

    def linear_gelu(self) -> Case:
        """Return a case with the approximate GELU."""
        size = self.config.hidden_size
        inner = self.config.intermediate_size
        return self._linear("linear_gelu", [(inner, size), (inner,)], False)

    def feed_forward(self) -> Case:
        """Return a case with the approximate GELU between its two products."""
        size = self.config.hidden_size
        inner = self.config.intermediate_size
        return self._linear("feed_forward", [(inner, size), (inner,), (size, inner)], False)

    def _linear(self, op: str, shapes: list[tuple[int, ...]], *flags: bool) -> Case:
        """Return the case of an op on x [T, D] with float32 parameters of these shapes,
        which the op casts.
        """
        tokens = self.batch.num_tokens

        def parameter(shape: tuple[int, ...], draw: int) -> Tensor:
            values = self.random(*shape, dtype=torch.float32, draw=draw)
            return values * shape[1] ** -0.5 if len(shape) == 2 else values

        def arguments(draw: int) -> tuple[Any, ...]:
            x = self.random(tokens, self.config.hidden_size, draw=draw)
            return (x, *(parameter(shape, draw) for shape in shapes), *flags)

        return Case(op, arguments, tuple(range(1 + len(shapes))))
