"""Starting weights: what INIT_CHECKPOINT may name.

* a ``model.safetensors``, or a folder that holds one: a run's ``weights/``, or Hugging Face's, also with their older
  ``pytorch_model.bin``; or the run's folder
* a run's checkpoint, ``checkpoints/step_*``; of a run without weights, the newest
* a ``.pt`` file of NVIDIA's or Composer's, of a BERT or a MosaicBERT
"""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

from mlbert.config.bert_config import BertConfig
from mlbert.host.errors import UserError
from mlbert.models.bert import AnyBert
from mlbert.models.weights.checkpoint import read_checkpoint
from mlbert.models.weights.checkpoint_state import Report, check_unseen
from mlbert.models.weights.files import read_safetensors
from mlbert.models.weights.foreign import PYTORCH_WEIGHTS, Weights, read_weights
from mlbert.models.weights.huggingface import read_config
from mlbert.models.weights.modernbert import is_modernbert, own_tensors
from mlbert.models.weights.renaming import load_state
from mlbert.runs.starting_weights import CHECKPOINT_TENSORS, weights_file

WEIGHTS = "model.safetensors"


def load_weights(model: AnyBert, path: Path) -> Report:
    """Copies weights into the model. Heads that one side lacks, and a classifier of another number of labels, are in
    the report: the model's stay as they are.

    Raises:
        UserError: the file is missing or damaged; it holds another shape, vocabulary or kind of encoder, as its tensors
            or the configuration beside them tell. The model is then unchanged.
    """
    file = weights_file(path)
    weights = read_file(file)
    if weights.shape:
        check_unseen(weights.shape, model.config, str(file))
    report = load_state(model, weights.tensors, str(file))
    report.is_checked = weights.is_checked
    return report


def read_file(file: Path) -> Weights:
    """The tensors of a file that `load_weights` takes, and the shape that it tells. Raises UserError as that does."""
    if file.name == CHECKPOINT_TENSORS:
        return read_checkpoint(file.parent)
    if file.suffix == ".safetensors":
        remedy = "Set INIT_CHECKPOINT to a model.safetensors or a .pt file, or to none"
        tensors, is_checked = read_safetensors(file, remedy)
        weights = Weights(tensors, is_checked=is_checked)
    elif file.suffix == ".pt" or file.name == PYTORCH_WEIGHTS:
        weights = replace(read_weights(file), is_checked=zipfile.is_zipfile(file))  # whose records have checksums
    else:
        raise UserError(
            "checkpoint.format",
            file,
            "is neither a safetensors nor a .pt file",
            "Convert it first: mlbert convert --help",
        )
    if file.name in (WEIGHTS, PYTORCH_WEIGHTS):
        weights = replace(weights, shape=_shape_beside(file.parent))
    if weights.shape is not None and is_modernbert(weights.tensors):
        weights = replace(weights, tensors=own_tensors(weights.tensors, weights.shape, str(file)))
    return weights


def _shape_beside(folder: Path) -> BertConfig | None:
    own, theirs = folder / "bert_config.json", folder / "config.json"
    if own.is_file():
        return BertConfig.from_json(own)
    return read_config(theirs) if theirs.is_file() else None
