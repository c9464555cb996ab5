"""Convert rotary models (`BertConfig.is_rotary`) to and from Hugging Face's ``ModernBertForMaskedLM``.

Attention is global in every layer. ModernBERT has one tensor for query, key and value and stores a tied decoder once.
The first matrix of a gated feed-forward part has no bias in our models, and a zero bias there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from mlbert.config.bert_config import BertConfig
from mlbert.host.errors import UserError
from mlbert.models.weights.checkpoint_names import fused_position
from mlbert.models.weights.checkpoint_state import parameter_shapes

MODEL_TYPE = "modernbert"
ARCHITECTURE = "ModernBertForMaskedLM"
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
_WORDS = "embeddings.tok_embeddings.weight"
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
)


def modernbert_config(shape: BertConfig, activation: str) -> dict[str, object]:
    """Return the content of a ``config.json`` for any version of transformers with ModernBERT.

    Args:
        shape: of a rotary model.
        activation: Hugging Face's name for its GELU.
    """
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "attention_bias": True,
        "attention_dropout": shape.attention_probs_dropout_prob,
        "classifier_activation": activation,
        "classifier_bias": True,
        "decoder_bias": True,
        "embedding_dropout": shape.hidden_dropout_prob,
        "global_attn_every_n_layers": 1,
        "global_rope_theta": shape.rope_theta,
        "hidden_activation": activation,
        "mlp_bias": True,
        "mlp_dropout": shape.hidden_dropout_prob,
        "norm_bias": True,
        "norm_eps": shape.layer_norm_eps,
        **{name: getattr(shape, name) for name in SHARED_NAMES},
        # IDs in our vocabularies; ModernBERT's defaults would be out of range.
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "cls_token_id": None,
        "sep_token_id": None,
    }


def modernbert_state(state: Mapping[str, Tensor], shape: BertConfig) -> dict[str, Tensor]:
    """Return our masked-LM parameters by their names, vocabulary unpadded, without other heads."""
    parts: dict[str, list[Tensor]] = {}
    for own in sorted(state, key=fused_position):
        if (theirs := _their_name(own)) is not None:
            parts.setdefault(theirs, []).append(state[own])
    tensors = {name: torch.cat(rows) for name, rows in parts.items()}
    for layer in range(shape.num_hidden_layers):
        tensors[f"model.layers.{layer}.mlp.Wi.bias"] = torch.zeros(shape.inner_rows)
    return tensors


def shape_of_modernbert(values: Mapping[str, object], activation: str, path: str) -> BertConfig:
    """Return the shape for a ``config.json``. Raise UserError for a ModernBERT that our model does not support.

    Args:
        activation: our name for its GELU.
        path: of the configuration.
    """
    remedy = "Choose a model that mlbert pretrain has written, or a BERT"
    values = _as_written(values)
    wanted = {
        "global_attn_every_n_layers": 1,
        **dict.fromkeys(("attention_bias", "norm_bias", "decoder_bias"), True),
    }
    for name, value in wanted.items():
        if values.get(name) != value:
            reason = f"{name} is {values.get(name)}, only {value} is supported"
            raise UserError("model.unsupported", path, reason, remedy)
    same = BertConfig.__dataclass_fields__.keys() & values.keys()
    try:
        return BertConfig(
            hidden_act=activation,  # type: ignore[arg-type]
            hidden_dropout_prob=values["mlp_dropout"],  # type: ignore[arg-type]
            attention_probs_dropout_prob=values["attention_dropout"],  # type: ignore[arg-type]
            layer_norm_eps=values["norm_eps"],  # type: ignore[arg-type]
            rope_theta=values["global_rope_theta"],  # type: ignore[arg-type]
            position_embedding_type="rotary",
            norm_position="pre",
            gated_mlp=True,
            **{name: values[name] for name in same},  # type: ignore[arg-type]
        )
    except (KeyError, TypeError):
        raise UserError("model.shape", path, "lacks the shape of a ModernBERT", remedy) from None
    except UserError as error:
        raise UserError("model.shape", path, error.problem, remedy) from None


def _as_written(values: Mapping[str, object]) -> Mapping[str, object]:
    """Return a configuration in the form that `modernbert_config` writes; transformers 5 saves it in another one."""
    values = dict(values)
    if isinstance(layers := values.get("layer_types"), list):
        is_global = set(layers) == {"full_attention"}
        values["global_attn_every_n_layers"] = (
            1 if is_global else values.get("global_attn_every_n_layers", "mixed")
        )
    rope = values.get("rope_parameters")
    rope = rope.get("full_attention", rope) if isinstance(rope, dict) else None
    if (
        isinstance(rope, dict)
        and rope.get("rope_type", "default") == "default"
        and "rope_theta" in rope
    ):
        values["global_rope_theta"] = rope["rope_theta"]
    return values


def is_modernbert(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether tensors have ModernBERT's names."""
    return not tensors.keys().isdisjoint((f"model.{_WORDS}", _WORDS))


def own_tensors(tensors: Mapping[str, Tensor], shape: BertConfig, source: str) -> dict[str, Tensor]:
    """Return the tensors by our names, the inverse of `modernbert_state`. Raise UserError if a bias of a gated
    feed-forward part is not zero."""
    bias = next(
        (
            name
            for name in tensors
            if name.endswith("mlp.Wi.bias") and tensors[name].count_nonzero()
        ),
        None,
    )
    if bias is not None:
        reason = f"{bias} is not zero"
        raise UserError(
            "checkpoint.shape", source, reason, "Choose a model that mlbert pretrain has written"
        )
    if _WORDS in tensors:  # saved without heads
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    state: dict[str, Tensor] = {}
    for own in parameter_shapes(shape):
        theirs = _their_name(own)
        if theirs is not None and theirs in tensors:
            rows = tensors[theirs].chunk(3) if ".attention.self." in own else [tensors[theirs]]
            state[own] = rows[fused_position(own)]
    return state


def _their_name(own: str) -> str | None:
    """Return their name of our parameter, or None if they have no such parameter."""
    return next(
        (re.sub(pattern, theirs, own) for pattern, theirs in _NAMES if re.match(pattern, own)), None
    )
