"""BERT with masked-LM and next-sentence heads in plain TensorFlow; its input is `Rows`.

Weights are float32. The encoder's matrix products run in the compute precision. Softmax, LayerNorm,
GELU, residual sums and both heads, including the decoder's product, run in float32, as in Google's
model. All dimensions except B are static, so XLA compiles the entire model. The vocabulary is not
padded: matrices that the PyTorch model pads are cut.

The object tree yields checkpoint keys that `mlbert.models.weights.checkpoint_names.own_tf2_name`
reads. They are Google's names for everything that Google's checkpoints contain.

Legend: B rows, L tokens per row, P predictions per row, S sequences per row, T = B L, D hidden, N
heads, H head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from mlbert.config.bert_config import BertConfig
from mlbert.host.errors import UserError
from mlbert.models.weights.checkpoint_names import VOCABULARY, parameter_names
from tf2_bert.rows import Rows

Parameters = Iterator[tuple[str, tf.Variable]]

# Added to the score of a masked key: large enough that its probability is exactly 0, finite so that
# a token that sees no key does not produce NaN.
UNSEEN = -1e9
DROPOUT_PLACES_OF_LAYER = 3  # attention probabilities, attention output, output
_SUPPORTED = {
    "position_embedding_type": "absolute",
    "norm_position": "post",
    "gated_mlp": False,
    "tie_word_embeddings": True,
}


class Logits(NamedTuple):
    """Logits for every prediction slot and every sequence slot, including empty ones."""

    masked: tf.Tensor  # float32 [B P, V]
    next_sentence: tf.Tensor  # float32 [B S, 2]; column 1: sentence B is random


class _Draw:
    """Draw matrices from a normal distribution truncated at two deviations,
    each with its own seed.
    """

    def __init__(self, deviation: float, seed: int) -> None:
        self._deviation = deviation
        self._seed = seed
        self._count = 0

    def __call__(self, rows: int, columns: int) -> tf.Variable:
        key = tf.constant([self._seed, self._count], tf.int64)
        self._count += 1
        return tf.Variable(
            tf.random.stateless_truncated_normal([rows, columns], key, stddev=self._deviation)
        )


class _Dense(tf.Module):
    def __init__(self, draw: _Draw, columns: int, rows: int) -> None:
        super().__init__()
        self.kernel = draw(columns, rows)
        self.bias = tf.Variable(tf.zeros([rows]))

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        """Return x W + b in the precision of x, a matrix."""
        return tf.matmul(x, tf.cast(self.kernel, x.dtype)) + tf.cast(self.bias, x.dtype)

    def named(self, name: str) -> Parameters:
        yield f"{name}.weight", self.kernel
        yield f"{name}.bias", self.bias


class _LayerNorm(tf.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.gamma = tf.Variable(tf.ones([config.hidden_size]))
        self.beta = tf.Variable(tf.zeros([config.hidden_size]))
        self._eps = config.layer_norm_eps

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        """Normalize float32 x over the last dimension."""
        centred = x - tf.reduce_mean(x, -1, keepdims=True)
        variance = tf.reduce_mean(tf.square(centred), -1, keepdims=True)
        return centred * tf.math.rsqrt(variance + self._eps) * self.gamma + self.beta

    def named(self, name: str) -> Parameters:
        yield f"{name}.weight", self.gamma
        yield f"{name}.bias", self.beta


class _Embedding(tf.Module):
    def __init__(self, draw: _Draw, rows: int, columns: int) -> None:
        super().__init__()
        self.embeddings = draw(rows, columns)

    def __call__(self, ids: tf.Tensor) -> tf.Tensor:
        """Map ids int32 [T] to float32 [T, D]."""
        return _embedding_lookup(tf.convert_to_tensor(self.embeddings), ids)


class _EmbeddingsNorm(tf.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer_norm = _LayerNorm(config)


class _SelfAttention(tf.Module):
    def __init__(self, config: BertConfig, draw: _Draw) -> None:
        super().__init__()
        size = config.hidden_size
        self._heads = config.num_attention_heads
        self._head_size = config.head_size
        self._drop = config.attention_probs_dropout_prob
        self.query, self.key, self.value = (_Dense(draw, size, size) for _ in range(3))
        self.attention_output = _Dense(draw, size, size)

    def __call__(self, hidden_TD: tf.Tensor, bias: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        """Return attention with its output projection, [T, D];
        ``bias`` is added to the scores [B, N, L, L].
        """
        shape = [-1, bias.shape[-1], self._heads, self._head_size]
        query, key, value = (
            tf.reshape(part(hidden_TD), shape) for part in (self.query, self.key, self.value)
        )
        scores = tf.cast(tf.einsum("blnh,bmnh->bnlm", query, key), tf.float32) / math.sqrt(
            self._head_size
        )
        weights = _dropout(tf.nn.softmax(scores + bias), self._drop, seed)
        context = tf.einsum("bnlm,bmnh->blnh", tf.cast(weights, value.dtype), value)
        return self.attention_output(tf.reshape(context, tf.shape(hidden_TD)))


class _Layer(tf.Module):
    def __init__(self, config: BertConfig, draw: _Draw) -> None:
        super().__init__()
        self._drop = config.hidden_dropout_prob
        self._gelu = _gelu_of(config)
        self.self_attention = _SelfAttention(config, draw)
        self.self_attention_layer_norm = _LayerNorm(config)
        self.intermediate = _Dense(draw, config.hidden_size, config.intermediate_size)
        self.output = _Dense(draw, config.intermediate_size, config.hidden_size)
        self.output_layer_norm = _LayerNorm(config)

    def __call__(
        self, hidden_TD: tf.Tensor, bias: tf.Tensor, seeds: list[tf.Tensor | None]
    ) -> tf.Tensor:
        """Map [T, D] to [T, D] in the compute precision."""
        attended = self.self_attention(hidden_TD, bias, seeds[0])
        hidden_TD = self._add(attended, hidden_TD, self.self_attention_layer_norm, seeds[1])
        inner = tf.cast(
            self._gelu(tf.cast(self.intermediate(hidden_TD), tf.float32)), hidden_TD.dtype
        )
        return self._add(self.output(inner), hidden_TD, self.output_layer_norm, seeds[2])

    def _add(
        self, x: tf.Tensor, residual: tf.Tensor, norm: _LayerNorm, seed: tf.Tensor | None
    ) -> tf.Tensor:
        total = tf.cast(residual, tf.float32) + _dropout(tf.cast(x, tf.float32), self._drop, seed)
        return tf.cast(norm(total), residual.dtype)

    def named(self, name: str) -> Parameters:
        attention = self.self_attention
        for part in ("query", "key", "value"):
            yield from getattr(attention, part).named(f"{name}.attention.self.{part}")
        yield from attention.attention_output.named(f"{name}.attention.output.dense")
        yield from self.self_attention_layer_norm.named(f"{name}.attention.output.LayerNorm")
        yield from self.intermediate.named(f"{name}.intermediate.dense")
        yield from self.output.named(f"{name}.output.dense")
        yield from self.output_layer_norm.named(f"{name}.output.LayerNorm")


class _Transformer(tf.Module):
    """Layers named `layer_0`, `layer_1` and so on."""

    def __init__(self, config: BertConfig, draw: _Draw) -> None:
        super().__init__()
        self._number = config.num_hidden_layers
        for index in range(self._number):
            setattr(self, f"layer_{index}", _Layer(config, draw))

    def layers(self) -> Iterator[_Layer]:
        return (getattr(self, f"layer_{index}") for index in range(self._number))


class _Encoder(tf.Module):
    def __init__(self, config: BertConfig, draw: _Draw) -> None:
        super().__init__()
        size = config.hidden_size
        self._drop = config.hidden_dropout_prob
        self.word_embeddings = _Embedding(draw, config.vocab_size, size)
        self.position_embedding = _Embedding(draw, config.max_position_embeddings, size)
        self.type_embeddings = _Embedding(draw, config.type_vocab_size, size)
        self.embeddings = _EmbeddingsNorm(config)
        self.transformer = _Transformer(config, draw)

    def __call__(self, rows: Rows, dtype: tf.DType, seeds: list[tf.Tensor | None]) -> tf.Tensor:
        """Return the last hidden states [T, D] in the compute precision."""
        ids, positions, segments = (
            tf.reshape(part, [-1]) for part in (rows.input_ids, rows.position_ids, rows.segment_ids)
        )
        total = (
            self.word_embeddings(ids)
            + self.position_embedding(positions)
            + self.type_embeddings(segments)
        )
        hidden_TD = tf.cast(
            _dropout(self.embeddings.layer_norm(total), self._drop, seeds[0]), dtype
        )
        bias = _attention_bias(rows)
        for index, layer in enumerate(self.transformer.layers()):
            first = 1 + DROPOUT_PLACES_OF_LAYER * index
            hidden_TD = layer(hidden_TD, bias, seeds[first : first + DROPOUT_PLACES_OF_LAYER])
        return hidden_TD

    def named(self) -> Parameters:
        yield "bert.embeddings.word_embeddings.weight", self.word_embeddings.embeddings
        yield "bert.embeddings.position_embeddings.weight", self.position_embedding.embeddings
        yield "bert.embeddings.token_type_embeddings.weight", self.type_embeddings.embeddings
        yield from self.embeddings.layer_norm.named("bert.embeddings.LayerNorm")
        for index, layer in enumerate(self.transformer.layers()):
            yield from layer.named(f"bert.encoder.layer.{index}")


class _MaskedLM(tf.Module):
    def __init__(self, config: BertConfig, draw: _Draw) -> None:
        super().__init__()
        self._gelu = _gelu_of(config)
        self.dense = _Dense(draw, config.hidden_size, config.hidden_size)
        self.layer_norm = _LayerNorm(config)
        self.bias = tf.Variable(tf.zeros([config.vocab_size]))

    def __call__(self, masked: tf.Tensor, table_VD: tf.Variable) -> tf.Tensor:
        """Map float32 [B P, D] to logits float32 [B P, V]."""
        inner = self.layer_norm(self._gelu(self.dense(masked)))
        return tf.matmul(inner, table_VD, transpose_b=True) + self.bias

    def named(self) -> Parameters:
        yield from self.dense.named("cls.predictions.transform.dense")
        yield from self.layer_norm.named("cls.predictions.transform.LayerNorm")
        yield "cls.predictions.bias", self.bias


class _NextSentence(tf.Module):
    def __init__(self, config: BertConfig, draw: _Draw) -> None:
        super().__init__()
        self.dense = _Dense(draw, config.hidden_size, config.hidden_size)
        self.out_proj = _Dense(draw, config.hidden_size, 2)

    def __call__(self, first: tf.Tensor) -> tf.Tensor:
        """Map float32 [B S, D] to logits float32 [B S, 2]."""
        return self.out_proj(tf.tanh(self.dense(first)))

    def named(self) -> Parameters:
        yield from self.dense.named("bert.pooler.dense")
        yield from self.out_proj.named("cls.seq_relationship")


class BertPretrainer(tf.Module):
    """BERT with masked-LM and next-sentence heads.

    Args:
        config: a plain BERT with learned positions and a tied decoder;
            `hidden_act` "gelu" is the tanh form.
        compute_dtype: dtype of the encoder's products and activations:
            float32, bfloat16 or float16.
        seed: seed of the initial weights. As in the reference, they are normal and truncated at two
            deviations, with zero biases and unit LayerNorm gains.

    Raises:
        UserError: ``config`` uses a feature that only the PyTorch implementation supports.
    """

    def __init__(
        self, config: BertConfig, compute_dtype: tf.DType = tf.float32, seed: int = 0
    ) -> None:
        super().__init__()
        for name, supported in _SUPPORTED.items():
            if (value := getattr(config, name)) != supported:
                reason = f"{name} {value!r} is not supported in TensorFlow 2"
                raise UserError("model.unsupported", "bert_config", reason, f"Use {supported!r}")
        self.config = config
        self.compute_dtype = compute_dtype
        draw = _Draw(config.initializer_range, seed)
        self.encoder = _Encoder(config, draw)
        self.masked_lm = _MaskedLM(config, draw)
        # A list, to match Google's checkpoint keys.
        self.classification_heads = [_NextSentence(config, draw)]

    def __call__(self, rows: Rows, dropout_seed: tf.Tensor | None) -> Logits:
        """Return the logits of both heads.

        Args:
            rows: a batch with static L and S.
            dropout_seed: int32 or int64 [2], different for each micro-batch and replica. None
                disables dropout. XLA has a different generator, so compiled code draws other masks
                from the same seed.
        """
        size = self.config.hidden_size
        hidden_TD = self.encoder(rows, self.compute_dtype, self._seeds(dropout_seed))
        hidden_BLD = tf.reshape(hidden_TD, [-1, rows.input_ids.shape[1], size])
        masked, first = (
            tf.cast(
                tf.reshape(tf.gather(hidden_BLD, positions, batch_dims=1), [-1, size]), tf.float32
            )
            for positions in (rows.masked_positions, rows.first_positions)
        )
        masked_logits = self.masked_lm(masked, self.encoder.word_embeddings.embeddings)
        return Logits(masked_logits, self.classification_heads[0](first))

    def parameters(self) -> dict[str, tf.Variable]:
        """Return the variables by our names, in the order of `parameter_names`;
        kernels are [in, out].
        """
        parts = self.encoder.named(), self.masked_lm.named(), self.classification_heads[0].named()
        found = dict(pair for part in parts for pair in part)
        return {name: found[name] for name in parameter_names(self.config.num_hidden_layers)}

    def assign(self, values: Mapping[str, np.ndarray]) -> None:
        """Assign all weights, or none if any of them is invalid.

        Args:
            values: float32 by our names, matrices [out, in] as in PyTorch;
                vocabulary padding is cut.

        Raises:
            UserError: a name is missing or unknown, or a shape is wrong.
        """
        variables = self.parameters()
        for code, problem, names in (
            ("checkpoint.incomplete", "is missing", variables.keys() - values.keys()),
            (
                "checkpoint.shape",
                "is not a parameter of this model",
                values.keys() - variables.keys(),
            ),
        ):
            if names:
                reason = f"{min(names)} {problem}"
                raise UserError(
                    code, "weights", reason, "Use weights of this model's bert_config.json"
                )
        new = {
            name: self._own_shape(name, values[name], variable)
            for name, variable in variables.items()
        }
        for name, variable in variables.items():
            variable.assign(new[name])

    def values(self) -> dict[str, np.ndarray]:
        """Return all weights in the format of `assign`, without padding."""
        return {
            name: _transpose_kernel(name, variable.numpy())
            for name, variable in self.parameters().items()
        }

    def _own_shape(self, name: str, value: np.ndarray, variable: tf.Variable) -> np.ndarray:
        if (
            name in VOCABULARY
            and self.config.vocab_size < len(value) <= self.config.padded_vocab_size
        ):
            value = value[: self.config.vocab_size]
        own = _transpose_kernel(name, value)
        if own.shape != tuple(variable.shape):
            expected = list(variable.shape)[:: -1 if _is_kernel(name) else 1]
            reason = f"{name} is {list(value.shape)}, not {expected}"
            raise UserError(
                "checkpoint.shape",
                "weights",
                reason,
                "Use weights of this model's bert_config.json",
            )
        return own

    def _seeds(self, dropout_seed: tf.Tensor | None) -> list[tf.Tensor | None]:
        """Return one seed per dropout: that of the embeddings, then those of each layer."""
        places = 1 + DROPOUT_PLACES_OF_LAYER * self.config.num_hidden_layers
        if dropout_seed is None:
            return [None] * places
        return tf.unstack(tf.random.experimental.stateless_split(dropout_seed, places))


def _attention_bias(rows: Rows) -> tf.Tensor:
    """Return float32, 0 for visible keys: [B, 1, 1, L]
    if each row is one sequence, else [B, 1, L, L].
    """
    sequence_BL = rows.sequence_ids
    seen = sequence_BL[:, None, None, :] != 0
    if rows.first_positions.shape[1] > 1:
        seen &= sequence_BL[:, None, :, None] == sequence_BL[:, None, None, :]
    return tf.where(seen, 0.0, UNSEEN)


def _dropout(x: tf.Tensor, probability: float, seed: tf.Tensor | None) -> tf.Tensor:
    """Apply dropout to float32 x; in 16 bits the scale would be inaccurate."""
    if seed is None or probability == 0.0:
        return x
    kept = tf.random.stateless_uniform(tf.shape(x), seed) >= probability
    return tf.where(kept, x / (1.0 - probability), 0.0)


@tf.custom_gradient
def _embedding_lookup(
    table: tf.Tensor, ids: tf.Tensor
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tuple[tf.Tensor, None]]]:
    """Gather rows of a table, with a dense gradient:
    slices from tf.gather cost a copy of the tied table's gradient.
    """

    def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, None]:
        return tf.math.unsorted_segment_sum(upstream, ids, table.shape[0]), None

    return tf.gather(table, ids), gradient


def _gelu_of(config: BertConfig) -> Callable[[tf.Tensor], Any]:
    return lambda x: tf.nn.gelu(x, approximate=not config.exact_gelu)


def _is_kernel(name: str) -> bool:
    return name.endswith(".weight") and not name.endswith(
        ("_embeddings.weight", "LayerNorm.weight")
    )


def _transpose_kernel(name: str, value: np.ndarray) -> np.ndarray:
    """Transpose kernels; return other parameters unchanged."""
    return np.ascontiguousarray(value.T) if _is_kernel(name) else value
