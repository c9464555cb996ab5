"""Convert rotary models (`BertConfig.is_rotary`) to and from Hugging Face's ModernBERT:
configuration and names.

A ``config.json`` comes in two dialects. transformers 4 writes ``global_rope_theta``,
``local_rope_theta`` and ``global_attn_every_n_layers``; transformers 5 writes ``rope_parameters``
and ``layer_types``. Both are read, and both are written into one file. Options of ours that neither
has are in its ``mlbert`` entry, so that every shape comes back.

ModernBERT has one tensor for query, key and value and stores a tied decoder once.
`mlbert.models.weights.checkpoint_names` reads its names; this module writes them. A ModernBERT with
``mlp_bias`` has a bias for the first matrix of its gated feed-forward part, too. In the models that
we train it is not there, and zero in a folder for transformers; other programs may have trained it
(`BertConfig.gated_bias`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mlbert.config.bert_config import BertConfig
from mlbert.host.errors import UserError
from mlbert.host.json_files import shown
from mlbert.models.weights.checkpoint_names import fused_position

MODEL_TYPE = "modernbert"
TOKEN_CLASSIFIER = "BertForTokenClassification"
ARCHITECTURES = {
    "BertForMaskedLM": "ModernBertForMaskedLM",
    "BertForSequenceClassification": "ModernBertForSequenceClassification",
    TOKEN_CLASSIFIER: "ModernBertForTokenClassification",
}
# Fields of `BertConfig` with the same name in the config.json of a BERT and of a ModernBERT.
SHARED_NAMES = (
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "tie_word_embeddings",
    "vocab_size",
)
# Further such fields of a ModernBERT.
_OWN_NAMES = (
    "attention_bias",
    "classifier_bias",
    "initializer_cutoff_factor",
    "mlp_bias",
    "norm_bias",
)
FULL = "full_attention"
SLIDING = "sliding_attention"
_EXTRA = "mlbert"  # entry of config.json with the options that transformers does not have
# Values of a ModernBERT's config.json that does not have them: those of transformers.
_DEFAULTS: Mapping[str, object] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "classifier_bias": False,
    "classifier_pooling": "cls",
    "decoder_bias": True,
    "embedding_dropout": 0.0,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160_000.0,
    "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02,
    "local_attention": 128,
    "local_rope_theta": 10_000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "norm_bias": False,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_REMEDY = "Choose a ModernBERT encoder"
_LAYER = r"^bert\.encoder\.layer\.(\d+)\."
_NAMES = (
    (r"^bert\.embeddings\.word_embeddings\.", "model.embeddings.tok_embeddings."),
    (r"^bert\.embeddings\.LayerNorm\.", "model.embeddings.norm."),
    (r"^bert\.encoder\.LayerNorm\.", "model.final_norm."),
    (rf"{_LAYER}attention\.LayerNorm\.", r"model.layers.\1.attn_norm."),
    (rf"{_LAYER}attention\.self\.(?:query|key|value)\.", r"model.layers.\1.attn.Wqkv."),
    (rf"{_LAYER}attention\.output\.dense\.", r"model.layers.\1.attn.Wo."),
    (rf"{_LAYER}intermediate\.LayerNorm\.", r"model.layers.\1.mlp_norm."),
    (rf"{_LAYER}intermediate\.dense\.", r"model.layers.\1.mlp.Wi."),
    (rf"{_LAYER}output\.dense\.", r"model.layers.\1.mlp.Wo."),
    (r"^cls\.predictions\.transform\.dense\.", "head.dense."),
    (r"^cls\.predictions\.transform\.LayerNorm\.", "head.norm."),
    (r"^cls\.predictions\.(?:decoder\.)?", "decoder."),
    (r"^classifier\.", "classifier."),
)


def is_native(shape: BertConfig, architecture: str) -> bool:
    """Return whether transformers has a ModernBERT class for a model of ours.

    ``architecture``: name of our class.
    """
    if not shape.is_rotary:
        return False
    is_classifier = architecture == "BertForSequenceClassification"
    return architecture in ("BertForMaskedLM", TOKEN_CLASSIFIER) or (
        is_classifier and shape.classifier_pooling != "tanh"
    )


def with_known_pooling(shape: BertConfig) -> BertConfig:
    """Return the shape of a sequence classifier whose pooling transformers has, too: a rotary model
    takes the mean in place of a tanh pooler.
    """
    if shape.is_rotary and shape.classifier_pooling == "tanh":
        return dataclasses.replace(shape, classifier_pooling="mean")
    return shape


def modernbert_config(shape: BertConfig, architecture: str, activation: str) -> dict[str, object]:
    """Return the content of a ``config.json`` for any version of transformers with ModernBERT.

    Args:
        shape: of a model for which `is_native` is true.
        architecture: name of our class.
        activation: Hugging Face's name for its GELU.
    """
    layers = range(shape.num_hidden_layers)
    thetas = {FULL: shape.rope_theta, SLIDING: shape.local_rope_theta}
    values: dict[str, object] = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": MODEL_TYPE,
        "attention_dropout": shape.attention_probs_dropout_prob,
        "classifier_activation": activation,
        "classifier_dropout": shape.hidden_dropout_prob,
        "decoder_bias": True,
        "embedding_dropout": shape.embedding_dropout,
        "global_attn_every_n_layers": shape.global_attn_every_n_layers,
        "global_rope_theta": shape.rope_theta,
        "hidden_activation": activation,
        "layer_types": [SLIDING if shape.is_local(layer) else FULL for layer in layers],
        # Without local layers nothing uses it, but other programs read it all the same.
        "local_attention": shape.local_attention or _DEFAULTS["local_attention"],
        "local_rope_theta": shape.local_rope_theta,
        "mlp_dropout": shape.hidden_dropout_prob,
        "norm_eps": shape.layer_norm_eps,
        "rope_parameters": {
            kind: {"rope_theta": theta, "rope_type": "default"} for kind, theta in thetas.items()
        },
        **{name: getattr(shape, name) for name in (*SHARED_NAMES, *_OWN_NAMES)},
        # Of a model without a vocabulary; ModernBERT's defaults would be out of range.
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "cls_token_id": None,
        "sep_token_id": None,
    }
    if shape.classifier_pooling != "tanh":
        values["classifier_pooling"] = shape.classifier_pooling
    found = dataclasses.asdict(_shape_of(values, shape.hidden_act))
    own = dataclasses.asdict(shape)
    extra = {name: value for name, value in own.items() if found[name] != value}
    if extra:
        values[_EXTRA] = extra
    return values


def modernbert_state(state: Mapping[str, Tensor], shape: BertConfig) -> dict[str, Tensor]:
    """Return our parameters by ModernBERT's names, vocabulary unpadded, without heads that it does
    not have."""
    parts: dict[str, list[Tensor]] = {}
    for own in sorted(state, key=fused_position):
        if (theirs := _their_name(own)) is not None:
            parts.setdefault(theirs, []).append(state[own])
    tensors = {name: torch.cat(rows) for name, rows in parts.items()}
    if shape.mlp_bias and not shape.gated_bias:
        for layer in range(shape.num_hidden_layers):
            tensors[f"model.layers.{layer}.mlp.Wi.bias"] = torch.zeros(shape.inner_rows)
    return tensors


def shape_of_modernbert(values: Mapping[str, object], activation: str, path: str) -> BertConfig:
    """Return the shape for a ``config.json``.

    Raise UserError for a ModernBERT that our model does not support.

    Args:
        activation: our name for its GELU.
        path: of the configuration.
    """
    for name in ("decoder_bias", "is_causal", "causal_mask"):
        supported = name == "decoder_bias"
        if values.get(name, supported) != supported:
            reason = f"{name} is {values[name]}; only {supported} is supported"
            raise UserError("model.unsupported", path, reason, _REMEDY)
    _check_rotations(values, path)
    values = _flat(values, path)
    try:
        shape = _shape_of(values, activation)
        extra = values.get(_EXTRA)
        return dataclasses.replace(shape, **extra) if isinstance(extra, dict) else shape
    except UserError as error:  # a ValueError too, so it must come first
        raise UserError("model.shape", path, error.problem, _REMEDY) from None
    except (KeyError, TypeError, ValueError):
        raise UserError("model.shape", path, "lacks the shape of a ModernBERT", _REMEDY) from None


def _shape_of(values: Mapping[str, Any], activation: str) -> BertConfig:
    """Return the shape for the flat form of a ``config.json``, without our own entry."""
    values = {**_DEFAULTS, **values}
    every = values["global_attn_every_n_layers"]
    hidden_dropout = values["mlp_dropout"]

    def other_dropout(name: str) -> float | None:
        return None if values[name] == hidden_dropout else values[name]

    local: dict[str, Any] = {}
    if every != 1:
        local_theta = values["local_rope_theta"]
        local = {
            "local_attention": values["local_attention"],
            "global_attn_every_n_layers": every,
            "local_rope_theta": values["global_rope_theta"] if local_theta is None else local_theta,
        }
    return BertConfig(
        hidden_act=activation,  # type: ignore[arg-type]
        hidden_dropout_prob=hidden_dropout,
        embedding_dropout_prob=other_dropout("embedding_dropout"),
        # transformers has one rate for attention's probabilities and its output.
        attention_output_dropout_prob=other_dropout("attention_dropout"),
        attention_probs_dropout_prob=values["attention_dropout"],
        layer_norm_eps=values["norm_eps"],
        rope_theta=values["global_rope_theta"],
        rope_frequencies="product",
        position_embedding_type="rotary",
        norm_position="pre",
        gated_mlp=True,
        initializer="megatron",
        classifier_pooling=values["classifier_pooling"],
        **local,
        **{name: values[name] for name in (*SHARED_NAMES, *_OWN_NAMES)},
    )


def _flat(values: Mapping[str, object], path: str) -> dict[str, object]:
    """Return a configuration with the names of transformers 4. Raise UserError if it cannot be
    written with them."""
    flat = dict(values)
    types = values.get("layer_types")
    if isinstance(types, list):
        number = values.get("global_attn_every_n_layers")
        flat["global_attn_every_n_layers"] = _every(types, number, path)
    rope = values.get("rope_parameters")
    if isinstance(rope, dict):
        for kind, name in ((FULL, "global_rope_theta"), (SLIDING, "local_rope_theta")):
            part = rope.get(kind)
            if part is None and "rope_theta" in rope:  # one base for all layers
                part = rope
            if isinstance(part, dict) and "rope_theta" in part:
                flat[name] = part["rope_theta"]
    return flat


def _every(types: Sequence[object], number: object, path: str) -> int:
    """Return the distance of global layers, 0 if there are none: the ``number`` next to the layers'
    types if it fits them, else the lowest that does. Raise UserError for another pattern."""
    numbers = [number] if isinstance(number, int) and number >= 0 else []
    for every in [*numbers, *range(len(types) + 1)]:
        if list(types) == [
            FULL if _is_global(layer, every) else SLIDING for layer in range(len(types))
        ]:
            return every
    reason = "layer_types does not make every n-th layer global, starting with the first"
    raise UserError("model.unsupported", path, reason, _REMEDY)


def _is_global(layer: int, every: int) -> bool:
    return every > 0 and layer % every == 0


def _check_rotations(values: Mapping[str, object], path: str) -> None:
    """Raise UserError if the rotary angles are scaled."""
    rope = values.get("rope_parameters")
    parts = [values.get("rope_scaling")]
    if isinstance(rope, dict):
        parts += [rope, *rope.values()]
    for part in parts:
        if not isinstance(part, dict):
            continue
        kind = part.get("rope_type", part.get("type", "default"))
        if kind != "default":
            reason = f"rope_type is {shown(kind)}; only default is supported"
            raise UserError("model.unsupported", path, reason, _REMEDY)


def with_gated_bias(
    tensors: Mapping[str, Tensor], shape: BertConfig | None
) -> tuple[dict[str, Tensor], BertConfig | None]:
    """Return a ModernBERT's tensors and shape (None: unknown): without the biases of the gated
    feed-forward parts if they are zero, else with a shape that has them.
    """
    biases = [name for name in tensors if name.endswith("mlp.Wi.bias")]
    is_trained = any(tensors[name].count_nonzero() for name in biases)
    if is_trained and shape is not None and not shape.gated_bias:
        shape = dataclasses.replace(shape, gated_bias=True)
    if is_trained or (shape is not None and shape.gated_bias):
        return dict(tensors), shape
    return {name: tensor for name, tensor in tensors.items() if name not in biases}, shape


def _their_name(own: str) -> str | None:
    """Return their name of our parameter, or None if they have no such parameter."""
    return next(
        (re.sub(pattern, theirs, own) for pattern, theirs in _NAMES if re.match(pattern, own)), None
    )
