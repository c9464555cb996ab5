"""Between a run's ``weights/`` folder and a Hugging Face folder. Every tensor's fate is reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mlbert.core.errors import UserError
from mlbert.models import BertConfig, BertForPreTraining
from mlbert.models.huggingface import config_from_huggingface, huggingface_config, load_huggingface, to_huggingface

WEIGHTS = "model.safetensors"
TOKENIZER_FILES = ("vocab.txt", "tokenizer_config.json")


def huggingface_to_torch(source: Path, target: Path) -> dict[str, str]:
    """Reads ``config.json`` and ``model.safetensors``, writes ``bert_config.json`` and ``model.safetensors``.

    Returns tensor name -> what became of it. Raises UserError for a missing, damaged or foreign file.
    """
    path = source / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            path, f"cannot be read ({error})", "Give a folder with config.json and model.safetensors"
        ) from None
    shape = config_from_huggingface(values, str(path))
    report, state = _through_model(shape, source)
    _write(target, source, state, "bert_config.json", shape.to_json())
    return report


def torch_to_huggingface(source: Path, target: Path) -> dict[str, str]:
    """Reads ``bert_config.json`` and ``model.safetensors``, writes a folder that transformers loads."""
    shape = BertConfig.from_json(source / "bert_config.json")
    report, state = _through_model(shape, source)
    _write(target, source, state, "config.json", json.dumps(huggingface_config(shape), indent=2) + "\n")
    return report


def _through_model(shape: BertConfig, source: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Loads into a model and back: what does not fit is found here, before anything is written."""
    path = source / WEIGHTS
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            path, f"cannot be read ({error})", "Give a folder with an undamaged model.safetensors"
        ) from None
    model = BertForPreTraining(shape)
    model.initialize(seed=0)
    report = load_huggingface(model, {name: t.float() for name, t in state.items()}, str(path))
    return report, to_huggingface(model)


def _write(target: Path, source: Path, state: dict[str, Tensor], config_name: str, config_text: str) -> None:
    partial = target.with_name(f".{target.name}.partial")
    if target.exists():
        raise UserError(target, "exists already", "Name a new folder")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(state, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / config_name).write_text(config_text, encoding="utf-8")
        for name in TOKENIZER_FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, partial / name)
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(target, f"cannot be written ({error})", "Free space or name another folder") from None
