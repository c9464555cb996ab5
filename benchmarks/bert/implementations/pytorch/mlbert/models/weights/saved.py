"""A model of saved weights, whatever they were saved by, and its copy for Hugging Face."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from mlbert.data.formats.tokenizer import VOCAB_FILE
from mlbert.host.errors import UserError
from mlbert.models.bert import AnyBert, BertForMaskedLM, BertForPreTraining, BertForSequenceClassification
from mlbert.models.weights.checkpoint import vocabulary_of
from mlbert.models.weights.checkpoint_state import Report
from mlbert.models.weights.export import write_weights
from mlbert.models.weights.files import check_target, new_path
from mlbert.models.weights.foreign import Weights
from mlbert.models.weights.huggingface import obstacle
from mlbert.models.weights.load import read_file
from mlbert.models.weights.renaming import load_state
from mlbert.runs.starting_weights import CHECKPOINT_TENSORS, weights_file

HUGGINGFACE = "huggingface"


def open_saved(source: Path) -> tuple[AnyBert, Report, Path]:
    """The model of saved weights, what became of their tensors, and where its vocabulary would lie.

    Args:
        source: what INIT_CHECKPOINT may name, with the model's shape in or beside it.

    Raises:
        UserError: there are no weights, or nothing tells their shape.
    """
    file = weights_file(source)
    weights = read_file(file)
    model = _model_of(weights, file)
    model.initialize(0)  # heads may be missing
    report = load_state(model, weights.tensors, str(file))
    beside = file.with_name(VOCAB_FILE)
    return model, report, (vocabulary_of(file.parent) or beside if file.name == CHECKPOINT_TENSORS else beside)


def _model_of(weights: Weights, file: Path) -> AnyBert:
    """A model with the heads that the weights have."""
    if weights.shape is None:
        raise UserError(
            "checkpoint.incomplete", file, "nothing beside it tells the model's shape", "Put its config.json there"
        )
    if (classifier := weights.tensors.get("classifier.weight")) is not None:
        return BertForSequenceClassification(weights.shape, len(classifier))
    if any("seq_relationship" in name for name in weights.tensors):
        return BertForPreTraining(weights.shape)
    return BertForMaskedLM(weights.shape)


def export_to_huggingface(source: Path, target: Path) -> None:
    """Writes a folder that `transformers` loads. Raises UserError: there are no weights, the target is there already,
    or `transformers` has no such model."""
    check_target(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    finished = source / HUGGINGFACE
    if finished.is_dir():
        with new_path(target) as partial:
            shutil.copytree(finished, partial)
        return
    with TemporaryDirectory(dir=target.parent) as made:
        model, _, vocabulary = open_saved(source)
        write_weights(model, Path(made), {"weights": source}, vocabulary if vocabulary.is_file() else None)
        folder = Path(made) / HUGGINGFACE
        if not folder.is_dir():
            raise UserError(
                "model.unsupported",
                source,
                f"Hugging Face: {obstacle(model.config)}",
                "Keep the weights in our own form",
            )
        folder.rename(target)
