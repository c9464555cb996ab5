"""Write a run's weights in our format and in Hugging Face's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tokenizers.implementations import BertWordPieceTokenizer
from torch import Tensor

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.library_tokenizer import BERT_NAMES
from mlbert.data.formats.tokenizer import Tokenizer, load_tokenizer
from mlbert.data.formats.tokenizer_files import (
    RULE_NAMES,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    VOCAB_FILE,
    VOCABULARY_SHA256,
    copy_tokenizer_files,
    vocabulary_text,
)
from mlbert.host.files import fsync_path
from mlbert.host.json_files import read_json
from mlbert.models.bert import AnyBert
from mlbert.models.weights import modernbert, roberta
from mlbert.models.weights.foreign_tokenizer import is_foreign, special_ids
from mlbert.models.weights.huggingface import MODELING, exported_config, to_huggingface
from mlbert.models.weights.model_card import model_card
from mlbert.models.weights.weight_files import new_path, save_safetensors


def write_weights(
    model: AnyBert,
    folder: Path,
    card: Mapping[str, object],
    vocabulary: Path | None,
    classes: Sequence[str] = (),
    lower_case: bool | None = None,
    problem_type: str | None = None,
) -> None:
    """Write ``weights/`` (safetensors, bert_config.json, README.md)
    and ``huggingface/`` into ``folder``.

    Both have float32 parameters; ours have the names of Hugging Face's BERT. See
    `write_huggingface` for the second one. Raise UserError if a file cannot be written.
    """
    state = to_huggingface(model)
    shape = model.config
    with weights_folder(folder / "weights", state, vocabulary, shape, lower_case) as place:
        text = model_card(model.architecture, card, classes)
        (place / "README.md").write_text(text, encoding="utf-8")
        (place / "bert_config.json").write_text(shape.to_json(), encoding="utf-8")
    write_huggingface(
        folder / "huggingface",
        state,
        shape,
        model.architecture,
        card,
        vocabulary,
        classes,
        lower_case,
        problem_type,
    )


def write_huggingface(
    target: Path,
    state: Mapping[str, Tensor],
    shape: BertConfig,
    architecture: str,
    card: Mapping[str, object],
    vocabulary: Path | None,
    classes: Sequence[str] = (),
    lower_case: bool | None = None,
    problem_type: str | None = None,
) -> None:
    """Write or replace a folder that loads with ``from_pretrained`` of the ``transformers`` class
    with the model's name, of ModernBERT or RoBERTa for models of these forms, or with
    ``trust_remote_code=True`` for other shapes.

    Args:
        target: the folder.
        state: parameters as of `to_huggingface`.
        shape: of the model.
        architecture: name of the model's class.
        card: facts for README.md.
        vocabulary: vocab.txt or tokenizer.json, with the tokenizer's other files next to it,
            or None.
        classes: names of a classifier's outputs, if it has any.
        lower_case: whether the text was lowercased; None: as the tokenizer's files say.
        problem_type: Hugging Face's name of a sequence classifier's loss, if it is known.

    Raises:
        UserError: a file cannot be written.
    """
    outputs = len(state["classifier.weight"]) if "classifier.weight" in state else 0
    config = exported_config(shape, architecture, classes or [f"LABEL_{i}" for i in range(outputs)])
    if problem_type is not None:
        config["problem_type"] = problem_type
    model_type = config["model_type"]
    has_foreign = vocabulary is not None and is_foreign(vocabulary)
    if vocabulary is not None and (has_foreign or model_type == modernbert.MODEL_TYPE):
        config |= special_ids(vocabulary)
    if model_type == modernbert.MODEL_TYPE:
        tensors: Mapping[str, Tensor] = modernbert.modernbert_state(state, shape)
    elif model_type == roberta.MODEL_TYPE:
        tensors = roberta.roberta_state(state, shape, architecture)
    else:
        tensors = state
    with weights_folder(target, tensors, vocabulary, shape, lower_case) as place:
        names = config["architectures"]
        assert isinstance(names, list)
        text = model_card(names[0], card, classes)
        (place / "README.md").write_text(text, encoding="utf-8")
        _write_json(place / "config.json", config)
        if "auto_map" in config:
            shutil.copyfile(MODELING, place / MODELING.name)
        if vocabulary is not None and not has_foreign:
            _write_fast_tokenizer(place, load_tokenizer(place), is_bert=model_type == "bert")


@contextmanager
def weights_folder(
    target: Path,
    state: Mapping[str, Tensor],
    vocabulary: Path | None,
    shape: BertConfig,
    lower_case: bool | None = None,
) -> Iterator[Path]:
    """Write weights and vocabulary to a temporary folder; rename it to ``target`` on exit.

    ``lower_case`` as in `write_huggingface`.
    """
    with new_path(target) as place:
        shutil.rmtree(place, ignore_errors=True)  # left by a killed process
        place.mkdir(parents=True)
        save_safetensors(
            place / "model.safetensors",
            {name: tensor.contiguous() for name, tensor in state.items()},
        )
        if vocabulary is not None and is_foreign(vocabulary):
            copy_tokenizer_files(vocabulary, place)
        elif vocabulary is not None:
            _write_tokenizer(vocabulary, place, shape.max_position_embeddings, lower_case)
        yield place
        for path in [*place.iterdir(), place]:
            fsync_path(path)
        shutil.rmtree(target, ignore_errors=True)


def _write_tokenizer(
    vocabulary: Path, folder: Path, max_positions: int, lower_case: bool | None
) -> None:
    """Write a vocabulary and its tokenizer configuration, with model_max_length,
    which `transformers` needs.
    """
    tokenizer = load_tokenizer(vocabulary, lower_case)
    if vocabulary.suffix == ".json":
        text = vocabulary_text(tokenizer.vocabulary)
        (folder / VOCAB_FILE).write_text(text, encoding="utf-8")
    else:
        shutil.copyfile(vocabulary, folder / VOCAB_FILE)
    config = vocabulary.with_name(TOKENIZER_CONFIG)
    values = read_json(config, "Restore or remove it") if config.exists() else {}
    given = values.get("model_max_length")
    for name in RULE_NAMES:
        values.pop(name, None)
    values |= {"tokenizer_class": "BertTokenizer", **tokenizer.config}
    values[VOCABULARY_SHA256] = tokenizer.sha256
    values["model_max_length"] = (
        min(given, max_positions) if isinstance(given, int) and given > 0 else max_positions
    )
    _write_json(folder / TOKENIZER_CONFIG, values)


def _write_fast_tokenizer(place: Path, tokenizer: Tokenizer, is_bert: bool) -> None:
    """Write a complete tokenizer, which servers of models read.

    `transformers` builds one from a vocabulary only for its own BERT.
    """
    rules = tokenizer.rules
    assert rules is not None, "other tokenizers are copied"
    fast = BertWordPieceTokenizer(
        str(place / VOCAB_FILE),
        lowercase=rules.lower_case,
        strip_accents=rules.strip_accents,
        handle_chinese_chars=rules.split_cjk,
    )
    (place / TOKENIZER_JSON).write_text(fast.to_str(), encoding="utf-8")
    if is_bert:
        return
    values = read_json(place / TOKENIZER_CONFIG, "") | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **BERT_NAMES,
    }
    _write_json(place / TOKENIZER_CONFIG, values)


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
