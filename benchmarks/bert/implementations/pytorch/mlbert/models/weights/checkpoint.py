"""The weights of a run's checkpoint, read without the run: its state tells the model's shape and how they lie."""

from __future__ import annotations

import json
from itertools import accumulate
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.loading import inputs
from mlbert.host.errors import UserError
from mlbert.host.json_files import read_json
from mlbert.models.weights.foreign import Weights
from mlbert.runs.starting_weights import CHECKPOINT_TENSORS
from mlbert.runs.step_folders import read_step

_WEIGHTS = "weights"  # of the tensors, as `mlbert.training.snapshots` names it


def read_checkpoint(folder: Path) -> Weights:
    """Parameters by their names, vocabulary rows padded, and the shape. Raises UserError: it is damaged, or of an
    earlier version or another program, which say neither."""
    identity, state = read_step(folder)
    try:
        shape = BertConfig(**json.loads(identity["model"]))
        names, sizes = zip(*((str(name), tuple(size)) for name, size in state["parameters"]), strict=True)
        with safe_open(folder / CHECKPOINT_TENSORS, "pt") as file:
            flat = file.get_tensor(_WEIGHTS)
        ends = accumulate(map(prod, sizes))
        tensors = {
            name: flat[end - prod(size) : end].view(size) for name, size, end in zip(names, sizes, ends, strict=True)
        }
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = f"does not tell whose weights lie in {CHECKPOINT_TENSORS} ({error!r})"
        raise UserError(
            "checkpoint.format", folder, reason, "Give a checkpoint that this version of mlbert train wrote"
        ) from None
    return Weights(tensors, shape)


def vocabulary_of(folder: Path) -> Path | None:
    """The vocabulary of the run that a checkpoint is of, if its data are still there."""
    try:
        config = read_json(folder.parent.parent / "config.json", "")["config"]
        if config["tokenizer"] is not None:
            moved = folder.parents[2] / Path(config["tokenizer"]).name  # with the run
            return load_tokenizer(moved if moved.is_dir() else config["tokenizer"]).file
        return inputs.vocabulary_of(Path(config["input_dir"]))
    except (OSError, ValueError, KeyError, TypeError):  # UserError too
        return None
