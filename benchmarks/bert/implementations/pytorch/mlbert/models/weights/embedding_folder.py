"""Write a folder that gives one vector for a text: ``mlbert export --to sentence-transformers``.

The folder has the files of sentence-transformers' models, which text-embeddings-inference, vLLM and
llama.cpp's converter read, too: the encoder without a head, with the tensor names of its class, and
how its last hidden states are pooled: the mean of all tokens.

The configuration is ours, not one that `transformers` saved: version 5 leaves out values of a
ModernBERT that other programs require.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlbert.data.formats.tokenizer_files import MODEL_CONFIG, TOKENIZER_CONFIG
from mlbert.host.errors import UserError
from mlbert.host.files import read_plain
from mlbert.host.json_files import parse_json, read_json
from mlbert.models.weights import modernbert, roberta
from mlbert.models.weights.huggingface import OWN_TYPE
from mlbert.models.weights.load import WEIGHTS, export_to_huggingface
from mlbert.models.weights.model_card import embedding_card
from mlbert.models.weights.weight_files import (
    check_target,
    new_path,
    read_safetensors,
    save_safetensors,
)

MODULES = "modules.json"  # its presence says that a folder is of sentence-transformers
POOLING = "1_Pooling"
_REMEDY = "Export the model again"
# By model_type: what precedes the encoder's tensors in a model with a head, and its class.
_ENCODERS: Mapping[str, tuple[str, str]] = {
    "bert": ("bert.", "BertModel"),
    OWN_TYPE: ("bert.", "MlbertModel"),
    modernbert.MODEL_TYPE: ("model.", "ModernBertModel"),
    roberta.MODEL_TYPE: ("roberta.", "RobertaModel"),
}
_OF_CLASSIFIERS = ("id2label", "label2id", "problem_type")
_PACKAGE = "sentence_transformers.models"
# All but the mean, in a Pooling's configuration.
_POOLING_MODES = (
    "cls_token",
    "lasttoken",
    "max_tokens",
    "mean_sqrt_len_tokens",
    "weightedmean_tokens",
)
# Normalize changes no cosine.
_MODULES_OF_A_MEAN = ("Transformer", "Pooling", "Normalize")


def export_embeddings(source: Path, target: Path) -> list[str]:
    """Write a folder that sentence-transformers loads without options, unless the model is of a
    shape of ours that `transformers` lacks: that one needs ``trust_remote_code=True``.

    Args:
        source: as for `mlbert.models.weights.load.export_to_huggingface`.
        target: the new folder.

    Returns:
        Sentences about programs that would not compute this model right.

    Raises:
        UserError: there are no weights, the source pools in another way, or the target exists.
    """
    check_target(target)
    _check_pooling(source)
    with new_path(target) as folder:
        shutil.rmtree(folder, ignore_errors=True)  # left by a killed process
        export_to_huggingface(source, folder)
        config = read_json(folder / MODEL_CONFIG, _REMEDY)
        _keep_encoder(folder, config)
        _write_modules(folder, config)
        card = folder / "README.md"
        card.write_text(embedding_card(card.read_text(encoding="utf-8")), encoding="utf-8")
    return _warnings(config)


def _check_pooling(source: Path) -> None:
    """Raise UserError if the source is a folder of sentence-transformers that does not take the
    mean, or that computes more than the mean.
    """
    file = source / MODULES
    if not file.is_file():
        return
    try:
        modules = parse_json(read_plain(file, _REMEDY))
        kinds = [module["type"].rpartition(".")[2] for module in modules]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError("file.json", file, "is not a list of modules", _REMEDY) from None
    others = [kind for kind in kinds if kind not in _MODULES_OF_A_MEAN]
    pooling = read_json(source / POOLING / MODEL_CONFIG, _REMEDY) if "Pooling" in kinds else {}
    is_other_mode = any(pooling.get(f"pooling_mode_{name}") for name in _POOLING_MODES)
    if others or is_other_mode or pooling.get("pooling_mode", "mean") != "mean":
        what = (
            f"has {', '.join(others)}"
            if others
            else "has a pooling other than the mean of all tokens"
        )
        reason = f"{what}, which is not supported"
        raise UserError("model.unsupported", file, reason, "Use the folder as it is")


def _keep_encoder(folder: Path, config: dict[str, Any]) -> None:
    """Remove the heads from the weights and from the configuration, which is changed."""
    prefix, class_name = _ENCODERS[config["model_type"]]
    tensors, _ = read_safetensors(folder / WEIGHTS, _REMEDY)
    encoder = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    (folder / WEIGHTS).unlink()  # the tensors are mapped from it, so it must not be written over
    save_safetensors(folder / WEIGHTS, encoder)
    config["architectures"] = [class_name]
    for key in _OF_CLASSIFIERS:
        config.pop(key, None)
    _write_json(folder / MODEL_CONFIG, config)


def _write_modules(folder: Path, config: Mapping[str, Any]) -> None:
    """Write how sentence-transformers reads the encoder and pools its last hidden states."""
    paths = {"Transformer": "", "Pooling": POOLING}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"{_PACKAGE}.{kind}"}
        for number, (kind, path) in enumerate(paths.items())
    ]
    _write_json(folder / MODULES, modules)
    length = {"max_seq_length": _max_length(folder, config), "do_lower_case": False}
    _write_json(folder / "sentence_bert_config.json", length)
    similarity: dict[str, object] = {
        "prompts": {},
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    }
    _write_json(folder / "config_sentence_transformers.json", similarity)
    pooling: dict[str, object] = {
        "word_embedding_dimension": config["hidden_size"],
        "pooling_mode_mean_tokens": True,
    }
    pooling |= {f"pooling_mode_{name}": False for name in _POOLING_MODES}
    (folder / POOLING).mkdir()
    _write_json(folder / POOLING / MODEL_CONFIG, pooling)


def _max_length(folder: Path, config: Mapping[str, Any]) -> int:
    """Return the most tokens of a text: the model's positions, or fewer if the tokenizer's
    configuration says so.
    """
    positions = int(config["max_position_embeddings"])
    if config["model_type"] == roberta.MODEL_TYPE:
        positions -= int(config["pad_token_id"]) + 1
    file = folder / TOKENIZER_CONFIG
    given = read_json(file, _REMEDY).get("model_max_length") if file.is_file() else None
    return min(positions, given) if isinstance(given, int) and given > 0 else positions


def _warnings(config: Mapping[str, Any]) -> list[str]:
    """Return sentences about programs that would not compute this model right.

    text-embeddings-inference leaves out the biases of a ModernBERT's norms without an error, and
    not every version of it has a tanh GELU.
    """
    model_type = config["model_type"]
    if model_type == OWN_TYPE:
        return ["only sentence-transformers reads this model, with trust_remote_code=True"]
    if model_type == modernbert.MODEL_TYPE and config["norm_bias"]:
        return ["text-embeddings-inference ignores the biases of its norms: do not serve it there"]
    activation = config.get("hidden_activation", config.get("hidden_act"))
    if activation != "gelu":
        return [f"not every version of text-embeddings-inference reads its {activation}"]
    return []


def _write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
