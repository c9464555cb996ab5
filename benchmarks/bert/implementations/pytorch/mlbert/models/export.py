"""A run's weights as files: ours, and a copy for Hugging Face where its BERT is of the same shape."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file

from mlbert.core.errors import UserError
from mlbert.core.files import share_file
from mlbert.core.model_card import model_card
from mlbert.models.bert import AnyBert
from mlbert.models.huggingface import model_config, obstacle, to_huggingface
from mlbert.store.tokenizer import CONFIG_FILE, VOCAB_FILE, lower_cases


def write_weights(model: AnyBert, folder: Path, card: Mapping[str, object], vocabulary: Path | None) -> None:
    """Writes ``weights/`` (safetensors, bert_config.json, README.md) and ``huggingface/`` into ``folder``.

    Both hold float32 parameters under Hugging Face's names; ``huggingface/`` loads with ``from_pretrained`` of the
    ``transformers`` class of the model's name. It is left out, and the model card says why, where that class has no
    such shape. Raises UserError when a file cannot be written.
    """
    own, peer = folder / "weights", folder / "huggingface"
    why_not = obstacle(model.config)
    if why_not:
        card = {**card, "Hugging Face": f"no copy: {why_not}"}
    state = to_huggingface(model)
    try:
        for target in (own,) if why_not else (own, peer):
            target.mkdir(parents=True, exist_ok=True)
            save_file(state, target / "model.safetensors", metadata={"format": "pt"})
            share_file(target / "model.safetensors")
            if vocabulary is not None:
                shutil.copyfile(vocabulary, target / VOCAB_FILE)
                _write_json(target / CONFIG_FILE, _tokenizer(vocabulary, model.config.max_position_embeddings))
            (target / "README.md").write_text(
                model_card(model.architecture, card, hasattr(model, "cls")), encoding="utf-8"
            )
        (own / "bert_config.json").write_text(model.config.to_json(), encoding="utf-8")
        if not why_not:
            _write_json(peer / "config.json", model_config(model))
    except OSError as error:
        raise UserError(folder, f"cannot be written ({error.strerror})", "Free space or change LOGDIR") from None


def _tokenizer(vocabulary: Path, max_positions: int) -> dict[str, object]:
    """What `transformers` has to know beside the vocabulary."""
    cased = {"do_lower_case": lower_cases(vocabulary), "model_max_length": max_positions}
    return {"tokenizer_class": "BertTokenizer", **cased}


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
