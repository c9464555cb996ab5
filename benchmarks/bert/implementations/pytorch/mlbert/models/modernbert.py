"""A model of ModernBERT's form (`BertConfig.is_rotary`) as Hugging Face's ``ModernBertForMaskedLM``.

Attention is global in every layer. Theirs has one tensor for query, key and value and stores a tied decoder once; what
has no bias here, the first matrix of a gated feed-forward part, has zeros there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from mlbert.core.bert_config import BertConfig

ARCHITECTURE = "ModernBertForMaskedLM"
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
    """The content of a ``config.json``, as every version of transformers with ModernBERT reads it.

    Args:
        shape: of ModernBERT's form.
        activation: Hugging Face's name of its GELU.
    """
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "modernbert",
        "attention_bias": True,
        "attention_dropout": shape.attention_probs_dropout_prob,
        "classifier_activation": activation,
        "classifier_bias": True,
        "decoder_bias": True,
        "embedding_dropout": shape.hidden_dropout_prob,
        "global_attn_every_n_layers": 1,
        "global_rope_theta": shape.rope_theta,
        "hidden_activation": activation,
        "hidden_size": shape.hidden_size,
        "initializer_range": shape.initializer_range,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "mlp_bias": True,
        "mlp_dropout": shape.hidden_dropout_prob,
        "norm_bias": True,
        "norm_eps": shape.layer_norm_eps,
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": shape.num_hidden_layers,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "vocab_size": shape.vocab_size,
        # Entries of our vocabularies; ModernBERT's own numbers lie beyond them.
        **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "cls_token_id": None, "sep_token_id": None},
    }


def modernbert_state(state: Mapping[str, Tensor], shape: BertConfig) -> dict[str, Tensor]:
    """Our masked-LM parameters, vocabulary unpadded, under their names; other heads are left out."""
    parts: dict[str, list[Tensor]] = {}
    # Rows of the query, then of the key, then of the value.
    for own in sorted(state, key=lambda name: (".self.key." in name) + 2 * (".self.value." in name)):
        for pattern, theirs in _NAMES:
            if re.match(pattern, own):
                parts.setdefault(re.sub(pattern, theirs, own), []).append(state[own])
                break
    tensors = {name: torch.cat(rows) for name, rows in parts.items()}
    for layer in range(shape.num_hidden_layers):
        tensors[f"model.layers.{layer}.mlp.Wi.bias"] = torch.zeros(shape.inner_rows)
    return tensors
