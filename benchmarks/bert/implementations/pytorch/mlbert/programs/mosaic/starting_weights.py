"""Weights to fine-tune from: the shape that they tell, and the vocabulary that lies beside them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.tokenizer import VOCAB_FILE, hub_problem
from mlbert.host.errors import UserError
from mlbert.models.weights.foreign import read_weights
from mlbert.models.weights.huggingface import read_config
from mlbert.programs.mosaic.leaves import Leaves

HUB_FILES = ("config.json", "model.safetensors", VOCAB_FILE, "tokenizer_config.json")


@dataclass(frozen=True)
class Start:
    """Shape and vocabulary, None where the weights have none."""

    shape: BertConfig | None
    vocabulary: Path | None


def start_path(leaves: Leaves) -> Path | None:
    """What ``load_path``, ``model.pretrained_checkpoint`` or ``model.use_pretrained`` names; None: random weights."""
    given = leaves.optional_text("load_path", leaves.optional_text("model.pretrained_checkpoint", None))
    if given is not None:
        return Path(given)
    if leaves.flag("model.use_pretrained", False).value:
        return hub_folder(str(leaves.text("model.pretrained_model_name", None).value))
    return None


def hub_folder(name: str) -> Path:
    """A model of the Hugging Face hub, in its own cache. Raises UserError: it is not there and cannot be fetched."""
    problem = hub_problem()
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=[*HUB_FILES], local_files_only=problem is not None))
    except Exception as error:  # of many kinds, none of them ours
        reason = f"cannot be fetched: {problem or type(error).__name__}"
        raise UserError(
            "network.unreachable", f"model.use_pretrained of {name}", reason, "Give load_path=WEIGHTS on this machine"
        ) from None


def find_start(source: Path) -> Start:
    """What is known of the weights of a run folder, of its ``weights/``, of a Hugging Face folder, or of a file. Raises
    UserError: nothing is there, or it is damaged."""
    if not source.exists():
        remedy = "Name a run folder, its weights/, a Hugging Face folder, or a checkpoint"
        raise UserError("file.missing", source, "does not exist", remedy)
    folder = source if source.is_dir() else source.parent
    if (source / "weights").is_dir():
        folder = source / "weights"
    own, theirs, vocabulary = folder / "bert_config.json", folder / "config.json", folder / VOCAB_FILE
    shape: BertConfig | None = None
    if source.suffix == ".pt":
        shape = read_weights(source).shape
    elif own.is_file():
        shape = BertConfig.from_json(own)
    elif theirs.is_file():
        shape = read_config(theirs)
    return Start(shape, vocabulary if vocabulary.is_file() else None)
