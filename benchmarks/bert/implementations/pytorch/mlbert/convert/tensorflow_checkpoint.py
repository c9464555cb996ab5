"""TensorFlow checkpoints to our form: TensorFlow 1 (``model.ckpt-28252``) and object-based TensorFlow 2.

Read with TensorFlow (``pip install mlbert[tf]``), which checks every tensor's checksum. Optimizer slots and counters
are dropped. Kernels are transposed; TensorFlow 2 keeps query, key and value kernels as [D, N, H], the attention
output's as [N, H, D] and their biases as [N, H].

Legend: D hidden, N heads, H head size.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlbert.convert.common import Checkpoint, check_target, find_shape, write_own
from mlbert.core.checkpoint_names import (
    VOCABULARY,
    is_tf1_optimizer,
    is_tf2_bookkeeping,
    is_transposed,
    own_tf2_name,
    tf1_names,
    tf2_names,
)
from mlbert.core.config import environment
from mlbert.core.errors import UserError
from mlbert.models import BertConfig
from mlbert.models.renaming import Report, complete, empty_parameters, fitted

SLOT = "optimizer slot or counter"
REMEDY = "Give the prefix of a whole checkpoint: the path without .index"
SUFFIXES = (".index", ".meta", ".data-00000-of-00001")


def tf1_to_torch(prefix: Path, target: Path, config: Path | None = None) -> Report:
    """Reads a TensorFlow 1 checkpoint, writes our folder. ``prefix`` is the path without ``.index``.

    Raises UserError for a missing or damaged file, wrong shapes, missing variables, or without TensorFlow.
    """
    check_target(target)
    prefix, shape = _without_suffix(prefix), find_shape(config, prefix.parent)
    names = tf1_names(shape.num_hidden_layers)
    own = {theirs: name for name, theirs in names.items()}
    checkpoint = _read(prefix, shape, own.get, is_tf1_optimizer, names)
    write_own(checkpoint, target)
    return checkpoint.report


def tf2_to_torch(prefix: Path, target: Path, config: Path | None = None) -> Report:
    """Reads an object-based TensorFlow 2 checkpoint of a BERT of Google's model garden, writes our folder.

    Raises UserError as `tf1_to_torch` does.
    """
    check_target(target)
    prefix, shape = _without_suffix(prefix), find_shape(config, prefix.parent)
    names = tf2_names(shape.num_hidden_layers, "items")
    checkpoint = _read(prefix, shape, lambda key: own_tf2_name(key, shape.num_hidden_layers), is_tf2_bookkeeping, names)
    write_own(checkpoint, target)
    return checkpoint.report


def _without_suffix(prefix: Path) -> Path:
    for suffix in SUFFIXES:
        if prefix.name.endswith(suffix):
            prefix = prefix.with_name(prefix.name.removesuffix(suffix))
    return prefix


def _tensorflow(prefix: Path) -> Any:
    if not environment().get("TF_CPP_MIN_LOG_LEVEL"):
        # Read when the library is loaded: its notices are not errors, and its errors come as exceptions.
        os.putenv("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        return importlib.import_module("tensorflow")
    except ImportError:
        raise UserError(prefix, "needs TensorFlow to be read", "Run: pip install mlbert[tf]") from None


def _read(
    prefix: Path,
    shape: BertConfig,
    own_name: Callable[[str], str | None],
    is_optimizer: Callable[[str], bool],
    names: dict[str, str],
) -> Checkpoint:
    index = prefix.with_name(f"{prefix.name}.index")
    if not index.is_file():
        raise UserError(index, "does not exist", REMEDY)
    tf = _tensorflow(prefix)
    reader = _asked(prefix, "its index", lambda: tf.train.load_checkpoint(str(prefix)))
    variables = _asked(prefix, "its index", reader.get_variable_to_shape_map)
    known, report = empty_parameters(shape), Report()
    state: dict[str, Tensor] = {}
    came_from: dict[str, str] = {}
    for name in sorted(variables, key=_preferred_first):
        own = None if is_optimizer(name) else own_name(name)
        if own is None or own not in known:
            _refuse_further_layers(name, shape, prefix)
            report.dropped[name] = SLOT if is_optimizer(name) else "no such parameter"
            continue
        tensor = _as_ours(_asked(prefix, name, reader.get_tensor, name), name, own, known[own], shape, prefix)
        if own not in state:
            state[own], came_from[own] = tensor, name
            report.taken[name] = own
        elif own.startswith("bert.pooler.") or torch.equal(state[own], tensor):
            # The encoder's own pooler is not trained where the next-sentence head has one.
            report.dropped[name] = f"{came_from[own]} is taken"
        else:
            raise UserError(prefix, f"{name} and {came_from[own]} differ", "The model has one tensor for both")
    if not state:
        raise UserError(prefix, "holds no variable of a BERT", "Check that it is the form that the command names")
    return Checkpoint(shape, complete(state, known, report, str(prefix), names), report, prefix.parent)


def _asked(prefix: Path, what: str, question: Callable[..., Any], *words: str) -> Any:
    """TensorFlow's answer. What it raises over a damaged file is of many kinds; all become one UserError."""
    try:
        return question(*words)
    except Exception as error:
        text = " ".join(str(getattr(error, "message", None) or error).split())
        raise UserError(prefix, f"is damaged at {what} ({text})", REMEDY) from None


def _preferred_first(name: str) -> tuple[bool, str]:
    return not name.startswith(("next_sentence", "model/classification_heads")), name


def _refuse_further_layers(name: str, shape: BertConfig, prefix: Path) -> None:
    """An unknown part of a layer means that the configuration, or the architecture, is another one."""
    layer = re.search(r"/layer_(\d+)/", name)
    beyond = layer is not None and int(layer[1]) >= shape.num_hidden_layers
    if (beyond and not is_tf1_optimizer(name)) or ("/_attention_layer/" in name and not is_tf2_bookkeeping(name)):
        raise UserError(
            prefix, f"{name} has no place in a BERT of this shape", "Use the bert_config.json of the checkpoint"
        )


def _as_ours(array: Any, name: str, own: str, parameter: Tensor, shape: BertConfig, prefix: Path) -> Tensor:
    """A variable as our float32 parameter, [out, in] or [out], vocabulary rows unpadded."""
    array = np.asarray(array)
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise UserError(prefix, f"{name} holds no floating-point numbers", "Choose a complete BERT checkpoint")
    if is_transposed(name):
        array = _flat_kernel(array, own, tuple(parameter.shape), shape, name, prefix).T
    elif array.ndim == 2 and parameter.ndim == 1 and array.shape == (shape.num_attention_heads, shape.head_size):
        array = array.reshape(-1)
    tensor = torch.from_numpy(np.array(array, dtype=np.float32, order="C"))
    return fitted(own, name, tensor, parameter, shape, str(prefix))


def _flat_kernel(
    array: np.ndarray, own: str, wanted: tuple[int, ...], shape: BertConfig, name: str, prefix: Path
) -> np.ndarray:
    """A kernel as [in, out]."""
    size_out, size_in = wanted if own not in VOCABULARY else (0, 0)
    heads = (shape.num_attention_heads, shape.head_size)
    accepted: list[tuple[int, ...]] = [(size_in, size_out)]
    if ".attention.self." in own:
        accepted.append((size_in, *heads))
    if ".attention.output." in own:
        accepted.append((*heads, size_out))
    if array.shape not in accepted:
        raise UserError(
            prefix,
            f"{name} has shape {list(array.shape)}, the model wants {list(accepted[-1])}",
            "Use the bert_config.json of the checkpoint",
        )
    return array.reshape(size_in, size_out)
