"""Load saved weights of any supported format. INIT_CHECKPOINT accepts:

* a ``model.safetensors``, or a folder with one: a run's ``weights/``, a Hugging Face folder (also
  with the older ``pytorch_model.bin``, or with several files and their index), or a run folder
* a run's checkpoint, ``checkpoints/step_*``; for a run folder without weights, the newest one
* a ``.pt`` file of NVIDIA or Composer, with a BERT, a MosaicBERT or a ModernBERT
* the address of such a file, or of a folder with a ``model.safetensors``
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.open import describe
from mlbert.data.formats.tokenizer import check_model_vocabulary, load_tokenizer
from mlbert.data.formats.tokenizer_files import find_vocabulary
from mlbert.data.loading import inputs
from mlbert.host.errors import UserError
from mlbert.host.json_files import read_json
from mlbert.models.bert import (
    AnyBert,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
)
from mlbert.models.weights import weight_files
from mlbert.models.weights.checkpoint_state import Report, check_unseen
from mlbert.models.weights.export import write_huggingface
from mlbert.models.weights.foreign_tokenizer import check_foreign, is_foreign
from mlbert.models.weights.huggingface import read_config, to_huggingface
from mlbert.models.weights.modernbert import with_gated_bias
from mlbert.models.weights.roberta import without_unused_positions
from mlbert.runs.starting_weights import (
    CHECKPOINT_TENSORS,
    PYTORCH_INDEX,
    SAFETENSORS_INDEX,
    weights_file,
)
from mlbert.runs.step_folders import read_step

WEIGHTS = "model.safetensors"  # file name, in the folders of runs and of Hugging Face
HUGGINGFACE = "huggingface"  # folder in a run folder
_WEIGHTS = "weights"  # name of the tensor in a checkpoint, as in `mlbert.training.checkpoint`


def read_checkpoint(folder: Path) -> weight_files.Weights:
    """Return a run checkpoint's parameters by name, vocabulary rows padded, and the shape.

    Raise UserError if it is damaged, or was written by an earlier version or another program,
    and so lacks names or shape.
    """
    identity, state = read_step(folder)
    try:
        shape = BertConfig(**json.loads(identity["model"]))
        names, sizes = zip(
            *((str(name), tuple(size)) for name, size in state["parameters"]), strict=True
        )
        with safe_open(folder / CHECKPOINT_TENSORS, "pt") as file:
            flat = file.get_tensor(_WEIGHTS)
        ends = accumulate(map(prod, sizes))
        tensors = {
            name: flat[end - prod(size) : end].view(size)
            for name, size, end in zip(names, sizes, ends, strict=True)
        }
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = f"does not tell whose weights lie in {CHECKPOINT_TENSORS} ({error!r})"
        remedy = "Give a checkpoint that this version of mlbert train wrote"
        raise UserError("checkpoint.format", folder, reason, remedy) from None
    return weight_files.Weights(tensors, shape)


def vocabulary_of_run(folder: Path) -> tuple[Path, bool | None] | None:
    """Return the vocabulary of a checkpoint's run and the ``lower_case`` of its data,
    or None if the data no longer exists.
    """
    try:
        config = read_json(folder.parent.parent / "config.json", "")["config"]
        if config["tokenizer"] is not None:
            moved = folder.parents[2] / Path(config["tokenizer"]).name  # with the run
            return load_tokenizer(moved if moved.is_dir() else config["tokenizer"]).file, None
        data = Path(config["input_dir"])
        found = inputs.vocabulary_of_data(data)
        return (found, _case_of(data)) if found else None
    except (OSError, ValueError, KeyError, TypeError):  # UserError too
        return None


def _case_of(data: Path) -> bool | None:
    try:
        return describe(data).lower_case
    except UserError:  # the set no longer exists
        return None


def load_weights(model: AnyBert, path: Path | str, extend_context: bool = False) -> Report:
    """Copy weights into the model.

    Keep the model's heads that the file lacks, and a classifier with another number of labels; the
    report lists these and unused heads. With ``extend_context``, the rotary bases may differ.

    Raises:
        UserError: the file is missing or damaged, or its tensors or configuration have another
            shape, vocabulary or kind of encoder. The model is then unchanged.
    """
    file = weights_file(path)
    weights = read_file(file)
    if weights.shape:
        check_unseen(weights.shape, model.config, str(file), extend_context)
    report = weight_files.load_state(model, weights.tensors, str(file))
    report.is_checked = weights.is_checked
    return report


def read_file(file: Path) -> weight_files.Weights:
    """Return the tensors and, if known, the shape of a file that `load_weights` accepts.

    Raise UserError as it does.
    """
    if file.name == CHECKPOINT_TENSORS:
        return read_checkpoint(file.parent)
    remedy = "Give an undamaged model.safetensors or .pt file"
    if file.name == SAFETENSORS_INDEX:
        tensors = weight_files.read_sharded(
            file, lambda shard: weight_files.read_safetensors(shard, remedy)[0]
        )
        weights = weight_files.Weights(tensors, is_checked=False)
    elif file.name == PYTORCH_INDEX:
        tensors = weight_files.read_sharded(
            file, lambda shard: weight_files.read_pt_tensors(shard, remedy)
        )
        weights = weight_files.Weights(tensors)
    elif file.suffix == ".safetensors":
        tensors, is_checked = weight_files.read_safetensors(file, remedy)
        weights = weight_files.Weights(tensors, is_checked=is_checked)
    elif file.suffix == ".pt" or file.name == weight_files.PYTORCH_WEIGHTS:
        # The records of a zip file have checksums.
        weights = replace(weight_files.read_weights(file), is_checked=zipfile.is_zipfile(file))
    elif not file.exists():
        raise UserError("file.missing", file, "does not exist", "Give the folder of a model")
    else:
        remedy = "Convert it first: mlbert convert --help"
        raise UserError(
            "checkpoint.format", file, "is neither a safetensors nor a .pt file", remedy
        )
    if file.name in (WEIGHTS, SAFETENSORS_INDEX, weight_files.PYTORCH_WEIGHTS, PYTORCH_INDEX):
        weights = replace(weights, shape=shape_in_folder(file.parent))
    tensors, shape = with_gated_bias(weights.tensors, weights.shape)
    if shape is not None:
        tensors = without_unused_positions(tensors, shape)
    return replace(weights, tensors=tensors, shape=shape)


def shape_in_folder(folder: Path) -> BertConfig | None:
    """Return the shape of the model in a folder of ours or of Hugging Face; None if it has no file
    for it. Raise UserError if the model is not supported.
    """
    own = folder / "bert_config.json"
    theirs = folder / "config.json"
    if own.is_file():
        return BertConfig.from_json(own)
    return read_config(theirs) if theirs.is_file() else None


def open_saved(source: Path) -> tuple[AnyBert, Report, Path, bool | None]:
    """Return a model with the saved weights, the report, the path where its vocabulary is expected,
    and whether text is lowercased (None: as the tokenizer_config.json there says).

    Args:
        source: as for INIT_CHECKPOINT, with the model's shape in the file or its folder.

    Raises:
        UserError: there are no weights, or their shape is unknown.
    """
    file = weights_file(source)
    weights = read_file(file)
    model = _model_of(weights, file)
    model.initialize(0)  # heads may be missing
    report = weight_files.load_state(model, weights.tensors, str(file))
    expected = find_vocabulary(file.parent)
    of_run = vocabulary_of_run(file.parent) if file.name == CHECKPOINT_TENSORS else None
    return model, report, *(of_run or (expected, None))


def _model_of(weights: weight_files.Weights, file: Path) -> AnyBert:
    """Return a model with the heads that the weights have."""
    if weights.shape is None:
        reason = "has no model configuration next to it"
        raise UserError("checkpoint.incomplete", file, reason, "Put its config.json there")
    architecture = weight_files.architecture_of(weights.tensors)
    if architecture == "BertForSequenceClassification":
        return BertForSequenceClassification(
            weights.shape, weight_files.num_labels(weights.tensors)
        )
    return (
        BertForPreTraining(weights.shape)
        if architecture == "BertForPreTraining"
        else BertForMaskedLM(weights.shape)
    )


def export_to_huggingface(source: Path, target: Path) -> Iterable[str]:
    """Write a folder that `transformers` loads. Return the names of the parameters that the source
    lacks, such as those of a head: they have new values.

    Raise UserError if there are no weights, or the target exists.
    """
    weight_files.check_target(target)
    finished = source / HUGGINGFACE
    if finished.is_dir():
        with weight_files.new_path(target) as partial:
            shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
            shutil.copytree(finished, partial)
        return ()
    model, report, vocabulary, lower_case = open_saved(source)
    if is_foreign(vocabulary):
        check_foreign(vocabulary, model.config.vocab_size)
    elif vocabulary.is_file():
        remedy = "Give the vocabulary that the model was trained with"
        tokenizer = load_tokenizer(vocabulary, lower_case)
        check_model_vocabulary(tokenizer, model.config.vocab_size, vocabulary, remedy)
    write_huggingface(
        target,
        to_huggingface(model),
        model.config,
        model.architecture,
        {"weights": source},
        vocabulary if vocabulary.is_file() else None,
        lower_case=lower_case,
    )
    return report.missing
