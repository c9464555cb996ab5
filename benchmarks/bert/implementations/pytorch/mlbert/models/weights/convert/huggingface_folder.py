"""Between our form and a Hugging Face folder: ``config.json``, ``model.safetensors``, once ``pytorch_model.bin``."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from mlbert.data.formats.tokenizer_json import TOKENIZER_JSON, read_tokenizer_json
from mlbert.data.formats.wordpiece import load_vocabulary
from mlbert.models.weights.checkpoint_state import Report
from mlbert.models.weights.convert import common
from mlbert.models.weights.convert.common import WEIGHTS, Checkpoint
from mlbert.models.weights.files import check_target
from mlbert.models.weights.foreign import PYTORCH_WEIGHTS, read_weights
from mlbert.models.weights.huggingface import huggingface_config, read_config
from mlbert.models.weights.renaming import own_state


def huggingface_to_torch(source: Path, target: Path) -> Report:
    """Reads a Hugging Face folder, writes ours. Raises UserError for a missing, damaged or foreign file."""
    check_target(target)
    shape = read_config(source / "config.json")
    is_old = (source / PYTORCH_WEIGHTS).is_file() and not (source / WEIGHTS).is_file()
    file = source / (PYTORCH_WEIGHTS if is_old else WEIGHTS)
    tensors = read_weights(file).tensors if is_old else common.read_weights_folder(source)
    state, report = own_state(tensors, shape, str(file))
    with TemporaryDirectory() as made:
        folder = _vocabulary_of(source / TOKENIZER_JSON, Path(made)) or source
        return common.write_own(Checkpoint(shape, state, report, folder), target)


def _vocabulary_of(tokenizer: Path, folder: Path) -> Path | None:
    """Writes the vocabulary of a tokenizer.json to ``folder``, as `common.TOKENIZER_FILES`, and returns that; ``None``
    where there is no such file, or a vocab.txt beside it."""
    names, config = common.TOKENIZER_FILES
    if tokenizer.with_name(names).exists() or not tokenizer.exists():
        return None
    entries, is_lower = read_tokenizer_json(tokenizer)
    (folder / names).write_text("\n".join(entries) + "\n", encoding="utf-8")
    words = {"tokenizer_class": "BertTokenizer", "do_lower_case": is_lower}
    (folder / config).write_text(json.dumps(words, indent=2) + "\n", encoding="utf-8")
    load_vocabulary(folder / names)
    return folder


def torch_to_huggingface(source: Path, target: Path) -> Report:
    """Reads our folder, writes one that transformers loads."""
    check_target(target)
    checkpoint = common.read_own(source)
    config = json.dumps(huggingface_config(checkpoint.shape), indent=2) + "\n"
    common.write_weights_folder(checkpoint, target, "config.json", config)
    return checkpoint.report
