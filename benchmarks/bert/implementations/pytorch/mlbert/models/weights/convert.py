"""What all conversions share: our own form, the shape's file, and a writer that leaves nothing half-written.

Our form is a folder with ``bert_config.json``, ``model.safetensors`` (float32, names of
`mlbert.models.weights.checkpoint_names`, vocabulary unpadded) and, where the source has one beside it, ``vocab.txt``.

Between our form and the checkpoints of MosaicML's Composer (`mlbert.models.weights.files`).

What is written on either side are the parts that the source has, a classifier too: no head is made up. A tensor of a
head that is incomplete is drawn, and the report says so.

Between our form and a Hugging Face folder: ``config.json``, ``model.safetensors``, once ``pytorch_model.bin``.

TensorFlow checkpoints to our form (`mlbert.models.weights.tensorflow_variables`). Needs ``pip install
mlbert[tf]``.

Between our form and NVIDIA's ``.pt`` file: ``{'model': state_dict}`` in float32.

Their state dict has the vocabulary padded to a multiple of 8 (30528 rows) and holds the decoder a second time under
``cls.predictions.decoder.weight``. Files that a training program saved have segmented and fused names; these are read.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.tokenizer import TOKENIZER_JSON, lower_cases, read_tokenizer_json
from mlbert.data.formats.wordpiece import load_vocabulary
from mlbert.host.environment import environment
from mlbert.host.errors import UserError
from mlbert.host.files import fsync_path, read_plain
from mlbert.host.json_files import read_json
from mlbert.models.bert import initialize_parameter
from mlbert.models.weights.checkpoint_names import VOCABULARY, WORD_EMBEDDINGS, parameter_names
from mlbert.models.weights.checkpoint_state import Report, Shape, parameter_shapes
from mlbert.models.weights.files import (
    PYTORCH_WEIGHTS,
    check_target,
    new_path,
    read_composer,
    read_nvidia_pt,
    read_safetensors,
    read_weights,
    save_safetensors,
    write_composer,
    write_pt,
)
from mlbert.models.weights.huggingface import huggingface_config, obstacle, read_config
from mlbert.models.weights.renaming import own_state, padded, parameters_in
from mlbert.models.weights.tensorflow_variables import REMEDY, read_variables, without_suffix

WEIGHTS = "model.safetensors"
CONFIG = "bert_config.json"
TOKENIZER_FILES = ("vocab.txt", "tokenizer_config.json")


@dataclass(frozen=True)
class ReadCheckpoint:
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


def read_own(source: Path) -> ReadCheckpoint:
    """Reads our form: a run's ``weights/`` folder or what a conversion wrote."""
    shape = BertConfig.from_json(source / CONFIG)
    state, report = own_state(read_weights_folder(source), shape, str(source / WEIGHTS))
    return with_heads(ReadCheckpoint(shape, state, report, source))


def write_own(checkpoint: ReadCheckpoint, target: Path, known: Mapping[str, Shape] | None = None) -> Report:
    """Writes our form; returns the checkpoint's report. ``known`` as of `with_heads`."""
    write_weights_folder(with_heads(checkpoint, known), target, CONFIG, checkpoint.shape.to_json())
    return checkpoint.report


def write_weights_folder(checkpoint: ReadCheckpoint, target: Path, config_name: str, config_text: str) -> None:
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


def _refuse_cut_vocabulary(checkpoint: ReadCheckpoint) -> None:
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


def _write_tokenizer(checkpoint: ReadCheckpoint, folder: Path) -> None:
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


def with_heads(checkpoint: ReadCheckpoint, known: Mapping[str, Shape] | None = None) -> ReadCheckpoint:
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


def composer_to_torch(source: Path, target: Path, config: Path | None = None) -> Report:
    """Reads a Composer checkpoint, writes our folder. The shape comes from ``config``, else from the checkpoint's own
    Hugging Face configuration, else from the ``bert_config.json`` beside it. Raises UserError for damage, a forbidden
    object, or another architecture."""
    check_target(target)
    weights = read_composer(source)
    shape = weights.shape if weights.shape and config is None else find_shape(config, source.parent)
    known = parameters_in(weights.tensors, shape)
    own, report = own_state(weights.tensors, shape, str(source), known=known)
    return write_own(ReadCheckpoint(shape, own, report, source.parent), target, known)


def torch_to_composer(source: Path, target: Path) -> Report:
    """Reads our folder, writes what Composer's BERT, or MosaicBERT, starts from. Raises UserError for other shapes."""
    check_target(target)
    shape = BertConfig.from_json(source / CONFIG)
    tensors = read_weights_folder(source)
    known = parameters_in(tensors, shape)
    state, report = own_state(tensors, shape, str(source / WEIGHTS), known=known)
    checkpoint = with_heads(ReadCheckpoint(shape, state, report, source), known)
    write_composer(checkpoint.state, shape, target)
    for own in (name for name in checkpoint.state if name.startswith("cls.seq_relationship.")):
        report.missing.pop(own, None)
        report.taken.pop(own, None)
        report.dropped[own] = "Composer's models have no such part"
    return report


def huggingface_to_torch(source: Path, target: Path) -> Report:
    """Reads a Hugging Face folder, writes ours. Raises UserError for a missing, damaged or foreign file."""
    check_target(target)
    shape = read_config(source / "config.json")
    is_old = (source / PYTORCH_WEIGHTS).is_file() and not (source / WEIGHTS).is_file()
    file = source / (PYTORCH_WEIGHTS if is_old else WEIGHTS)
    tensors = read_weights(file).tensors if is_old else read_weights_folder(source)
    state, report = own_state(tensors, shape, str(file))
    with TemporaryDirectory() as made:
        folder = _vocabulary_of(source / TOKENIZER_JSON, Path(made)) or source
        return write_own(ReadCheckpoint(shape, state, report, folder), target)


def _vocabulary_of(tokenizer: Path, folder: Path) -> Path | None:
    """Writes the vocabulary of a tokenizer.json to ``folder``, as `common.TOKENIZER_FILES`, and returns that; ``None``
    where there is no such file, or a vocab.txt beside it."""
    names, config = TOKENIZER_FILES
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
    checkpoint = read_own(source)
    config = json.dumps(huggingface_config(checkpoint.shape), indent=2) + "\n"
    write_weights_folder(checkpoint, target, "config.json", config)
    return checkpoint.report


def tf1_to_torch(prefix: Path, target: Path, config: Path | None = None) -> Report:
    """Reads a TensorFlow 1 checkpoint, writes our folder. Raises UserError as `read_tf1`."""
    check_target(target)
    return write_own(read_tf1(prefix, config), target)


def read_tf1(prefix: Path, config: Path | None = None) -> ReadCheckpoint:
    """Reads a TensorFlow 1 checkpoint. ``prefix`` is the path, with or without ``.index``. Raises UserError for a
    missing or damaged file, wrong shapes, missing variables, or without TensorFlow."""
    return _read(prefix, config, object_based=False)


def tf2_to_torch(prefix: Path, target: Path, config: Path | None = None) -> Report:
    """Reads an object-based TensorFlow 2 checkpoint of a BERT of Google's model garden, writes our folder. Raises
    UserError as `read_tf1` does."""
    check_target(target)
    return write_own(_read(prefix, config, object_based=True), target)


def _read(prefix: Path, config: Path | None, object_based: bool) -> ReadCheckpoint:
    prefix = prefix.with_name(without_suffix(prefix.name))
    shape = find_shape(config, prefix.parent)
    index = prefix.with_name(f"{prefix.name}.index")
    if not index.is_file():
        raise UserError("file.missing", index, "does not exist", REMEDY)
    tf = _tensorflow(prefix)
    arrays, report = read_variables(tf.train.load_checkpoint, str(prefix), shape, object_based)
    state = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return ReadCheckpoint(shape, state, report, prefix.parent)


def _tensorflow(prefix: Path) -> Any:
    if not environment().get("TF_CPP_MIN_LOG_LEVEL"):
        # Read when the library is loaded: its notices are not errors, and its errors come as exceptions.
        os.putenv("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        with _no_notices():
            return importlib.import_module("tensorflow")
    except ImportError:
        raise UserError(
            "package.missing", prefix, "needs TensorFlow to be read", "Run: pip install mlbert[tf]"
        ) from None


@contextmanager
def _no_notices() -> Iterator[None]:
    """Keeps from the screen what TensorFlow 2.21 writes when it is loaded, whatever its log level."""
    screen, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(screen, 2)
        os.close(screen)
        os.close(nowhere)


def nvidia_to_torch(source: Path, target: Path, config: Path | None = None) -> Report:
    """Reads a ``.pt`` file, tensors only; writes our folder. Raises UserError as `read_nvidia_pt` and `own_state`."""
    check_target(target)
    shape = find_shape(config, source.parent)
    state, report = own_state(read_nvidia_pt(source), shape, str(source))
    return write_own(ReadCheckpoint(shape, state, report, source.parent), target)


def torch_to_nvidia(source: Path, target: Path) -> Report:
    """Reads our folder, writes a ``.pt`` file that NVIDIA's program loads with ``torch.load(path)['model']``."""
    check_target(target)
    return _write(read_own(source), target)


def tf1_to_nvidia(prefix: Path, target: Path, config: Path | None = None) -> Report:
    """Reads a TensorFlow 1 checkpoint, writes a ``.pt`` file as `torch_to_nvidia`. Raises UserError as `read_tf1`."""
    check_target(target)
    return _write(with_heads(read_tf1(prefix, config)), target)


def _write(checkpoint: ReadCheckpoint, target: Path) -> Report:
    shape = checkpoint.shape
    why_not = obstacle(shape) or (None if shape.tie_word_embeddings else "its BERT has no decoder of its own")
    if why_not:
        raise UserError("model.unsupported", "NVIDIA", why_not, "Keep the weights in our own form")
    state = padded(checkpoint.state, shape)
    content = {name: state[name] for name in parameter_names(shape.num_hidden_layers)}
    content["cls.predictions.decoder.weight"] = content[WORD_EMBEDDINGS]
    write_pt(target, {"model": content})
    return checkpoint.report
