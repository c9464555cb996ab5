"""Inputs of a pre-training run (model shape, data sets, vocabulary),
checked before any sample is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.open import (
    check_same_vocabulary,
    check_shape,
    check_vocabulary,
    describe,
    widths_at_most,
)
from mlbert.data.formats.tokenizer import lower_cases
from mlbert.data.formats.tokenizer_files import find_vocabulary, read_tokenizer_files
from mlbert.data.formats.wordpiece import load_vocabulary
from mlbert.data.loading.config import DataConfig
from mlbert.host.errors import UserError
from mlbert.runs.starting_weights import weights_file

SYNTHETIC = "synthetic"


@dataclass(frozen=True)
class PreTrainingInputs:
    """Inputs that are consistent with each other."""

    shape: BertConfig  # of the model
    train_data: str  # see `StoreInfo.known_as`, or "synthetic"
    eval_data: str  # likewise
    max_sequence_length: int  # of the training set, tokens
    sequences_per_pack: float | None  # see `StoreInfo.sequences_per_pack`
    vocabulary: Path | None  # see `vocabulary_of_data`
    lower_case: bool | None = None  # as `StoreInfo.lower_case` of the training set


def vocabulary_of_data(folder: Path) -> Path | None:
    """Return the vocab.txt that `mlbert prepare` writes next to a training set,
    or None if it does not exist.
    """
    vocabulary = folder.parent / "vocab.txt"
    return vocabulary if vocabulary.exists() else None


def inspect(
    data: DataConfig, shape: BertConfig, *, shape_file: Path, init_checkpoint: str | None
) -> PreTrainingInputs:
    """Check DATADIR_PHASE2 and EVALDIR against the model without reading a sample.

    Args:
        data: the settings of the data.
        shape: of the model.
        shape_file: BERT_CONFIG, for errors.
        init_checkpoint: the starting weights, if any.

    Raises:
        UserError: something is missing, or model, data sets and vocabulary do not match.
    """
    packed = data.max_sequences_per_pack
    if data.synthetic_data:
        rate = 1.0 if packed == 1 else None
        return PreTrainingInputs(
            shape, SYNTHETIC, SYNTHETIC, shape.max_position_embeddings, rate, None
        )
    most = widths_at_most(data.max_seq_length, data.max_predictions_per_seq, shape)
    train_set = describe(data.input_dir, most)
    eval_set = describe(data.eval_dir, most)
    check_same_vocabulary(train_set, eval_set)
    found = vocabulary_of_data(data.input_dir)
    if found:
        check_vocabulary(train_set, found)
        lower_cases(found)  # refuse what the export could not write
        check_start(init_checkpoint, found)
    for one in (train_set, eval_set):
        check_shape(one, shape, shape_file)
    return PreTrainingInputs(
        shape,
        train_set.known_as,
        eval_set.known_as,
        train_set.max_seq_length,
        train_set.sequences_per_pack(packed),
        found,
        train_set.lower_case,
    )


def check_start(init_checkpoint: str | None, vocabulary: Path) -> None:
    """Raise UserError if the vocabulary next to the starting weights is not
    that of the training set.
    """
    if init_checkpoint is None:
        return
    theirs = find_vocabulary(weights_file(init_checkpoint).parent)
    if not theirs.is_file():
        return
    if read_tokenizer_files(theirs).vocabulary != load_vocabulary(vocabulary):
        reason = f"differs from {vocabulary}, the vocabulary of the training set"
        remedy = "Prepare the text with this one, or set another INIT_CHECKPOINT"
        raise UserError("vocabulary.mismatch", theirs, reason, remedy)
