"""Between our form and a Hugging Face folder: ``config.json``, ``model.safetensors``, once ``pytorch_model.bin``."""

from __future__ import annotations

import json
from pathlib import Path

from mlbert.convert import common
from mlbert.convert.common import WEIGHTS, Checkpoint
from mlbert.core.checkpoint_state import Report
from mlbert.models.files import check_target
from mlbert.models.foreign import PYTORCH_WEIGHTS, read_weights
from mlbert.models.huggingface import huggingface_config, read_config
from mlbert.models.renaming import own_state


def huggingface_to_torch(source: Path, target: Path) -> Report:
    """Reads a Hugging Face folder, writes ours. Raises UserError for a missing, damaged or foreign file."""
    check_target(target)
    shape = read_config(source / "config.json")
    is_old = (source / PYTORCH_WEIGHTS).is_file() and not (source / WEIGHTS).is_file()
    file = source / (PYTORCH_WEIGHTS if is_old else WEIGHTS)
    tensors = read_weights(file).tensors if is_old else common.read_safetensors(file)
    state, report = own_state(tensors, shape, str(file))
    return common.write_own(Checkpoint(shape, state, report, source), target)


def torch_to_huggingface(source: Path, target: Path) -> Report:
    """Reads our folder, writes one that transformers loads."""
    check_target(target)
    checkpoint = common.read_own(source)
    config = json.dumps(huggingface_config(checkpoint.shape), indent=2) + "\n"
    common.write_weights_folder(checkpoint, target, "config.json", config)
    return checkpoint.report
