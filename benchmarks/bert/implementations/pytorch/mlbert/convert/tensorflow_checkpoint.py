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

from mlbert.convert.common import Checkpoint, find_shape, write_own
from mlbert.core.checkpoint_names import is_tf1_optimizer, is_tf2_bookkeeping, is_transposed, own_tf2_name, tf1_names
from mlbert.core.config import environment
from mlbert.core.errors import UserError
from mlbert.models import BertConfig
from mlbert.models.files import check_target
from mlbert.models.renaming import ANOTHER, OTHER_CONFIG, Report, empty_parameters, own_state

REMEDY = "Give the prefix of a whole checkpoint: the path without .index"
SUFFIXES = (".index", ".meta", ".data-00000-of-00001")


def tf1_to_torch(prefix: Path, target: Path, config: Path | None = None) -> Report:
    """Reads a TensorFlow 1 checkpoint, writes our folder. Raises UserError as `read_tf1`."""
    check_target(target)
    return write_own(read_tf1(prefix, config), target)


def read_tf1(prefix: Path, config: Path | None = None) -> Checkpoint:
    """Reads a TensorFlow 1 checkpoint. ``prefix`` is the path, with or without ``.index``. Raises UserError for a
    missing or damaged file, wrong shapes, missing variables, or without TensorFlow."""
    prefix, shape = _without_suffix(prefix), find_shape(config, prefix.parent)
    names = tf1_names(shape.num_hidden_layers)
    own = {theirs: name for name, theirs in names.items()}
    return _read(prefix, shape, lambda name: own.get(name, name), is_tf1_optimizer, names)


def tf2_to_torch(prefix: Path, target: Path, config: Path | None = None) -> Report:
    """Reads an object-based TensorFlow 2 checkpoint of a BERT of Google's model garden, writes our folder. Raises
    UserError as `read_tf1` does."""
    check_target(target)
    prefix, shape = _without_suffix(prefix), find_shape(config, prefix.parent)
    return write_own(_read(prefix, shape, own_tf2_name, is_tf2_bookkeeping), target)


def _without_suffix(prefix: Path) -> Path:
    name = prefix.name
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return prefix.with_name(name)


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
    own_name: Callable[[str], str],
    is_optimizer: Callable[[str], bool],
    spelling: dict[str, str] | None = None,
) -> Checkpoint:
    index = prefix.with_name(f"{prefix.name}.index")
    if not index.is_file():
        raise UserError(index, "does not exist", REMEDY)
    tf = _tensorflow(prefix)
    reader = _asked(prefix, "its index", lambda: tf.train.load_checkpoint(str(prefix)))
    variables = _asked(prefix, "its index", reader.get_variable_to_shape_map)
    known = empty_parameters(shape)
    tensors: dict[str, Tensor] = {}
    left_out: dict[str, str] = {}
    poolers: dict[str, str] = {}
    for name in sorted(variables, key=_preferred_first):
        own = own_name(name)
        if is_optimizer(name):
            left_out[name] = "optimizer slot or counter"
        elif own not in known:
            _refuse_further_layers(name, shape, prefix)
            left_out[name] = "no such parameter"
        elif own.startswith("bert.pooler.") and poolers.setdefault(own, name) != name:
            # The encoder's own pooler is not trained where the next-sentence head has one.
            left_out[name] = f"{poolers[own]} is taken"
        else:
            array = _asked(prefix, name, reader.get_tensor, name)
            tensors[name] = _as_ours(array, name, own, known[own], shape, prefix)
    if not tensors:
        raise UserError(prefix, "holds no variable of a BERT", "Check that it is the form that the command names")
    state, report = own_state(tensors, shape, str(prefix), lambda name: (own_name(name),), spelling)
    report.dropped |= left_out
    return Checkpoint(shape, state, report, prefix.parent)


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
    if "/_attention_layer/" in name or (layer is not None and int(layer[1]) >= shape.num_hidden_layers):
        raise UserError(prefix, f"{name} has no place in a BERT of this shape", OTHER_CONFIG)


def _as_ours(array: Any, name: str, own: str, parameter: Tensor, shape: BertConfig, prefix: Path) -> Tensor:
    """A variable as our float32 parameter, [out, in] or [out]; vocabulary rows padded or not."""
    array = np.asarray(array)
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise UserError(prefix, f"{name} holds no floating-point numbers", ANOTHER)
    heads = (shape.num_attention_heads, shape.head_size)
    if array.ndim == 3 and ".attention.self." in own and array.shape[1:] == heads:
        array = array.reshape(len(array), -1)
    elif array.ndim == 3 and ".attention.output." in own and array.shape[:2] == heads:
        array = array.reshape(-1, array.shape[2])
    elif array.ndim == 2 and parameter.ndim == 1 and array.shape == heads:
        array = array.reshape(-1)
    if is_transposed(name):
        array = array.T
    return torch.from_numpy(np.array(array, dtype=np.float32, order="C"))
