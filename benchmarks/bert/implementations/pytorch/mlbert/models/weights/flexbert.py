"""ModernBERT's research form, FlexBERT: its configuration and names in a Composer checkpoint.

The configuration is the ``model_config`` of the research repository's YAML, with its defaults. Only
the values that make a ModernBERT are supported; others are errors that name the key.

Sliding windows count the tokens of both sides, as ModernBERT's ``local_attention``. The number of
positions there is that of the BERT whose configuration was extended and limits nothing, so a shape
gets at least ModernBERT's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mlbert.config.bert_config import BertConfig
from mlbert.host.errors import UserError
from mlbert.host.json_files import shown
from mlbert.models.weights.modernbert import modernbert_state

POSITIONS = 8192  # of the published models
DISABLED = -1  # a sliding window, or a distance of global layers
_CUTOFF = 3.0  # deviations, if the configuration has none
_REMEDY = "Give a checkpoint of a ModernBERT"
_ACTIVATIONS = {"gelu": "gelu_erf", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}
# Values of a configuration without the key.
_DEFAULTS: Mapping[str, object] = {
    "attention_layer": "base",
    "attention_probs_dropout_prob": 0.0,
    "attn_out_bias": False,
    "attn_out_dropout_prob": 0.0,
    "attn_qkv_bias": False,
    "bert_layer": "prenorm",
    "decoder_bias": True,
    "embed_dropout_prob": 0.0,
    "embed_norm": True,
    "embedding_layer": "absolute_pos",
    "final_norm": False,
    "global_attn_every_n_layers": DISABLED,
    "head_pred_act": "silu",
    "head_pred_bias": False,
    "head_pred_norm": True,
    "hidden_act": "gelu",
    "init_cutoff_factor": 2.0,
    "init_method": "default",
    "init_std": 0.02,
    "local_attn_rotary_emb_base": DISABLED,
    "max_position_embeddings": 512,
    "mlp_dropout_prob": 0.0,
    "mlp_in_bias": False,
    "mlp_layer": "mlp",
    "mlp_out_bias": False,
    "norm_kwargs": {},
    "normalization": "rmsnorm",
    "pooling_type": "cls",
    "rotary_emb_base": 10_000.0,
    "rotary_emb_interleaved": False,
    "skip_first_prenorm": False,
    "sliding_window": DISABLED,
    "tie_word_embeddings": True,
}
# Values that a ModernBERT has.
_REQUIRED: Mapping[str, object] = {
    "attention_layer": "rope",
    "bert_layer": "prenorm",
    "decoder_bias": True,
    "embed_norm": True,
    "embedding_layer": "sans_pos",
    "final_norm": True,
    "head_pred_norm": True,
    "mlp_layer": "glu",
    "normalization": "layernorm",
    "rotary_emb_interleaved": False,
    "skip_first_prenorm": True,
}
# Keys that must be missing or empty: parts of the first layers, and angles of another kind.
_EMPTY = (
    "initial_attention_layer",
    "initial_bert_layer",
    "initial_mlp_layer",
    "rotary_emb_scale_base",
)
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)
# Every key of a configuration that changes the model.
KEYS = frozenset([*_DEFAULTS, *_EMPTY, *_SIZES, "rotary_emb_dim", "local_attn_rotary_emb_dim"])
# transformers' names -> those of the research repository below Composer's ``model.``.
_NAMES = (
    (r"^model\.layers\.", "model.bert.encoder.layers."),
    (r"^model\.(?=embeddings\.|final_norm\.)", "model.bert."),
    (r"^(?=head\.|decoder\.|classifier\.)", "model."),
)


def is_flexbert(values: Mapping[str, object]) -> bool:
    """Return whether the configuration in a checkpoint is of a FlexBERT."""
    return "attention_layer" in values and "bert_layer" in values


def shape_of_flexbert(values: Mapping[str, Any], path: str) -> BertConfig:
    """Return the shape. Raise UserError for a FlexBERT that is not a ModernBERT.

    ``path`` is the checkpoint that errors name.
    """
    values = {**_DEFAULTS, **values}
    for name, wanted in _REQUIRED.items():
        _require(path, name, values[name], wanted)
    for name in _EMPTY:
        _require(path, name, values.get(name), None)
    _require(path, "attn_out_bias", values["attn_out_bias"], values["attn_qkv_bias"])
    _require(path, "head_pred_act", values["head_pred_act"], values["hidden_act"])
    activation = str(values["hidden_act"])
    if activation not in _ACTIVATIONS:
        raise _unsupported(path, "hidden_act", activation, "gelu")
    try:
        return _shape_of(values, _ACTIVATIONS[activation])
    except UserError as error:  # a ValueError too, so it must come first
        raise UserError("model.shape", path, error.problem, _REMEDY) from None
    except (KeyError, TypeError, ValueError):
        reason = "lacks the shape of a ModernBERT in its configuration"
        raise UserError("model.shape", path, reason, _REMEDY) from None


def _shape_of(values: Mapping[str, Any], activation: str) -> BertConfig:
    head_size = values["hidden_size"] // values["num_attention_heads"]
    for name in ("rotary_emb_dim", "local_attn_rotary_emb_dim"):
        if values.get(name) not in (None, head_size):
            raise ValueError(name)
    norm = values["norm_kwargs"]
    hidden_dropout = values["mlp_dropout_prob"]
    embedding_dropout = values["embed_dropout_prob"]
    output_dropout = values["attn_out_dropout_prob"]
    cutoff = values["init_cutoff_factor"]
    window = values["sliding_window"]
    local: dict[str, Any] = {}
    if window != DISABLED:
        every = values["global_attn_every_n_layers"]
        local_base = values["local_attn_rotary_emb_base"]
        local = {
            "local_attention": window,
            "global_attn_every_n_layers": 0 if every == DISABLED else every,
            "local_rope_theta": values["rotary_emb_base"] if local_base == DISABLED else local_base,
        }
    return BertConfig(
        hidden_act=activation,  # type: ignore[arg-type]
        max_position_embeddings=max(POSITIONS, values["max_position_embeddings"]),
        hidden_dropout_prob=hidden_dropout,
        embedding_dropout_prob=None if embedding_dropout == hidden_dropout else embedding_dropout,
        attention_output_dropout_prob=None if output_dropout == hidden_dropout else output_dropout,
        attention_probs_dropout_prob=values["attention_probs_dropout_prob"],
        layer_norm_eps=float(norm.get("eps", 1e-5)),
        position_embedding_type="rotary",
        rope_theta=values["rotary_emb_base"],
        rope_frequencies="product",
        norm_position="pre",
        gated_mlp=True,
        tie_word_embeddings=values["tie_word_embeddings"],
        attention_bias=values["attn_qkv_bias"],
        mlp_bias=values["mlp_out_bias"],
        norm_bias=norm.get("bias", True),
        classifier_bias=values["head_pred_bias"],
        initializer="megatron" if values["init_method"] == "full_megatron" else "flat",
        initializer_range=values["init_std"],
        initializer_cutoff_factor=_CUTOFF if cutoff is None else cutoff,
        classifier_pooling=values["pooling_type"],
        **local,
        **{name: values[name] for name in _SIZES},
    )


def flexbert_config(shape: BertConfig) -> dict[str, object]:
    """Return the configuration of a rotary shape, the inverse of `shape_of_flexbert`."""
    activations = {own: theirs for theirs, own in reversed(_ACTIVATIONS.items())}
    activation = activations[shape.hidden_act]
    has_local = shape.local_attention > 0
    every = shape.global_attn_every_n_layers
    values: dict[str, object] = {
        "model_type": "bert",
        "attention_probs_dropout_prob": shape.attention_probs_dropout_prob,
        "attn_out_bias": shape.attention_bias,
        "attn_out_dropout_prob": shape.attention_output_dropout,
        "attn_qkv_bias": shape.attention_bias,
        "embed_dropout_prob": shape.embedding_dropout,
        "global_attn_every_n_layers": every if has_local and every else DISABLED,
        "head_pred_act": activation,
        "head_pred_bias": shape.classifier_bias,
        "hidden_act": activation,
        "init_cutoff_factor": shape.initializer_cutoff_factor,
        "init_method": "full_megatron" if shape.initializer == "megatron" else "normal",
        "init_std": shape.initializer_range,
        "local_attn_rotary_emb_base": shape.local_rope_theta if has_local else DISABLED,
        "max_position_embeddings": shape.max_position_embeddings,
        "mlp_dropout_prob": shape.hidden_dropout_prob,
        "mlp_in_bias": shape.mlp_bias,
        "mlp_out_bias": shape.mlp_bias,
        "norm_kwargs": {"eps": shape.layer_norm_eps, "bias": shape.norm_bias},
        "padding": "unpadded",
        "rotary_emb_base": shape.rope_theta,
        "sliding_window": shape.local_attention if has_local else DISABLED,
        "tie_word_embeddings": shape.tie_word_embeddings,
        **_REQUIRED,
        **{name: getattr(shape, name) for name in _SIZES},
    }
    if shape.classifier_pooling != "tanh":
        values["pooling_type"] = shape.classifier_pooling
    return values


def flexbert_state(state: Mapping[str, Tensor], shape: BertConfig) -> dict[str, Tensor]:
    """Return our parameters by the names in Composer's ``state.model``, a tied decoder twice."""
    tensors = modernbert_state(state, shape)
    words = "model.embeddings.tok_embeddings.weight"
    if "decoder.bias" in tensors and "decoder.weight" not in tensors:
        tensors["decoder.weight"] = tensors[words]
    found = {}
    for name, tensor in tensors.items():
        for pattern, replacement in _NAMES:
            if re.match(pattern, name):
                found[re.sub(pattern, replacement, name)] = tensor
                break
    return found


def _require(path: str, name: str, value: object, wanted: object) -> None:
    if value != wanted:
        raise _unsupported(path, name, value, wanted)


def _unsupported(path: str, name: str, value: object, wanted: object) -> UserError:
    reason = f"has {name} {shown(value)} in its model_config; only {shown(wanted)} is supported"
    return UserError("model.unsupported", path, reason, _REMEDY)
