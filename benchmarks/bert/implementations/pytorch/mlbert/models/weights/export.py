"""Write a run's weights in our format, and in Hugging Face's if it has a class for the shape."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tokenizers.implementations import BertWordPieceTokenizer
from torch import Tensor

from mlbert.data.formats.manifest import file_sha256
from mlbert.data.formats.tokenizer import TOKENIZER_CONFIG, TOKENIZER_JSON, VOCAB_FILE, VOCABULARY_SHA256, lower_cases
from mlbert.data.formats.wordpiece import SPECIAL_TOKENS
from mlbert.models.bert import AnyBert
from mlbert.models.weights.huggingface import export_obstacle, export_state, model_config, to_huggingface
from mlbert.models.weights.model_card import model_card
from mlbert.models.weights.weight_files import new_path, save_safetensors


def write_weights(model: AnyBert, folder: Path, card: Mapping[str, object], vocabulary: Path | None) -> None:
    """Write ``weights/`` (safetensors, bert_config.json, README.md) and ``huggingface/`` into ``folder``.

    Both have float32 parameters; ours have the names of Hugging Face's BERT. ``huggingface/`` loads with
    ``from_pretrained`` of the ``transformers`` class with the model's name, or of ModernBERT for rotary models. If no
    such class exists, it is not written, and the model card says why. Raise UserError if a file cannot be written.
    """
    own, peer = folder / "weights", folder / "huggingface"
    why_not = export_obstacle(model)
    if why_not:
        card = {**card, "Hugging Face": f"no copy: {why_not}"}
    state = to_huggingface(model)
    text = model_card(model.architecture, card, hasattr(model, "cls"))
    with _folder(own, state, text, vocabulary, model) as place:
        (place / "bert_config.json").write_text(model.config.to_json(), encoding="utf-8")
    if not why_not:
        with _folder(peer, export_state(model), text, vocabulary, model) as place:
            _write_json(place / "config.json", model_config(model))
            if model.config.is_rotary and vocabulary is not None:
                _write_fast_tokenizer(place, vocabulary, model.config.max_position_embeddings)


@contextmanager
def _folder(
    target: Path, state: dict[str, Tensor], card: str, vocabulary: Path | None, model: AnyBert
) -> Iterator[Path]:
    """Write weights, model card and vocabulary to a temporary folder; rename it to ``target`` on exit."""
    with new_path(target) as place:
        shutil.rmtree(place, ignore_errors=True)  # left by a killed process
        place.mkdir(parents=True)
        save_safetensors(place / "model.safetensors", state)
        if vocabulary is not None:
            shutil.copyfile(vocabulary, place / VOCAB_FILE)
            _write_json(place / TOKENIZER_CONFIG, _tokenizer(vocabulary, model.config.max_position_embeddings))
        (place / "README.md").write_text(card, encoding="utf-8")
        yield place
        shutil.rmtree(target, ignore_errors=True)


def _tokenizer(vocabulary: Path, max_positions: int) -> dict[str, object]:
    """Return the tokenizer configuration that `transformers` needs."""
    cased = {"do_lower_case": lower_cases(vocabulary), "model_max_length": max_positions}
    return {"tokenizer_class": "BertTokenizer", **cased, VOCABULARY_SHA256: file_sha256(vocabulary)}


def _write_fast_tokenizer(place: Path, vocabulary: Path, max_positions: int) -> None:
    """Write a complete tokenizer: unlike for BERT, `transformers` cannot build one from ModernBERT's vocabulary."""
    tokenizer = BertWordPieceTokenizer(str(vocabulary), lowercase=lower_cases(vocabulary))
    (place / TOKENIZER_JSON).write_text(tokenizer.to_str(), encoding="utf-8")
    special = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS}
    values = _tokenizer(vocabulary, max_positions) | {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    _write_json(place / TOKENIZER_CONFIG, values)


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
