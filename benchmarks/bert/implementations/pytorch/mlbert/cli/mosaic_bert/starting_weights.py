"""Weights to fine-tune from: the shape that they tell, and the vocabulary that lies beside them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlbert.core.bert_config import BertConfig
from mlbert.core.errors import UserError
from mlbert.models.foreign import read_weights
from mlbert.models.huggingface import read_config
from mlbert.store.tokenizer import VOCAB_FILE


@dataclass(frozen=True)
class Start:
    """Shape and vocabulary, None where the weights have none."""

    shape: BertConfig | None
    vocabulary: Path | None


def find_start(source: Path) -> Start:
    """What is known of the weights of a run folder, of its ``weights/``, of a Hugging Face folder, or of a file. Raises
    UserError: nothing is there, or it is damaged."""
    if not source.exists():
        remedy = "Name a run folder, its weights/, a Hugging Face folder, or a checkpoint"
        raise UserError(source, "does not exist", remedy)
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
