"""Between our form and a Hugging Face folder (``config.json``, ``model.safetensors``)."""

from __future__ import annotations

import json
from pathlib import Path

from mlbert.convert import common
from mlbert.convert.common import WEIGHTS, Checkpoint
from mlbert.core.errors import UserError
from mlbert.models.huggingface import config_from_huggingface, huggingface_config
from mlbert.models.renaming import Report, own_state

_REMEDY = "Give a folder with config.json and model.safetensors"


def huggingface_to_torch(source: Path, target: Path) -> Report:
    """Reads a Hugging Face folder, writes ours. Raises UserError for a missing, damaged or foreign file."""
    common.check_target(target)
    path = source / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(path, f"cannot be read ({error})", _REMEDY) from None
    if not isinstance(values, dict):
        raise UserError(path, "holds no JSON object", _REMEDY)
    shape = config_from_huggingface(values, str(path))
    state, report = own_state(common.read_safetensors(source / WEIGHTS), shape, str(source / WEIGHTS))
    return common.write_own(Checkpoint(shape, state, report, source), target)


def torch_to_huggingface(source: Path, target: Path) -> Report:
    """Reads our folder, writes one that transformers loads."""
    common.check_target(target)
    checkpoint = common.read_own(source)
    config = json.dumps(huggingface_config(checkpoint.shape), indent=2) + "\n"
    common.write_weights_folder(checkpoint, target, "config.json", config)
    return checkpoint.report
