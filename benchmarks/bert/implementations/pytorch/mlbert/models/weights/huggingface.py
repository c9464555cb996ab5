"""Convert between our models and Hugging Face's: names, configuration and padded batches.

Parameter names are the same, but Hugging Face stores the tied decoder twice
and does not pad the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import IGNORED_LABEL, Batch
from mlbert.host.errors import UserError
from mlbert.host.json_files import read_json, shown
from mlbert.models.bert import AnyBert
from mlbert.models.weights import roberta
from mlbert.models.weights.checkpoint_names import TIED, VOCABULARY
from mlbert.models.weights.families import other_family
from mlbert.models.weights.modernbert import (
    MODEL_TYPE,
    SHARED_NAMES,
    TOKEN_CLASSIFIER,
    is_native,
    modernbert_config,
    shape_of_modernbert,
)

OWN_TYPE = "mlbert"
# The classes of this type, copied into an exported folder.
MODELING = Path(__file__).with_name("modeling_mlbert.py")

# Ours -> Hugging Face's: the benchmark's "gelu" is the tanh form,
# Hugging Face's "gelu" is the exact one.
_ACTIVATIONS = {"gelu": "gelu_pytorch_tanh", "gelu_erf": "gelu"}
_ACTIVATIONS_BACK = {"gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu": "gelu_erf"}


def obstacle(config: BertConfig) -> str | None:
    """Return why Hugging Face's BERT does not support this shape, or None if it does."""
    if config.is_rotary:
        return "its BERT has no rotary positions"
    options = {
        "ALiBi": config.position_embedding_type == "alibi",
        "LayerNorm before the sublayers": config.norm_position == "pre",
        "gated feed-forward layers": config.gated_mlp,
        "offset of positions": config.position_offset > 0,
    }
    missing = [name for name, used in options.items() if used]
    return f"its BERT has no {' and no '.join(missing)}" if missing else None


def huggingface_config(
    config: BertConfig, architecture: str = "BertForPreTraining"
) -> dict[str, object]:
    """Return the content of the ``config.json`` of a BERT.

    Raise UserError if it cannot express the shape.
    """
    if why_not := obstacle(config):
        raise UserError(
            "model.unsupported", "Hugging Face", why_not, "Keep the weights in mlbert's own format"
        )
    return {"architectures": [architecture], "model_type": "bert", **_shared_values(config)}


def _shared_values(config: BertConfig) -> dict[str, object]:
    values = {name: getattr(config, name) for name in SHARED_NAMES}
    return {
        "hidden_act": _ACTIVATIONS[config.hidden_act],
        "pad_token_id": 0,
        **values,
        "attention_probs_dropout_prob": config.attention_probs_dropout_prob,
        "hidden_dropout_prob": config.hidden_dropout_prob,
        "layer_norm_eps": config.layer_norm_eps,
        "type_vocab_size": config.type_vocab_size,
    }


def exported_config(
    config: BertConfig, architecture: str, labels: Sequence[str] = ()
) -> dict[str, object]:
    """Return the ``config.json`` of a model: of a BERT, a ModernBERT or a RoBERTa, or else of the
    classes in `MODELING`.

    ``labels``: names of a classifier's outputs.
    """
    if is_native(config, architecture):
        values = modernbert_config(config, architecture, _ACTIVATIONS[config.hidden_act])
    elif roberta.is_native(config):
        values = roberta.roberta_config(_shared_values(config), config, architecture)
    elif obstacle(config):
        values = _own_config(config, architecture)
    else:
        values = huggingface_config(config, architecture)
    if labels:
        values |= {
            "id2label": dict(enumerate(labels)),
            "label2id": {name: i for i, name in enumerate(labels)},
        }
    return values


def _own_config(config: BertConfig, architecture: str) -> dict[str, object]:
    options = {
        "without biases": not (config.attention_bias and config.mlp_bias and config.norm_bias),
        "without a bias in its head": not config.classifier_bias,
        "with local attention": config.local_attention > 0,
    }
    missing = [name for name, used in options.items() if used]
    if missing:
        reason = f"cannot express a {architecture} {' and '.join(missing)}"
        remedy = (
            "Keep the weights in mlbert's own format, or export with classifier_pooling cls or mean"
        )
        raise UserError("model.unsupported", "Hugging Face", reason, remedy)
    heads = {
        "BertForMaskedLM": "ForMaskedLM",
        "BertForPreTraining": "ForMaskedLM",
        "BertForSequenceClassification": "ForSequenceClassification",
        TOKEN_CLASSIFIER: "ForTokenClassification",
    }
    head = heads[architecture]
    classes = {"AutoConfig": "MlbertConfig", "AutoModel": "MlbertModel"}
    classes |= {f"AutoModel{name}": f"Mlbert{name}" for name in heads.values()}
    return {
        "architectures": [f"Mlbert{head}"],
        "model_type": OWN_TYPE,
        "auto_map": {auto: f"{MODELING.stem}.{name}" for auto, name in classes.items()},
        **_shared_values(config),
        **{
            name: getattr(config, name)
            for name in ("position_embedding_type", "norm_position", "gated_mlp")
        },
        # Under its own name, `transformers` would turn it into another form
        "rotary_base": config.rope_theta,
        "alibi_slopes": config.alibi_slopes,
    }


def config_from_huggingface(values: Mapping[str, object], path: str = "config.json") -> BertConfig:
    """Return our shape for a Hugging Face ``config.json``.

    Raise UserError for another architecture.
    """
    model_type = values.get("model_type", "bert")  # older ones have none
    if model_type not in ("bert", MODEL_TYPE, OWN_TYPE, *roberta.MODEL_TYPES):
        raise other_family(values, path)
    is_bert = model_type in ("bert", *roberta.MODEL_TYPES)
    if is_bert and values.get("position_embedding_type", "absolute") != "absolute":
        remedy = "Choose a checkpoint with absolute positions"
        raise UserError("model.unsupported", path, "uses relative positions", remedy)
    for name in ("is_decoder", "add_cross_attention"):
        if values.get(name):
            reason = f"has {name} true: it is a decoder"
            raise UserError("model.unsupported", path, reason, "Choose an encoder")
    key, default = (
        ("hidden_activation", "gelu") if model_type == MODEL_TYPE else ("hidden_act", "gelu")
    )
    activation = values.get(key, default)
    if str(activation) not in _ACTIVATIONS_BACK:
        reason = f"{key} {shown(activation)} is not a GELU"
        raise UserError("model.unsupported", path, reason, "Choose a checkpoint with GELU")
    own_activation = _ACTIVATIONS_BACK[str(activation)]
    if model_type == MODEL_TYPE:
        return shape_of_modernbert(values, own_activation, path)
    if model_type in roberta.MODEL_TYPES:
        values = roberta.with_usable_positions(values, path)
    not_of_bert = {"gated_mlp", "norm_position"} if is_bert else set()
    names = BertConfig.__dataclass_fields__.keys() - {"hidden_act", "rope_theta"} - not_of_bert
    known = {name: values[name] for name in names if name in values}
    if "rotary_base" in values and model_type == OWN_TYPE:
        known["rope_theta"] = values["rotary_base"]
    try:
        return BertConfig(hidden_act=own_activation, **known)  # type: ignore[arg-type]
    except TypeError:
        raise UserError(
            "model.shape", path, "lacks the shape of a BERT", "Choose a complete config.json"
        ) from None
    except UserError as error:
        raise UserError("model.shape", path, error.problem, "Choose a BERT's config.json") from None


def read_config(path: Path) -> BertConfig:
    """Return the shape in a ``config.json``.

    Raise UserError if it is missing, damaged or of another architecture.
    """
    return config_from_huggingface(
        read_json(path, "Give a folder with config.json and model.safetensors"), str(path)
    )


def to_huggingface(model: AnyBert) -> dict[str, Tensor]:
    """Return parameters by Hugging Face's names, float32 on the CPU,
    without vocabulary padding or tied duplicates.
    """
    state = {name: p.detach().float().cpu().clone() for name, p in model.named_parameters()}
    for name in state.keys() & {*VOCABULARY, *TIED}:
        state[name] = state[name][: model.config.vocab_size].clone()
    return state


def padded_tokens(batch: Batch, width: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the batch's tokens in Hugging Face's padded form, and the index of each token in it.

    Args:
        batch: may be padded to a static shape; an empty sequence becomes a row of padding.
        width: W, at least the longest sequence.

    Returns:
        int64 [S, W] arguments of a model's ``forward``, on the batch's device; int64 [T], indices
            into S W. Tokens
        after the last sequence have index S W and are dropped.
            Does not synchronize with the device.
    """
    count = batch.num_samples
    ends = batch.cu_seqlens[1:]
    rows = torch.searchsorted(
        ends, torch.arange(batch.num_tokens, dtype=ends.dtype, device=ends.device), right=True
    )
    places = rows * width + batch.position_ids

    def spread(values: Tensor) -> Tensor:
        return (
            values.new_zeros(count * width + 1)
            .index_copy_(0, places, values)[:-1]
            .view(count, width)
        )

    ones = torch.ones_like(batch.input_ids)
    parts = {
        "input_ids": batch.input_ids,
        "token_type_ids": batch.segment_ids,
        "attention_mask": ones,
    }
    return {name: spread(values) for name, values in parts.items()}, places


def padded_inputs(batch: Batch, pad_to: int | None = None) -> dict[str, Tensor]:
    """Return the batch and its labels in Hugging Face's padded form: int64 [S, pad_to] arguments of
    ``BertForPreTraining.forward``.

    ``pad_to`` None pads to the longest sequence of the batch.
    """
    width = pad_to or batch.max_seqlen
    tokens, places = padded_tokens(batch, width)
    labels = batch.input_ids.new_full((batch.num_samples * width,), IGNORED_LABEL)
    labels[places[batch.masked_positions]] = batch.masked_labels
    return tokens | {
        "labels": labels.view(-1, width),
        "next_sentence_label": batch.next_sentence_labels,
    }
