"""What all conversions share: our own form, the shape's file, and a writer that leaves nothing half-written.

Our form is a folder with ``bert_config.json``, ``model.safetensors`` (float32, names of
`mlbert.models.weights.checkpoint_names`, vocabulary unpadded) and, where the source has one beside it, ``vocab.txt``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.tokenizer import lower_cases
from mlbert.host.errors import UserError
from mlbert.host.files import fsync_path, read_plain
from mlbert.host.json_files import read_json
from mlbert.models.bert import initialize_parameter
from mlbert.models.weights.checkpoint_names import VOCABULARY
from mlbert.models.weights.checkpoint_state import Report, Shape, parameter_shapes
from mlbert.models.weights.files import check_target, new_path, read_safetensors, save_safetensors
from mlbert.models.weights.renaming import own_state

WEIGHTS = "model.safetensors"
CONFIG = "bert_config.json"
TOKENIZER_FILES = ("vocab.txt", "tokenizer_config.json")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read: its shape, float32 parameters by our names with unpadded vocabulary, the report.
    ``folder`` is where a vocabulary may lie beside the source."""

    shape: BertConfig
    state: dict[str, Tensor]
    report: Report
    folder: Path


def find_shape(config: Path | None, folder: Path) -> BertConfig:
    """The shape from ``--config``, or from the ``bert_config.json`` beside the checkpoint; UserError without either."""
    path = config or folder / CONFIG
    if config is None and not path.exists():
        raise UserError("file.missing", path, "does not exist", "Name the checkpoint's bert_config.json with --config")
    return BertConfig.from_json(path)


def read_weights_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's ``model.safetensors``; UserError for a missing or damaged one."""
    return read_safetensors(folder / WEIGHTS, "Give a folder with an undamaged model.safetensors")[0]


def read_own(source: Path) -> Checkpoint:
    """Reads our form: a run's ``weights/`` folder or what a conversion wrote."""
    shape = BertConfig.from_json(source / CONFIG)
    state, report = own_state(read_weights_folder(source), shape, str(source / WEIGHTS))
    return with_heads(Checkpoint(shape, state, report, source))


def write_own(checkpoint: Checkpoint, target: Path, known: Mapping[str, Shape] | None = None) -> Report:
    """Writes our form; returns the checkpoint's report. ``known`` as of `with_heads`."""
    write_weights_folder(with_heads(checkpoint, known), target, CONFIG, checkpoint.shape.to_json())
    return checkpoint.report


def write_weights_folder(checkpoint: Checkpoint, target: Path, config_name: str, config_text: str) -> None:
    """Writes ``model.safetensors``, a configuration and the tokenizer's files into a new folder."""
    check_target(target)
    _refuse_cut_vocabulary(checkpoint)
    with new_path(target) as folder:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        state = {name: tensor.contiguous() for name, tensor in checkpoint.state.items()}
        save_safetensors(folder / WEIGHTS, state)
        (folder / config_name).write_text(config_text, encoding="utf-8")
        _write_tokenizer(checkpoint, folder)
        for path in [*folder.iterdir(), folder]:
            fsync_path(path)


def _refuse_cut_vocabulary(checkpoint: Checkpoint) -> None:
    """A vocabulary of fewer entries than the model has is filled up; one of more has lost rows."""
    path, most = checkpoint.folder / TOKENIZER_FILES[0], checkpoint.shape.vocab_size
    if path.is_file() and (entries := len(read_plain(path, "Restore it").splitlines())) > most:
        reason = f"has {entries} entries, the model only {most}"
        raise UserError(
            "vocabulary.mismatch",
            path,
            reason,
            "Set vocab_size of its bert_config.json right, or put the right vocabulary there",
        )


def _write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """The source's vocabulary, and what it says of it; without the longest length `transformers` would know none."""
    vocabulary, config = (checkpoint.folder / name for name in TOKENIZER_FILES)
    if not vocabulary.exists():
        return
    shutil.copyfile(vocabulary, folder / vocabulary.name)
    own = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower_cases(vocabulary)}
    found = read_json(config, "Restore or remove it") if config.exists() else {}
    said, longest = found.get("model_max_length"), checkpoint.shape.max_position_embeddings
    most = min(said, longest) if isinstance(said, int) and said > 0 else longest
    values = {**own, **found, "model_max_length": most}
    (folder / config.name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def with_heads(checkpoint: Checkpoint, known: Mapping[str, Shape] | None = None) -> Checkpoint:
    """Adds the heads that the report calls missing, drawn as a new model's are, from seed 0.

    ``known``: the parameters that are wanted; None: `parameter_shapes`.
    """
    state, shape = dict(checkpoint.state), checkpoint.shape
    generator = torch.Generator().manual_seed(0)
    for name, size in (known or parameter_shapes(shape)).items():
        if name not in state:
            drawn = torch.empty(size)
            initialize_parameter(name, drawn, shape.initializer_range, generator)
            state[name] = drawn[: shape.vocab_size].clone() if name in VOCABULARY else drawn
    return replace(checkpoint, state=state)
