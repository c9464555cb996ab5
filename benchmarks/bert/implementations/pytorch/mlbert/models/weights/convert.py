"""Convert checkpoints between our format and those of other programs.

Our format is a folder with ``bert_config.json``, ``model.safetensors`` (float32, names of
`mlbert.models.weights.checkpoint_names`, vocabulary unpadded) and ``vocab.txt`` if the source has
one.

Composer (`mlbert.models.weights.weight_files`): only the heads that the source has are written,
including a classifier. Missing tensors of an incomplete head are initialized, and the report says
so. Hugging Face: a folder with ``config.json`` and ``model.safetensors``, or the older
``pytorch_model.bin``; either may be several files with an index. TensorFlow
(`mlbert.models.weights.tensorflow_variables`), read only, which is in the extra ``tf``. NVIDIA: a
``.pt`` file ``{'model': state_dict}`` in float32, vocabulary padded to a multiple of 8 (30528
rows), with a second copy of the decoder as ``cls.predictions.decoder.weight``. Segmented and fused
names are read but not written; a bare state dict and ``{'state_dict': state_dict}`` are read too.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.added_words import add_words, read_words, write_added_words
from mlbert.data.formats.tokenizer import check_model_vocabulary, load_tokenizer
from mlbert.data.formats.tokenizer_files import TOKENIZER_JSON, find_vocabulary
from mlbert.host.environment import environment
from mlbert.host.errors import UserError, import_package
from mlbert.host.json_files import read_json
from mlbert.models.bert import initialize_parameter
from mlbert.models.task_model import TASK, read_card, write_card
from mlbert.models.weights import weight_files
from mlbert.models.weights.checkpoint_names import VOCABULARY, WORD_EMBEDDINGS, parameter_names
from mlbert.models.weights.checkpoint_state import (
    ENCODER,
    PREDICTIONS,
    Report,
    Shape,
    parameter_shapes,
)
from mlbert.models.weights.export import weights_folder, write_huggingface
from mlbert.models.weights.extend_vocabulary import NAMES, extend_vocabulary
from mlbert.models.weights.foreign_tokenizer import check_foreign, is_foreign
from mlbert.models.weights.grow import check_growth, grow
from mlbert.models.weights.huggingface import obstacle, read_config, to_huggingface
from mlbert.models.weights.load import open_saved, read_file
from mlbert.models.weights.tensorflow_variables import REMEDY, read_variables, without_suffix
from mlbert.runs.starting_weights import weights_file

WEIGHTS = "model.safetensors"
CONFIG = "bert_config.json"
_LISTED = 10  # words of a note


@dataclass(frozen=True)
class ReadCheckpoint:
    """A checkpoint in memory: shape, float32 parameters by our names with unpadded vocabulary, and
    the report. ``folder`` may contain the vocabulary.
    """

    shape: BertConfig
    state: dict[str, Tensor]
    report: Report
    folder: Path


def find_shape(config: Path | None, folder: Path) -> BertConfig:
    """Return the shape from ``--config``, or ``bert_config.json`` in the folder.

    Raise UserError without either.
    """
    path = config or folder / CONFIG
    if config is None and not path.exists():
        raise UserError(
            "file.missing",
            path,
            "does not exist",
            "Name the checkpoint's bert_config.json with --config",
        )
    return BertConfig.from_json(path)


def read_weights_folder(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder's ``model.safetensors``.

    Raise UserError if it is missing or damaged.
    """
    return weight_files.read_safetensors(
        folder / WEIGHTS, "Give a folder with an undamaged model.safetensors"
    )[0]


def read_own(source: Path, own_heads: bool = False) -> ReadCheckpoint:
    """Read our format: a run's ``weights/`` folder or the output of a conversion.

    ``own_heads``: return the heads that it has, including a classifier, not those of pre-training.
    """
    shape = BertConfig.from_json(source / CONFIG)
    tensors = read_weights_folder(source)
    return _own(
        tensors,
        shape,
        source / WEIGHTS,
        weight_files.parameters_in(tensors, shape) if own_heads else None,
    )


def _own(
    tensors: Mapping[str, Tensor],
    shape: BertConfig,
    file: Path,
    known: Mapping[str, Shape] | None = None,
) -> ReadCheckpoint:
    """Return the tensors of a file as a complete checkpoint; ``known`` as in `with_heads`.

    Raise UserError as `own_state`.
    """
    state, report = weight_files.own_state(tensors, shape, str(file), known=known)
    return with_heads(ReadCheckpoint(shape, state, report, file.parent), known)


def write_own(
    checkpoint: ReadCheckpoint, target: Path, known: Mapping[str, Shape] | None = None
) -> Report:
    """Write our format into a new folder and return the checkpoint's report;
    ``known`` as in `with_heads`.
    """
    weight_files.check_target(target)
    vocabulary = _vocabulary_of(checkpoint)
    complete = with_heads(checkpoint, known)
    with weights_folder(target, complete.state, vocabulary, checkpoint.shape) as folder:
        (folder / CONFIG).write_text(checkpoint.shape.to_json(), encoding="utf-8")
    return checkpoint.report


def _vocabulary_of(checkpoint: ReadCheckpoint) -> Path | None:
    """Return the vocabulary next to a checkpoint, or None without one.

    Raise UserError as `load_tokenizer`, or if it is not the model's.
    """
    path = find_vocabulary(checkpoint.folder)
    if not path.is_file():
        return None
    if is_foreign(path):
        check_foreign(path, checkpoint.shape.vocab_size)
        return path
    remedy = "Correct vocab_size in its bert_config.json, or put the right vocabulary there"
    check_model_vocabulary(load_tokenizer(path), checkpoint.shape.vocab_size, path, remedy)
    return path


def with_heads(
    checkpoint: ReadCheckpoint, known: Mapping[str, Shape] | None = None
) -> ReadCheckpoint:
    """Add missing parameters, initialized like a new model's from seed 0.

    ``known``: the required parameters; by default `parameter_shapes`.
    """
    state = dict(checkpoint.state)
    shape = checkpoint.shape
    generator = torch.Generator().manual_seed(0)
    for name, size in (known or parameter_shapes(shape)).items():
        if name not in state:
            drawn = torch.empty(size)
            initialize_parameter(name, drawn, shape, generator)
            state[name] = drawn[: shape.vocab_size].clone() if name in VOCABULARY else drawn
    return replace(checkpoint, state=state)


def composer_to_torch(source: Path, target: Path, config: Path | None = None) -> Report:
    """Convert a Composer checkpoint to our format.

    The shape is that of ``config``, else of the Hugging Face configuration in the checkpoint, else
    of ``bert_config.json`` in its folder, with MosaicBERT's parts if the tensors have them. Raise
    UserError if the file is damaged, contains a forbidden object, or has another architecture.
    """
    weights = weight_files.read_composer(source)
    given = weights.shape if weights.shape and config is None else find_shape(config, source.parent)
    shape = weight_files.composer_shape(given, weights.tensors)
    known = weight_files.parameters_in(weights.tensors, shape)
    return write_own(_own(weights.tensors, shape, source, known), target, known)


def torch_to_composer(source: Path, target: Path) -> Report:
    """Convert our format to a checkpoint for Composer's BERT, MosaicBERT or ModernBERT. Raise
    UserError for other shapes.
    """
    checkpoint = read_own(source, own_heads=True)
    weight_files.write_composer(checkpoint.state, checkpoint.shape, target)
    report = checkpoint.report
    for own in (name for name in checkpoint.state if name.startswith("cls.seq_relationship.")):
        report.missing.pop(own, None)
        report.taken.pop(own, None)
        report.dropped[own] = "Composer's models have no such part"
    return report


def huggingface_to_torch(source: Path, target: Path) -> Report:
    """Convert a Hugging Face folder to our format.

    Raise UserError for a missing, damaged or unsupported file.
    """
    shape = read_config(source / "config.json")
    file = weights_file(source)
    tensors = read_file(file).tensors
    known = _modernbert_parameters(tensors, shape) if shape.is_rotary else None
    return write_own(_own(tensors, shape, file, known), target, known)


def _modernbert_parameters(tensors: Mapping[str, Tensor], shape: BertConfig) -> dict[str, Shape]:
    """Return the parameters of an encoder and the head that a ModernBERT's file has; of a masked-LM
    model if it has none.
    """
    known = weight_files.parameters_in(tensors, shape)
    if any(not name.startswith(ENCODER) for name in known):
        return known
    complete = parameter_shapes(shape)
    return {
        name: size
        for name, size in complete.items()
        if name.startswith(ENCODER) or name.startswith(PREDICTIONS)
    }


def torch_to_huggingface(source: Path, target: Path) -> Report:
    """Convert our format to a folder that transformers loads; see
    `mlbert.models.weights.export.write_huggingface`.
    """
    weight_files.check_target(target)
    checkpoint = read_own(source, own_heads=True)
    vocabulary = _vocabulary_of(checkpoint)
    card = read_card(source) if (source / TASK).exists() else None
    write_huggingface(
        target,
        checkpoint.state,
        checkpoint.shape,
        weight_files.architecture_of(checkpoint.state),
        {"weights": source.name},
        vocabulary,
        () if card is None else card.classes,
        problem_type=None if card is None else card.problem_type,
    )
    if card is not None:
        write_card(card, target)
    return checkpoint.report


def tf1_to_torch(prefix: Path, target: Path, config: Path | None = None) -> Report:
    """Convert a TensorFlow 1 checkpoint to our format. Raise UserError as `read_tensorflow`."""
    return write_own(read_tensorflow(prefix, config, object_based=False), target)


def tf2_to_torch(prefix: Path, target: Path, config: Path | None = None) -> Report:
    """Convert an object-based TensorFlow 2 checkpoint of Google's model garden to our format.

    Raise UserError as `read_tensorflow`.
    """
    return write_own(read_tensorflow(prefix, config, object_based=True), target)


def read_tensorflow(prefix: Path, config: Path | None, object_based: bool) -> ReadCheckpoint:
    """Read a TensorFlow checkpoint; ``prefix`` is its path, with or without ``.index``.

    Raise UserError for a missing or damaged file, wrong shapes or missing variables,
    or if TensorFlow is not installed.
    """
    prefix = prefix.with_name(without_suffix(prefix.name))
    shape = find_shape(config, prefix.parent)
    index = prefix.with_name(f"{prefix.name}.index")
    if not index.is_file():
        raise UserError("file.missing", index, "does not exist", REMEDY)
    arrays, report = read_variables(
        _tensorflow(prefix).train.load_checkpoint, str(prefix), shape, object_based
    )
    state = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return ReadCheckpoint(shape, state, report, prefix.parent)


def _tensorflow(prefix: Path) -> Any:
    """Import TensorFlow.

    Hide its notices, also what version 2.21 writes to stderr on import at any log level.
    """
    if not environment().get("TF_CPP_MIN_LOG_LEVEL"):
        # Read when the library is loaded; errors are raised as exceptions.
        os.putenv("TF_CPP_MIN_LOG_LEVEL", "3")
    screen = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        return import_package("tensorflow", prefix, "tf")
    finally:
        os.dup2(screen, 2)
        os.close(screen)
        os.close(nowhere)


def grow_model(source: Path, target: Path, config: Path) -> Report:
    """Write a larger model that starts from a smaller one; see `mlbert.models.weights.grow`.

    Args:
        source: the smaller model, as for INIT_CHECKPOINT.
        target: new folder in our format, with the smaller model's vocabulary.
        config: shape of the larger model, a bert_config.json or a config.json.

    Raises:
        UserError: the larger shape is not a larger one of the same kind, or the vocabulary is not
            the model's.
    """
    weight_files.check_target(target)
    model, report, vocabulary, _ = open_saved(source)
    large = any_shape(config)
    check_growth(model.config, large, str(config))
    state = to_huggingface(model)
    kept = {name: tensor for name, tensor in state.items() if name not in report.missing}
    grown, became = grow(kept, model.config, large)
    taken = {name: ", ".join(names) for name, names in became.items()}
    grown_report = Report(taken=taken, is_checked=report.is_checked)
    checkpoint = ReadCheckpoint(large, grown, grown_report, vocabulary.parent)
    sizes = {name: tuple(tensor.shape) for name, tensor in grown.items()}
    return write_own(checkpoint, target, sizes)


def add_words_to_model(source: Path, target: Path, words: Path) -> Report:
    """Write a Hugging Face folder of a model with more words; see `mlbert.data.formats.added_words`
    and `mlbert.models.weights.extend_vocabulary`.

    Args:
        source: the model, as for INIT_CHECKPOINT, with its tokenizer.
        target: new folder.
        words: file with one word a line.

    Raises:
        UserError: a line is not one word, or the tokenizer is not the model's.
    """
    weight_files.check_target(target)
    asked = read_words(words)
    model, report, vocabulary, lower_case = open_saved(source)
    shape = model.config
    tokenizer = load_tokenizer(vocabulary, lower_case)
    remedy = "Give the vocabulary that the model was trained with"
    check_model_vocabulary(tokenizer, shape.vocab_size, vocabulary, remedy)
    added = add_words(tokenizer, asked, shape.vocab_size)
    state = to_huggingface(model)
    kept = {name: tensor for name, tensor in state.items() if name not in report.missing}
    larger = dataclasses.replace(shape, vocab_size=added.size)
    with tempfile.TemporaryDirectory() as folder:
        write_added_words(added, tokenizer, Path(folder), shape.max_position_embeddings)
        write_huggingface(
            target,
            extend_vocabulary(kept, added.pieces, added.size),
            larger,
            model.architecture,
            {"weights": source, "added words": len(added.pieces)},
            Path(folder) / TOKENIZER_JSON,
            read_card(source).classes if (source / TASK).exists() else (),
        )
    rows = f"{shape.vocab_size} -> {added.size} rows"
    taken = {name: f"{name}, {rows}" if name in NAMES else name for name in kept}
    notes = [f"{len(added.pieces)} words added, each one token"]
    if added.shared:
        listed = ", ".join(added.shared[:_LISTED])
        notes.append(f"one token now, with the row of an equal piece: {listed}")
    if added.known:
        notes.append(f"one token already: {', '.join(added.known[:_LISTED])}")
    return Report(taken=taken, is_checked=report.is_checked, notes=notes)


def any_shape(config: Path) -> BertConfig:
    """Return the shape in a bert_config.json or a config.json. Raise UserError as they do."""
    values = read_json(config, "Give a bert_config.json, or the config.json of a model")
    return read_config(config) if "model_type" in values else BertConfig.from_json(config)


def nvidia_to_torch(source: Path, target: Path, config: Path | None = None) -> Report:
    """Convert a ``.pt`` file to our format. Raise UserError as `read_nvidia_pt` and `own_state`."""
    shape = find_shape(config, source.parent)
    return write_own(_own(weight_files.read_nvidia_pt(source), shape, source), target)


def torch_to_nvidia(source: Path, target: Path) -> Report:
    """Convert our format to a ``.pt`` file that NVIDIA's program loads with
    ``torch.load(path)['model']``.
    """
    return _write(read_own(source), target)


def tf1_to_nvidia(prefix: Path, target: Path, config: Path | None = None) -> Report:
    """Convert a TensorFlow 1 checkpoint to NVIDIA's ``.pt`` file.

    Raise UserError as `read_tensorflow`.
    """
    return _write(with_heads(read_tensorflow(prefix, config, object_based=False)), target)


def _write(checkpoint: ReadCheckpoint, target: Path) -> Report:
    shape = checkpoint.shape
    why_not = obstacle(shape) or (
        None if shape.tie_word_embeddings else "its BERT has no separate decoder weights"
    )
    if why_not:
        raise UserError(
            "model.unsupported", "NVIDIA", why_not, "Keep the weights in mlbert's own format"
        )
    state = weight_files.padded(checkpoint.state, shape)
    content = {name: state[name] for name in parameter_names(shape.num_hidden_layers)}
    content["cls.predictions.decoder.weight"] = content[WORD_EMBEDDINGS]
    weight_files.write_pt(target, {"model": content})
    return checkpoint.report
