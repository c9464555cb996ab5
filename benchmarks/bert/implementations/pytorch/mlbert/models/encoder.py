"""The encoder on the flat token stream of `Batch`:
embeddings and layers, in the shapes of `BertConfig`.

Nothing is padded: attention is bounded by ``cu_seqlens``, and the last layer runs per-token work
only for the tokens that the heads read. In 16-bit precision LayerNorm is Composer's low-precision
LayerNorm, or fused: it reads and writes 16 bits and computes in float32.

Each layer computes its four linear layers through a `LayerLinears`, in the activations' dtype
(`PlainLinears`) or in FP8 (`Fp8Linears`). The latter owns the FP8 state: scales from the magnitudes
of past steps, and the FP8 copies of the weights (`mlbert.ops.fp8_scaling`).

Legend: S sequences, T tokens, R requested rows, D hidden, N heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import Batch
from mlbert.ops import api as ops
from mlbert.ops import cublaslt, fp8, qkv_attention
from mlbert.ops.fp8_scaling import LINEARS_PER_LAYER, FP8Scaling, Products, Quantized

# Linear layers of one encoder layer, in the order of the FP8 scales;
# the last is the first of the next layer.
QKV, ATTENTION_OUTPUT, INTERMEDIATE, OUTPUT, NEXT_QKV = range(5)

# Dropout sites of one layer; the embeddings and heads are layer 0. Each site draws a separate mask.
SITE_EMBEDDINGS, SITE_ATTENTION, SITE_ATTENTION_OUTPUT, SITE_OUTPUT = range(4)
SITE_CLASSIFIER = 1  # of layer 0
NUM_SITES = 4  # in each layer

# For each encoder layer, for each of its linear layers: the tensors that make up its weight.
LayerWeights = Iterable[Sequence[Sequence[Tensor]]]


class Hidden(NamedTuple):
    """A hidden state [T, D] with two readers; the function that produced it adds their gradients.

    Attributes:
        residual: for the residual sum.
        product: the same values, for the next linear layer.
        small: their FP8 copies with that layer's scale, or None if that layer has to quantize them.
    """

    residual: Tensor
    product: Tensor
    small: Quantized | None = None


class LayerLinears:
    """The four linear layers of one encoder layer, with products in the activations' dtype."""

    def qkv(self, hidden: Hidden, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
        """Return query, key and value, [T, 3 D]; see `mlbert.ops.api.linear_qkv`."""
        return ops.linear_qkv(hidden.product, *weights, *biases)

    def attend(
        self,
        hidden: Hidden,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        num_heads: int,
        arguments: ops.AttentionArguments,
    ) -> Tensor | None:
        """Return attention of query, key and value, [T, N, H], if one op computes both; else
        None.
        """
        form = qkv_attention.chosen(qkv_attention.OP, hidden.product, num_heads)
        if form is None:
            return ops.native_qkv_attention(hidden.product, weights, biases, num_heads, arguments)
        return cublaslt.qkv_attention(form, hidden.product, weights, biases, num_heads, arguments)

    def attend_some(
        self,
        hidden: Hidden,
        tokens: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        num_heads: int,
        arguments: ops.AttentionArguments,
    ) -> tuple[Tensor, Tensor] | None:
        """Return attention and hidden state of some tokens, [R, N, H] and [R, D], if one op
        computes both; else None.
        """
        return ops.native_attention_of_some(
            hidden.product, tokens, weights, biases, num_heads, arguments
        )

    def product(self, which: int, x: Tensor, weight: Tensor) -> Tensor:
        """Return x W^T for linear layer ``which``."""
        return ops.linear(x, weight)

    def feed_forward(self, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, exact: bool) -> Tensor:
        """Return both feed-forward products with GELU between them; see
        `mlbert.ops.api.feed_forward`.
        """
        return ops.feed_forward(x, w1, b1, w2, exact)

    def gated_feed_forward(
        self, x: Tensor, w1: Tensor, w2: Tensor, exact: bool, mask: Mask
    ) -> Tensor:
        """Return both products with a gated GELU and dropout between them.

        See `mlbert.ops.api.gated_feed_forward`.
        """
        return ops.gated_feed_forward(x, w1, w2, exact, *mask)

    def attention_output_norm(
        self, context: Tensor, residual: Tensor, weight: Tensor, norm: Sequence[Any]
    ) -> Hidden:
        """Return LayerNorm(residual + dropout(context W^T + b)).

        Args:
            norm: arguments of `mlbert.ops.api.dropout_add_layer_norm` from ``weight`` on;
                b is the last one.
        """
        return Hidden(*ops.linear_norm(context, weight, residual, *norm))

    def feed_forward_norm(
        self, hidden: Hidden, weights: Sequence[Tensor], exact: bool, norm: Sequence[Any]
    ) -> Hidden:
        """Return LayerNorm(residual + dropout(feed-forward + b));
        ``weights`` are w1, b1, w2, ``norm`` as above.
        """
        w1, b1, w2 = weights
        return Hidden(
            *ops.feed_forward_norm(hidden.product, hidden.residual, w1, b1, w2, exact, *norm)
        )


class _SomeFp8(LayerLinears):
    """Linear layers with only some products in FP8: each is a separate autograd function."""

    def __init__(self, table: FP8Scaling, first: int) -> None:
        self._table = table
        self._first = first

    def qkv(self, hidden: Hidden, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
        return fp8.linear(
            hidden.product, weights, biases, self._table, self._first + QKV, hidden.small
        )

    def attend(
        self,
        hidden: Hidden,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        num_heads: int,
        arguments: ops.AttentionArguments,
    ) -> Tensor | None:
        form = qkv_attention.chosen(qkv_attention.FP8_OP, hidden.product, num_heads)
        if form is None or not self._table.products_of(self._first + QKV).all:
            return None
        return fp8.attention(
            form,
            hidden.product,
            weights,
            biases,
            num_heads,
            arguments,
            self._table,
            self._first + QKV,
            hidden.small,
        )

    def attend_some(
        self,
        hidden: Hidden,
        tokens: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        num_heads: int,
        arguments: ops.AttentionArguments,
    ) -> tuple[Tensor, Tensor] | None:
        return None

    def product(self, which: int, x: Tensor, weight: Tensor) -> Tensor:
        return fp8.linear(x, (weight,), (), self._table, self._first + which)

    def feed_forward(self, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, exact: bool) -> Tensor:
        pre = fp8.linear(x, (w1,), (b1,), self._table, self._first + INTERMEDIATE)
        return self.product(OUTPUT, F.gelu(pre, approximate="none" if exact else "tanh"), w2)

    def gated_feed_forward(
        self, x: Tensor, w1: Tensor, w2: Tensor, exact: bool, mask: Mask
    ) -> Tensor:
        pre = self.product(INTERMEDIATE, x, w1)
        inner = ops.apply_dropout(ops.gated_gelu(pre, exact), *mask)
        return self.product(OUTPUT, inner, w2)

    def attention_output_norm(
        self, context: Tensor, residual: Tensor, weight: Tensor, norm: Sequence[Any]
    ) -> Hidden:
        x = self.product(ATTENTION_OUTPUT, context, weight)
        return Hidden(*ops.dropout_add_layer_norm_twice(x, residual, *norm))

    def feed_forward_norm(
        self, hidden: Hidden, weights: Sequence[Tensor], exact: bool, norm: Sequence[Any]
    ) -> Hidden:
        w1, b1, w2 = weights
        x = self.feed_forward(hidden.product, w1, b1, w2, exact)
        return Hidden(*ops.dropout_add_layer_norm_twice(x, hidden.residual, *norm))


class _AllFp8(_SomeFp8):
    """Linear layers with all products in FP8: one autograd function each with the LayerNorm after
    them.
    """

    def attention_output_norm(
        self, context: Tensor, residual: Tensor, weight: Tensor, norm: Sequence[Any]
    ) -> Hidden:
        row = self._first + ATTENTION_OUTPUT
        reader = self._first + INTERMEDIATE
        return Hidden(
            *fp8.attention_output(context, residual, weight, norm, self._table, row, reader)
        )

    def feed_forward_norm(
        self, hidden: Hidden, weights: Sequence[Tensor], exact: bool, norm: Sequence[Any]
    ) -> Hidden:
        row = self._first + INTERMEDIATE
        next_qkv = self._first + NEXT_QKV
        is_last_layer = next_qkv >= self._table.num_linears
        assert hidden.small is not None, "attention_output_norm sets it"
        return Hidden(
            *fp8.feed_forward(
                hidden.product,
                hidden.residual,
                hidden.small,
                weights,
                exact,
                norm,
                self._table,
                row,
                None if is_last_layer else next_qkv,
            )
        )


class NoDerivedState:
    """A model, or its linear layers, with nothing derived from the weights:
    nothing to measure or to save.

    The methods are documented in `mlbert.ops.fp8_scaling.FP8Scaling`.
    """

    is_calibrated = True

    def weights_changed(self) -> None: ...

    def end_step(self, over_ranks: Callable[[Tensor], Any]) -> None: ...

    def forget_step(self) -> None: ...

    def derived_state(self) -> dict[str, Tensor]:
        return {}

    def load_derived_state(self, state: Mapping[str, Tensor]) -> None: ...


class PlainLinears(NoDerivedState, nn.Module):
    """Linear layers without FP8 state. The methods are documented in `Fp8Linears`."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self._num_layers = num_layers

    def layers(self) -> list[LayerLinears]:
        """Return the linear layers of each encoder layer, for this pass."""
        return [LayerLinears()] * self._num_layers

    def refresh(self, weights: LayerWeights) -> None: ...


class Fp8Linears(FP8Scaling):
    """FP8 scales and weight copies of all linear layers; ``products`` run in FP8."""

    def __init__(self, num_layers: int, products: Products) -> None:
        super().__init__(LINEARS_PER_LAYER * num_layers, products)

    def layers(self) -> list[LayerLinears]:
        """Return the linear layers of each encoder layer, for this pass."""
        kind = _AllFp8 if self.products.all else _SomeFp8
        return [kind(self, first) for first in range(0, self.num_linears, LINEARS_PER_LAYER)]

    def refresh(self, weights: LayerWeights) -> None:
        """Rebuild the outdated FP8 copies of the weights now."""
        self.note_pass()
        for row, parts in enumerate(linear for layer in weights for linear in layer):
            products = self.products_of(row)
            if products.forward or products.input_gradient:
                fp8.quantize_weight(parts, self, row)


def linears(num_layers: int, products: Products | None) -> PlainLinears | Fp8Linears:
    """Return the linear layers of an encoder, with these ``products`` in FP8 (None: no product)."""
    return Fp8Linears(num_layers, products) if products else PlainLinears(num_layers)


# The 32-bit dropout keys of a step, used as keys[layer][site]: an int32 table on the device, which
# a CUDA graph rereads at each replay, or numbers on the host, which C kernels need. None in
# evaluation.
Keys = Tensor | Sequence[Sequence[int]]
# Identifies one dropout mask: probability, key, and the mask row of each token.
Mask = tuple[float, ops.Key, Tensor]


class Positions(NamedTuple):
    """Position information for the attention of one layer; None for the kinds that it does not use.

    Attributes:
        order: `mlbert.ops.api.sequence_order` of the batch.
        slopes: ALiBi's, float32 [N].
        rotations: `mlbert.ops.api.rotations` of the batch.
        window: keys that a query sees on each side.
    """

    order: Tensor
    slopes: Tensor | None
    rotations: Tensor | None = None
    window: int | None = None


def new_layer_norm(config: BertConfig) -> nn.LayerNorm:
    """Return a LayerNorm of the hidden size, with a bias if the model's have one."""
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.norm_bias)


class BertEmbeddings(nn.Module):
    """Sum of word embeddings and, if the model has them,
    segment and position embeddings; LayerNorm; dropout.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        if config.position_embedding_type == "absolute":
            self.position_embeddings = nn.Embedding(
                config.max_position_embeddings, config.hidden_size
            )
        if not config.is_rotary:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = new_layer_norm(config)

    def forward(self, batch: Batch, keys: Keys | None) -> Tensor:
        """Return float32 [T, D]."""
        total = self._total(batch)
        mask = _mask(self.config.embedding_dropout, keys, 0, SITE_EMBEDDINGS, batch.dropout_rows)
        return ops.layer_norm_dropout(
            total, self.LayerNorm.weight, self.LayerNorm.bias, self.LayerNorm.eps, *mask
        )

    def _total(self, batch: Batch) -> Tensor:
        if self.config.is_rotary:
            return F.embedding(batch.input_ids, self.word_embeddings.weight)
        learned = self.config.position_embedding_type == "absolute"
        has_segments = self.config.type_vocab_size > 1  # RoBERTa has one for both sentences
        segment_ids = batch.segment_ids if has_segments else torch.zeros_like(batch.segment_ids)
        return ops.embedding_sum(
            batch.input_ids,
            segment_ids,
            batch.position_ids,
            self.word_embeddings.weight,
            self.position_embeddings.weight if learned else None,
            self.token_type_embeddings.weight,
        )


class _SelfAttention(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.query = nn.Linear(size, size, bias=config.attention_bias)
        self.key = nn.Linear(size, size, bias=config.attention_bias)
        self.value = nn.Linear(size, size, bias=config.attention_bias)


class Dense(nn.Module):
    """A linear layer, with a LayerNorm of D columns before it (``norm`` "pre"),
    after it ("post"), or none (None).
    """

    def __init__(
        self, config: BertConfig, columns: int, rows: int, *, norm: str | None, bias: bool = True
    ) -> None:
        super().__init__()
        # The definition order is the order of initialization and of the flat buffer.
        if norm == "pre":
            self.LayerNorm = new_layer_norm(config)
        self.dense = nn.Linear(columns, rows, bias=bias)
        if norm == "post":
            self.LayerNorm = new_layer_norm(config)


def _output(config: BertConfig, columns: int, *, bias: bool) -> Dense:
    """Return a linear layer whose output is added to a residual,
    with a LayerNorm after that in post-norm models.
    """
    norm = "post" if config.norm_position == "post" else None
    return Dense(config, columns, config.hidden_size, norm=norm, bias=bias)


class _Attention(nn.Module):
    def __init__(self, config: BertConfig, index: int) -> None:
        super().__init__()
        if config.norm_position == "pre" and not (config.is_rotary and index == 1):
            self.LayerNorm = new_layer_norm(config)
        self.self = _SelfAttention(config)
        self.output = _output(config, config.hidden_size, bias=config.attention_bias)


class BertLayer(nn.Module):
    """One encoder layer. ``index`` counts from 1: layer 0 of the dropout keys is the embeddings."""

    def __init__(self, config: BertConfig, index: int) -> None:
        super().__init__()
        self.config = config
        self.index = index
        self.attention = _Attention(config, index)
        self.intermediate = Dense(
            config,
            config.hidden_size,
            config.inner_rows,
            norm="pre" if config.norm_position == "pre" else None,
            bias=not config.gated_mlp or config.gated_bias,
        )
        self.output = _output(config, config.intermediate_size, bias=config.mlp_bias)

    def forward(
        self,
        hidden: Hidden,
        batch: Batch,
        keys: Keys | None,
        positions: Positions,
        rows: Tensor | None,
        linears: LayerLinears,
    ) -> Hidden:
        """Encode all tokens, or only those at ``rows`` (int64 [R]);
        attention always reads all tokens.

        Args:
            hidden: [T, D] in the compute precision.
            positions: for attention.
            linears: how the linear layers are computed.

        Returns:
            [T, D], or [R, D] if ``rows`` is given.
        """
        hidden = self._sublayer_input(hidden, self.attention)
        context_TD, residual_TD = self._attend(hidden, batch, keys, positions, rows, linears)
        dropout_rows = batch.dropout_rows
        if rows is not None:
            dropout_rows = dropout_rows.index_select(0, rows)
        is_post = self.config.norm_position == "post"
        part = self.attention.output
        probability = self.config.attention_output_dropout
        mask = _mask(probability, keys, self.index, SITE_ATTENTION_OUTPUT, dropout_rows)
        if is_post:
            norm = _norm_arguments(part, mask)
            hidden = linears.attention_output_norm(context_TD, residual_TD, part.dense.weight, norm)
        else:
            hidden = _sum(
                residual_TD,
                linears.product(ATTENTION_OUTPUT, context_TD, part.dense.weight),
                part,
                mask,
            )
        hidden = self._sublayer_input(hidden, self.intermediate)
        mask = _mask(self.config.hidden_dropout_prob, keys, self.index, SITE_OUTPUT, dropout_rows)
        if self.config.gated_mlp:
            inner_TD = self._gated(hidden.product, mask, linears)
            mask = (0.0, 0, dropout_rows)
        elif is_post:
            norm = _norm_arguments(self.output, mask)
            return linears.feed_forward_norm(
                hidden, self._feed_forward_weights(), self.config.exact_gelu, norm
            )
        else:
            weights = self._feed_forward_weights()
            inner_TD = linears.feed_forward(hidden.product, *weights, self.config.exact_gelu)
        if is_post:
            norm = _norm_arguments(self.output, mask)
            return Hidden(*ops.dropout_add_layer_norm_twice(inner_TD, hidden.residual, *norm))
        return _sum(hidden.residual, inner_TD, self.output, mask)

    def linear_weights(self) -> tuple[list[Tensor], ...]:
        """Return the weights of the four linear layers, each as a list of tensors (query, key,
        value for the first).
        """
        dense = (self.attention.output.dense, self.intermediate.dense, self.output.dense)
        return (self._qkv_parameters()[0], *([part.weight] for part in dense))

    def _qkv_parameters(self) -> tuple[list[Tensor], list[Tensor]]:
        parts = (self.attention.self.query, self.attention.self.key, self.attention.self.value)
        return [part.weight for part in parts], [
            part.bias for part in parts if part.bias is not None
        ]

    def _feed_forward_weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self.intermediate.dense.weight,
            self.intermediate.dense.bias,
            self.output.dense.weight,
        )

    def _attend(
        self,
        hidden: Hidden,
        batch: Batch,
        keys: Keys | None,
        positions: Positions,
        rows: Tensor | None,
        linears: LayerLinears,
    ) -> tuple[Tensor, Tensor]:
        """Return attention and the residual, [T, D] each, or [R, D] if ``rows`` is given."""
        weights, biases = self._qkv_parameters()
        num_heads = self.config.num_attention_heads
        probability = self.config.attention_probs_dropout_prob
        mask = _mask(probability, keys, self.index, SITE_ATTENTION, batch.dropout_rows)
        context_TNH = None
        if biases and positions.window is None and positions.rotations is None:
            arguments = ops.AttentionArguments(
                batch.cu_seqlens, batch.max_seqlen, *mask, positions.slopes, positions.order
            )
            if rows is not None and self.config.norm_position == "post":
                some = linears.attend_some(hidden, rows, weights, biases, num_heads, arguments)
                if some is not None:
                    context_RNH, residual_RD = some
                    return context_RNH.flatten(1), residual_RD
            context_TNH = linears.attend(hidden, weights, biases, num_heads, arguments)
        if context_TNH is None:
            qkv = linears.qkv(hidden, weights, biases)
            context_TNH = ops.attention(
                qkv.view(-1, 3, num_heads, self.config.head_size),
                batch.cu_seqlens,
                batch.max_seqlen,
                *mask,
                positions.slopes,
                window=positions.window,
                rotations=positions.rotations,
                order=positions.order,
            )
        context_TD = context_TNH.reshape(-1, self.config.hidden_size)
        if rows is None:
            return context_TD, hidden.residual
        return context_TD.index_select(0, rows), hidden.residual.index_select(0, rows)

    def _gated(self, x: Tensor, mask: Mask, linears: LayerLinears) -> Tensor:
        """Return dropout(gelu(x A + a) * (x B + b)) W; most models have no a and b."""
        bias = cast(Tensor | None, self.intermediate.dense.bias)
        if bias is not None:
            pre = linears.product(INTERMEDIATE, x, self.intermediate.dense.weight)
            gated = ops.gated_gelu(pre + bias.to(pre.dtype), self.config.exact_gelu)
            inner = ops.apply_dropout(gated, *mask)
            return linears.product(OUTPUT, inner, self.output.dense.weight)
        return linears.gated_feed_forward(
            x,
            self.intermediate.dense.weight,
            self.output.dense.weight,
            self.config.exact_gelu,
            mask,
        )

    def _sublayer_input(self, hidden: Hidden, part: _Attention | Dense) -> Hidden:
        """Return the input of a sublayer's product:
        the hidden state, or its LayerNorm in pre-norm models.
        """
        if self.config.norm_position == "post" or not hasattr(part, "LayerNorm"):
            return hidden
        return Hidden(hidden.residual, _layer_norm(hidden.residual, part.LayerNorm))


class _Encoder(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(
            BertLayer(config, i + 1) for i in range(config.num_hidden_layers)
        )
        if config.norm_position == "pre":
            self.LayerNorm = new_layer_norm(config)

    @property
    def layers(self) -> list[BertLayer]:
        return [cast(BertLayer, layer) for layer in self.layer]


class BertModel(nn.Module):
    """Embeddings, encoder and, for heads that read [CLS], the pooler's weights.

    Args:
        config: shape.
        dtype: of activations and products.
        products: the products that run in FP8, or None.
        pooled: whether the model has a pooler.

    Attributes:
        linears: the encoder's linear layers and their FP8 state.
    """

    def __init__(
        self, config: BertConfig, dtype: torch.dtype, products: Products | None, pooled: bool
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.embeddings = BertEmbeddings(config)
        self.encoder = _Encoder(config)
        if pooled:
            self.pooler = Dense(config, config.hidden_size, config.hidden_size, norm=None)
        self.use_linears(products)
        slopes = torch.tensor(config.alibi_slopes) if config.alibi_slopes else None
        self.register_buffer("alibi_slopes", slopes, persistent=False)

    def forward(self, batch: Batch, keys: Keys | None, last_rows: Tensor | None) -> Tensor:
        """Return the last hidden states [T, D], or [R, D] for ``last_rows``,
        in the compute precision.
        """
        hidden_TD = self.embeddings(batch, keys).to(self.dtype)
        hidden = Hidden(hidden_TD, hidden_TD)
        layers = self.encoder.layers
        positions = self._positions(batch)
        for i, (layer, layer_linears) in enumerate(zip(layers, self.linears.layers(), strict=True)):
            rows = last_rows if i == len(layers) - 1 else None
            hidden = layer(hidden, batch, keys, positions[i], rows, layer_linears)
        if self.config.norm_position == "pre":
            return _layer_norm(hidden.residual, self.encoder.LayerNorm)
        return hidden.residual

    def _positions(self, batch: Batch) -> list[Positions]:
        """Return the position information of each layer. All layers share the order of the
        sequences, and those with one base its rotations.
        """
        config = self.config
        order = ops.sequence_order(batch.cu_seqlens)
        everywhere = Positions(order, cast(Tensor | None, self.alibi_slopes))
        if not config.is_rotary:
            return [everywhere] * config.num_hidden_layers
        rotations = self._rotations(batch, config.rope_theta)
        is_global = Positions(order, everywhere.slopes, rotations)
        if config.num_local_layers == 0:
            return [is_global] * config.num_hidden_layers
        if config.local_rope_theta != config.rope_theta:
            rotations = self._rotations(batch, config.local_rope_theta)
        is_local = Positions(order, everywhere.slopes, rotations, config.local_window)
        layers = range(config.num_hidden_layers)
        return [is_local if config.is_local(layer) else is_global for layer in layers]

    def _rotations(self, batch: Batch, theta: float) -> Tensor:
        config = self.config
        return ops.rotations(
            batch.position_ids, config.head_size, theta, config.rope_frequencies == "product"
        )

    def use_linears(self, products: Products | None) -> None:
        """Switch these products to FP8 (None: no product). Scales start uncalibrated."""
        device = self.embeddings.word_embeddings.weight.device
        self.linears = linears(len(self.encoder.layer), products).to(device)

    def refresh(self) -> None:
        """Rebuild the FP8 copies of weights that changed."""
        self.linears.refresh(layer.linear_weights() for layer in self.encoder.layers)


def _mask(probability: float, keys: Keys | None, layer: int, site: int, rows: Tensor) -> Mask:
    """Return the dropout mask of a site; without keys nothing is dropped."""
    if keys is None:
        return 0.0, 0, rows
    return probability, keys[layer][site], rows


def _norm_arguments(part: Dense, mask: Mask) -> tuple[Any, ...]:
    """Return the arguments of `mlbert.ops.api.dropout_add_layer_norm` from ``weight`` on,
    after this linear layer.
    """
    return part.LayerNorm.weight, part.LayerNorm.bias, part.LayerNorm.eps, *mask, part.dense.bias


def _sum(residual: Tensor, x: Tensor, part: Dense, mask: Mask) -> Hidden:
    """Return residual + dropout(x + bias), without a bias if the linear layer has none."""
    bias = cast(Tensor | None, part.dense.bias)
    if bias is not None:
        x = x + bias.to(x.dtype)
    total = ops.add_dropout(residual, x, *mask)
    return Hidden(total, total)


def _layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    return ops.layer_norm_dropout(x, norm.weight, norm.bias, norm.eps, 0.0, 0, None)
