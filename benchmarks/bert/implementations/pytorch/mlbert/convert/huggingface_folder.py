"""Between our form and a Hugging Face folder (``config.json``, ``model.safetensors``)."""

from __future__ import annotations

import json
from pathlib import Path

from mlbert.convert import common
from mlbert.convert.common import WEIGHTS, Checkpoint
from mlbert.models.files import check_target
from mlbert.models.huggingface import huggingface_config, read_config
from mlbert.models.renaming import Report, own_state


def huggingface_to_torch(source: Path, target: Path) -> Report:
    """Reads a Hugging Face folder, writes ours. Raises UserError for a missing, damaged or foreign file."""
    check_target(target)
    shape = read_config(source / "config.json")
    state, report = own_state(common.read_safetensors(source / WEIGHTS), shape, str(source / WEIGHTS))
    return common.write_own(Checkpoint(shape, state, report, source), target)


def torch_to_huggingface(source: Path, target: Path) -> Report:
    """Reads our folder, writes one that transformers loads."""
    check_target(target)
    checkpoint = common.read_own(source)
    config = json.dumps(huggingface_config(checkpoint.shape), indent=2) + "\n"
    common.write_weights_folder(checkpoint, target, "config.json", config)
    return checkpoint.report
