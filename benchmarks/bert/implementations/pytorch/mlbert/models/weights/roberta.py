"""Convert BERTs with `BertConfig.position_offset` to and from Hugging Face's RoBERTa:
configuration and names.

RoBERTa, XLM-RoBERTa and CamemBERT are BERTs with other names, one segment, and positions that are
counted from the row after the padding token's ID. The rows before that are never looked up by a
token; our models do not have them, and an exported folder has zeros there. A classifier's two
linear layers are our pooler and our classifier.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from mlbert.config.bert_config import BertConfig
from mlbert.host.errors import UserError
from mlbert.host.json_files import shown
from mlbert.models.weights.checkpoint_names import POSITION_EMBEDDINGS, own_torch_names

MODEL_TYPE = "roberta"
MODEL_TYPES = (MODEL_TYPE, "xlm-roberta", "camembert")  # one model, three tokenizers
_TOKEN_CLASSIFIER = "BertForTokenClassification"
ARCHITECTURES = {
    "BertForPreTraining": "RobertaForMaskedLM",  # RoBERTa has no next-sentence head
    "BertForMaskedLM": "RobertaForMaskedLM",
    "BertForSequenceClassification": "RobertaForSequenceClassification",
    _TOKEN_CLASSIFIER: "RobertaForTokenClassification",
}
_PAD_TOKEN_ID = 1  # if a config.json does not say it
_REMEDY = "Choose a complete config.json of a RoBERTa"
_NAMES = (
    (r"^bert\.pooler\.dense\.", "classifier.dense."),
    (r"^bert\.", "roberta."),
    (r"^cls\.predictions\.transform\.dense\.", "lm_head.dense."),
    (r"^cls\.predictions\.transform\.LayerNorm\.", "lm_head.layer_norm."),
    (r"^cls\.predictions\.", "lm_head."),
    (r"^classifier\.(?=weight|bias)", "classifier.out_proj."),
)


def with_usable_positions(values: Mapping[str, object], path: str) -> dict[str, object]:
    """Return a RoBERTa's ``config.json`` in a BERT's words: ``max_position_embeddings`` without the
    rows that no token looks up, and their number, ``position_offset``.

    Raise UserError if the numbers do not fit each other.
    """
    rows = values.get("max_position_embeddings")
    pad_token_id = values.get("pad_token_id", _PAD_TOKEN_ID)
    if not isinstance(rows, int) or not isinstance(pad_token_id, int):
        reason = (
            f"max_position_embeddings {shown(rows)} and pad_token_id {shown(pad_token_id)} "
            "do not fit together"
        )
        raise UserError("model.shape", path, reason, _REMEDY)
    offset = pad_token_id + 1
    return {**values, "max_position_embeddings": rows - offset, "position_offset": offset}


def without_unused_positions(tensors: Mapping[str, Tensor], shape: BertConfig) -> dict[str, Tensor]:
    """Return a RoBERTa's tensors without the rows of the position table that no token looks up.

    ``shape``: of the file's model. A file of ours, which lacks these rows, is unchanged.
    """
    rows = shape.position_offset + shape.max_position_embeddings
    return {
        name: tensor[shape.position_offset :]
        if POSITION_EMBEDDINGS in own_torch_names(name) and len(tensor) == rows
        else tensor
        for name, tensor in tensors.items()
    }


def is_native(shape: BertConfig) -> bool:
    """Return whether transformers' RoBERTa has this shape."""
    is_plain = shape.norm_position == "post" and not shape.gated_mlp
    return shape.position_offset > 0 and is_plain


def roberta_config(
    shared: Mapping[str, object], shape: BertConfig, architecture: str
) -> dict[str, object]:
    """Return the content of a RoBERTa's ``config.json``.

    Args:
        shared: values that a BERT has too, in its words.
        shape: of the model.
        architecture: name of our class.
    """
    rows = shape.max_position_embeddings + shape.position_offset
    return {
        **shared,
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": MODEL_TYPE,
        "max_position_embeddings": rows,
        "pad_token_id": shape.position_offset - 1,
    }


def roberta_state(
    state: Mapping[str, Tensor], shape: BertConfig, architecture: str
) -> dict[str, Tensor]:
    """Return our parameters by RoBERTa's names, with zeros in the unused rows of positions, and
    without heads that it does not have.

    Args:
        state: float32 parameters by our names, vocabulary unpadded.
        shape: of the model.
        architecture: name of our class.
    """
    is_classifier = architecture == "BertForSequenceClassification"
    unused = ("cls.",) if is_classifier else ("bert.pooler.", "cls.seq_relationship.")
    tensors = {}
    for name, tensor in state.items():
        if name.startswith(unused):
            continue
        if name == POSITION_EMBEDDINGS:
            tensor = torch.cat([tensor.new_zeros(shape.position_offset, len(tensor[0])), tensor])
        # Theirs of tokens is one linear layer, as ours.
        is_plain = architecture == _TOKEN_CLASSIFIER and name.startswith("classifier.")
        tensors[name if is_plain else _their_name(name)] = tensor
    if "lm_head.decoder.bias" in tensors:
        tensors["lm_head.bias"] = tensors["lm_head.decoder.bias"]
    return tensors


def _their_name(own: str) -> str:
    for pattern, replacement in _NAMES:
        own, count = re.subn(pattern, replacement, own)
        if count:
            break
    return own
