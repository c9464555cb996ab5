"""Between our form and a Hugging Face folder (``config.json``, ``model.safetensors``)."""

from __future__ import annotations

import json
from pathlib import Path

from mlbert.convert.common import (
    WEIGHTS,
    Checkpoint,
    check_target,
    read_own,
    read_safetensors,
    write_own,
    write_weights_folder,
)
from mlbert.core.errors import UserError
from mlbert.models.huggingface import config_from_huggingface, huggingface_config
from mlbert.models.renaming import Report, own_state


def huggingface_to_torch(source: Path, target: Path) -> Report:
    """Reads a Hugging Face folder, writes ours. Raises UserError for a missing, damaged or foreign file."""
    check_target(target)
    path = source / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            path, f"cannot be read ({error})", "Give a folder with config.json and model.safetensors"
        ) from None
    if not isinstance(values, dict):
        raise UserError(path, "holds no JSON object", "Give a folder with config.json and model.safetensors")
    shape = config_from_huggingface(values, str(path))
    state, report = own_state(read_safetensors(source / WEIGHTS), shape, str(source / WEIGHTS))
    write_own(Checkpoint(shape, state, report, source), target)
    return report


def torch_to_huggingface(source: Path, target: Path) -> Report:
    """Reads our folder, writes one that transformers loads."""
    check_target(target)
    checkpoint = read_own(source)
    config = json.dumps(huggingface_config(checkpoint.shape), indent=2) + "\n"
    write_weights_folder(checkpoint, target, "config.json", config)
    return checkpoint.report
