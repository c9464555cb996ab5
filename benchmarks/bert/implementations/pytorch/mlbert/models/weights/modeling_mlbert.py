"""mlbert's BERT for `transformers`, in the shapes
that its own classes cannot hold (``trust_remote_code=True``).

This file is copied into an exported folder and imports nothing of mlbert. Input is padded, as in
`transformers`. Parameter names and numbers are those of `mlbert.models.bert`: ALiBi or rotary or
learned positions, LayerNorm before or after the sublayers, gated or plain feed-forward layers.
Labels are as in `transformers`. The models have its optional outputs (hidden states, attention
weights), take embeddings in place of token ids, recompute layers in the backward pass
(`gradient_checkpointing_enable`), and can be resized to another vocabulary.

Legend: S sequences, W padded length, D hidden, N heads, H head size, V vocabulary, L labels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import can_return_tuple


class MlbertConfig(PretrainedConfig):
    """The shape. config.json has all values: names are BERT's,
    or those of mlbert's ``bert_config.json``.
    """

    model_type = "mlbert"


def _norm(config: MlbertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


def _output(config: MlbertConfig, columns: int) -> nn.ModuleDict:
    """Return a linear layer whose output is added to a residual,
    and the LayerNorm after it if the model has one.
    """
    part = nn.ModuleDict({"dense": nn.Linear(columns, config.hidden_size)})
    if config.norm_position == "post":
        part["LayerNorm"] = _norm(config)
    return part


def _gelu(x: Tensor, config: MlbertConfig) -> Tensor:
    return F.gelu(x, approximate="none" if config.hidden_act == "gelu" else "tanh")


def _rotated(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate float32 queries or keys [S, N, W, H];
    ``rotations`` are the cosines, then the sines, of H/2 angles.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rotations.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class MlbertLayer(nn.Module):
    """One encoder layer; ``first`` is the first one,
    which has no LayerNorm before its attention in rotary models.
    """

    attention: Any
    intermediate: Any
    output: Any

    def __init__(self, config: MlbertConfig, first: bool) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        projections = {name: nn.Linear(size, size) for name in ("query", "key", "value")}
        self.attention = nn.ModuleDict(
            {"self": nn.ModuleDict(projections), "output": _output(config, size)}
        )
        inner = config.intermediate_size * (2 if config.gated_mlp else 1)
        self.intermediate = nn.ModuleDict(
            {"dense": nn.Linear(size, inner, bias=not config.gated_mlp)}
        )
        self.output = _output(config, config.intermediate_size)
        if config.norm_position == "pre":
            self.intermediate["LayerNorm"] = _norm(config)
            if not (first and config.position_embedding_type == "rotary"):
                self.attention["LayerNorm"] = _norm(config)

    def forward(
        self, x: Tensor, mask: Tensor, rotations: Tensor | None, wants_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return [S, W, D], and the attention weights [S, N, W, W] if they are wanted; ``mask`` is
        added to the attention scores.
        """
        normed = self._normed(x, self.attention, "pre")
        context, weights = self._attended(normed, mask, rotations, wants_weights)
        x = self._added(x, context, self.attention.output)
        inner = self._fed_forward(self._normed(x, self.intermediate, "pre"))
        return self._added(x, inner, self.output), weights

    def _normed(self, x: Tensor, part: Any, position: str) -> Tensor:
        return (
            part.LayerNorm(x)
            if self.config.norm_position == position and "LayerNorm" in part
            else x
        )

    def _added(self, residual: Tensor, x: Tensor, part: Any) -> Tensor:
        """Return the sum of a residual and a linear layer,
        with dropout (of a gated layer: before it).
        """
        is_gated = self.config.gated_mlp and part is self.output
        x = F.dropout(
            part.dense(x), 0.0 if is_gated else self.config.hidden_dropout_prob, self.training
        )
        return self._normed(residual + x, part, "post")

    def _attended(
        self, x: Tensor, mask: Tensor, rotations: Tensor | None, wants_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        heads = self.config.num_attention_heads
        query, key, value = (
            part(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in self.attention["self"].values()
        )
        if rotations is not None:
            query = _rotated(query, rotations)
            key = _rotated(key, rotations)
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        weights = None
        if wants_weights or self.config._attn_implementation == "eager":
            scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
            weights = (scores + mask).float().softmax(-1).to(value.dtype)
            context = F.dropout(weights, dropout) @ value
        else:
            context = F.scaled_dot_product_attention(query, key, value, mask, dropout)
        return context.transpose(1, 2).flatten(2), weights

    def _fed_forward(self, x: Tensor) -> Tensor:
        inner = self.intermediate.dense(x)
        if not self.config.gated_mlp:
            return _gelu(inner, self.config)
        gate, linear = inner.chunk(2, dim=-1)
        return F.dropout(
            _gelu(gate, self.config) * linear, self.config.hidden_dropout_prob, self.training
        )


class MlbertPreTrainedModel(PreTrainedModel):
    """Base class: initialization, and what `transformers` asks of a model."""

    config_class = MlbertConfig
    base_model_prefix = "bert"
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    _no_split_modules: Any = ("MlbertLayer",)
    # Heads.
    _keys_to_ignore_on_load_unexpected: Any = (r"^cls\.", r"^classifier\.", r"^bert\.pooler\.")

    def _init_weights(self, module: Any) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, 0.0, self.config.initializer_range)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)

    def get_input_embeddings(self) -> Any:
        """Return the word embeddings."""
        encoder: Any = self.base_model
        return encoder.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the word embeddings."""
        encoder: Any = self.base_model
        encoder.embeddings.word_embeddings = value


class MlbertModel(MlbertPreTrainedModel):
    """The encoder and, if wanted, the pooler that a classifier reads."""

    embeddings: Any
    encoder: Any
    pooler: Any

    def __init__(self, config: MlbertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        size = config.hidden_size
        layers = range(config.num_hidden_layers)
        self.embeddings = nn.ModuleDict({"word_embeddings": nn.Embedding(config.vocab_size, size)})
        if config.position_embedding_type == "absolute":
            self.embeddings["position_embeddings"] = nn.Embedding(
                config.max_position_embeddings, size
            )
        if config.position_embedding_type != "rotary":
            self.embeddings["token_type_embeddings"] = nn.Embedding(config.type_vocab_size, size)
        self.embeddings["LayerNorm"] = _norm(config)
        self.encoder = nn.ModuleDict(
            {"layer": nn.ModuleList(MlbertLayer(config, i == 0) for i in layers)}
        )
        if config.norm_position == "pre":
            self.encoder["LayerNorm"] = _norm(config)
        self.pooler = nn.ModuleDict({"dense": nn.Linear(size, size)}) if add_pooling_layer else None
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        inputs_embeds: Any = None,
        output_attentions: Any = None,
        output_hidden_states: Any = None,
    ) -> Any:
        """Return the last hidden states [S, W, D] and the pooled first ones [S, D],
        None without a pooler.

        Args:
            input_ids: int64 [S, W].
            attention_mask: 0 at padding; None: there is none.
            token_type_ids: of the sentence; None: 0. Rotary models have none and ignore them.
            inputs_embeds: [S, W, D] in place of the token ids' embeddings.
            output_attentions: return each layer's attention weights, [S, N, W, W]; None: as the
                configuration says.
            output_hidden_states: return the embeddings and each layer's output, [S, W, D]; None:
                as the configuration says.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        x = self.embeddings.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        size = x.shape[:2]
        places = torch.arange(size[1], device=x.device)
        if "position_embeddings" in self.embeddings:
            x = x + self.embeddings.position_embeddings(places)
        if "token_type_embeddings" in self.embeddings:
            if token_type_ids is None:
                token_type_ids = torch.zeros(size, dtype=torch.int64, device=x.device)
            x = x + self.embeddings.token_type_embeddings(token_type_ids)
        x = F.dropout(self.embeddings.LayerNorm(x), self.config.hidden_dropout_prob, self.training)
        if attention_mask is None:
            attention_mask = torch.ones(size, dtype=torch.int64, device=x.device)
        mask = self._mask(attention_mask, places, x.dtype)
        rotations = self._rotations(places)
        hidden_states = [x]
        attentions = []
        for layer in self.encoder.layer:
            if self.gradient_checkpointing and self.training:
                x, weights = self._gradient_checkpointing_func(
                    layer.__call__, x, mask, rotations, output_attentions
                )
            else:
                x, weights = layer(x, mask, rotations, output_attentions)
            hidden_states.append(x)
            attentions.append(weights)
        if "LayerNorm" in self.encoder:
            x = self.encoder.LayerNorm(x)
            hidden_states[-1] = x
        pooled = None if self.pooler is None else torch.tanh(self.pooler.dense(x[:, 0]))
        return BaseModelOutputWithPooling(
            last_hidden_state=x,
            pooler_output=pooled,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
        )

    def _mask(self, attention_mask: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what is added to the scores, [S, 1 or N, 1 or W, W]:
        ALiBi, and the least number at padding.
        """
        bias = torch.zeros(1, 1, 1, len(places), device=places.device)
        if self.config.position_embedding_type == "alibi":
            slopes = torch.tensor(self.config.alibi_slopes, device=places.device)
            bias = -slopes[None, :, None, None] * (places[:, None] - places).abs()
        is_padding = attention_mask[:, None, None] == 0
        return bias.to(dtype).masked_fill(is_padding, torch.finfo(dtype).min)

    def _rotations(self, places: Tensor) -> Tensor | None:
        """Return the cosines, then the sines, of each position's angles, float32 [W, H],
        or None.
        """
        if self.config.position_embedding_type != "rotary":
            return None
        size = self.config.hidden_size // self.config.num_attention_heads
        exponents = torch.arange(0, size, 2, device=places.device, dtype=torch.float32) / size
        angles = places[:, None] / self.config.rotary_base**exponents
        return torch.cat([angles.cos(), angles.sin()], dim=-1)


class MlbertPredictions(nn.Module):
    """The masked-LM head. A tied decoder is the word embeddings, with a bias here."""

    transform: Any

    def __init__(self, config: MlbertConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.transform = nn.ModuleDict({"dense": nn.Linear(size, size), "LayerNorm": _norm(config)})
        if config.tie_word_embeddings:
            self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        else:
            self.decoder = nn.Linear(size, config.vocab_size)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        """Return the vocabulary's logits [S, W, V]."""
        x = self.transform.LayerNorm(_gelu(self.transform.dense(x), self.config))
        return F.linear(x, words, self.bias) if self.config.tie_word_embeddings else self.decoder(x)


class MlbertForMaskedLM(MlbertPreTrainedModel):
    """The encoder and the masked-LM head, without pooler and next-sentence head."""

    cls: Any

    def __init__(self, config: MlbertConfig) -> None:
        super().__init__(config)
        self.bert = MlbertModel(config, add_pooling_layer=False)
        self.cls = nn.ModuleDict({"predictions": MlbertPredictions(config)})
        self.post_init()

    def get_output_embeddings(self) -> Any:
        """Return the decoder, or None if it is the word embeddings."""
        return None if self.config.tie_word_embeddings else self.cls.predictions.decoder

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replace the decoder, which must not be tied to the word embeddings."""
        self.cls.predictions.decoder = value

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """As in `transformers`; new entries of a tied decoder have the bias 0."""
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        if self.config.tie_word_embeddings:
            predictions = self.cls.predictions
            bias = _resized(predictions.bias.data, embeddings.weight.shape[0])
            predictions.bias = nn.Parameter(bias)
        return embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        labels: Any = None,
        inputs_embeds: Any = None,
        output_attentions: Any = None,
        output_hidden_states: Any = None,
    ) -> Any:
        """Return the loss of the labels that are not -100, and logits [S, W, V].

        See `MlbertModel.forward`.
        """
        outputs = self.bert(
            input_ids,
            attention_mask,
            token_type_ids,
            inputs_embeds,
            output_attentions,
            output_hidden_states,
            return_dict=True,
        )
        hidden = outputs.last_hidden_state
        logits = self.cls.predictions(hidden, self.get_input_embeddings().weight)
        return MaskedLMOutput(
            loss=None if labels is None else _token_loss(logits.float(), labels),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class MlbertForSequenceClassification(MlbertPreTrainedModel):
    """The encoder, the pooler and a classifier of ``config.num_labels`` outputs (1: a number)."""

    def __init__(self, config: MlbertConfig) -> None:
        super().__init__(config)
        self.bert = MlbertModel(config)
        num_labels: Any = config.num_labels
        self.classifier = nn.Linear(config.hidden_size, num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        labels: Any = None,
        inputs_embeds: Any = None,
        output_attentions: Any = None,
        output_hidden_states: Any = None,
    ) -> Any:
        """Return the loss and logits [S, L].

        ``labels``: classes [S], numbers [S], or 0 or 1 for each label [S, L]. For the others see
        `MlbertModel.forward`.
        """
        outputs = self.bert(
            input_ids,
            attention_mask,
            token_type_ids,
            inputs_embeds,
            output_attentions,
            output_hidden_states,
            return_dict=True,
        )
        pooled = F.dropout(outputs.pooler_output, self.config.hidden_dropout_prob, self.training)
        logits = self.classifier(pooled)
        return SequenceClassifierOutput(
            loss=None
            if labels is None
            else _loss(logits.float(), labels, self.config.problem_type),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class MlbertForTokenClassification(MlbertPreTrainedModel):
    """The encoder and a classifier of ``config.num_labels`` outputs for each token."""

    def __init__(self, config: MlbertConfig) -> None:
        super().__init__(config)
        self.bert = MlbertModel(config, add_pooling_layer=False)
        num_labels: Any = config.num_labels
        self.classifier = nn.Linear(config.hidden_size, num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        labels: Any = None,
        inputs_embeds: Any = None,
        output_attentions: Any = None,
        output_hidden_states: Any = None,
    ) -> Any:
        """Return the loss of the labels that are not -100, and logits [S, W, L].

        See `MlbertModel.forward`.
        """
        outputs = self.bert(
            input_ids,
            attention_mask,
            token_type_ids,
            inputs_embeds,
            output_attentions,
            output_hidden_states,
            return_dict=True,
        )
        hidden = outputs.last_hidden_state
        logits = self.classifier(F.dropout(hidden, self.config.hidden_dropout_prob, self.training))
        return TokenClassifierOutput(
            loss=None if labels is None else _token_loss(logits.float(), labels),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def _resized(rows: Tensor, size: int) -> Tensor:
    """Return the first rows, with zeros after them if there are fewer than ``size``."""
    result = rows.new_zeros(size, *rows.shape[1:])
    kept = min(size, len(rows))
    result[:kept] = rows[:kept]
    return result


def _token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _loss(logits: Tensor, labels: Tensor, problem_type: str | None) -> Tensor:
    """Return the loss of a classifier; without a problem type, the labels show which one it is."""
    if problem_type is None and logits.shape[1] == 1:
        problem_type = "regression"
    elif problem_type is None and labels.is_floating_point():
        problem_type = "multi_label_classification"
    if problem_type == "regression":
        return F.mse_loss(logits.flatten(), labels.flatten().float())
    if problem_type == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(logits, labels.float())
    return F.cross_entropy(logits, labels.flatten())
