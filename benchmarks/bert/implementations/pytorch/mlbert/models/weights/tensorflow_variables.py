"""Read checkpoints of TensorFlow 1 (``model.ckpt-28252``)
and object-based TensorFlow 2 as our arrays.

The caller passes TensorFlow's reader, which checks every tensor's checksum. Optimizer slots and
counters are skipped. Kernels are transposed. TensorFlow 2 stores query, key and value kernels as
[D, N, H], the attention output's as [N, H, D] and biases of query, key and value as [N, H].

Legend: D hidden, N heads, H head size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from mlbert.config.bert_config import BertConfig
from mlbert.host.errors import UserError
from mlbert.models.weights.checkpoint_names import (
    is_tf1_optimizer,
    is_tf2_bookkeeping,
    is_transposed,
    own_tf2_name,
    tf1_names,
)
from mlbert.models.weights.checkpoint_state import (
    ANOTHER,
    OTHER_CONFIG,
    Report,
    Shape,
    numpy_float32,
    own_state,
    parameter_shapes,
)

REMEDY = "Give the prefix of a complete checkpoint: the path without .index"
_SUFFIXES = (".index", ".meta", ".data-00000-of-00001")
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


class BundleReader(Protocol):
    """What ``tf.train.load_checkpoint`` returns."""

    def get_variable_to_shape_map(self) -> Mapping[str, Any]: ...

    def get_tensor(self, name: str) -> Any: ...


def without_suffix(prefix: str) -> str:
    """Return a checkpoint's prefix, given one of its files."""
    for suffix in _SUFFIXES:
        prefix = prefix.removesuffix(suffix)
    return prefix


def read_variables(
    load_checkpoint: Callable[[str], BundleReader],
    prefix: str,
    shape: BertConfig,
    object_based: bool | None = None,
) -> tuple[dict[str, np.ndarray], Report]:
    """Read the weights of a BERT.

    Args:
        load_checkpoint: ``tf.train.load_checkpoint``.
        prefix: the checkpoint's path without ``.index``.
        shape: of our model.
        object_based: whether names are TensorFlow 2's; by default detected.

    Returns:
        Float32 arrays by our names, [out, in] or [out], vocabulary unpadded, and the report;
            heads may be missing.

    Raises:
        UserError: the checkpoint is damaged, has no BERT or one of another shape,
            or lacks part of the encoder.
    """
    reader = _read_or_raise(prefix, "its index", load_checkpoint, prefix)
    variables = _read_or_raise(prefix, "its index", reader.get_variable_to_shape_map)
    is_object_based = _OBJECT_GRAPH in variables
    if object_based is None:
        object_based = is_object_based
    if object_based != is_object_based:
        version, command = ("2", "tf2-to-torch") if is_object_based else ("1", "tf1-to-torch")
        reason = f"is a TensorFlow {version} checkpoint"
        raise UserError("checkpoint.format", prefix, reason, f"Use mlbert convert {command}")
    spelling = {} if object_based else tf1_names(shape.num_hidden_layers)
    own_of_tf1 = {theirs: own for own, theirs in spelling.items()}

    def own_name(name: str) -> str:
        return own_tf2_name(name) if object_based else own_of_tf1.get(name, name)

    is_bookkeeping = is_tf2_bookkeeping if object_based else is_tf1_optimizer
    chosen, skipped = _choose(variables, own_name, is_bookkeeping, shape, prefix)
    known = parameter_shapes(shape)
    arrays = {
        name: _as_ours(
            _read_or_raise(prefix, name, reader.get_tensor, name),
            name,
            own,
            known[own],
            shape,
            prefix,
        )
        for name, own in chosen.items()
    }
    if not arrays:
        remedy = "Check that it was written by the program that the command names"
        raise UserError("checkpoint.format", prefix, "contains no variables of a BERT", remedy)
    state, report = own_state(
        arrays, shape, prefix, numpy_float32, lambda name: (own_name(name),), spelling
    )
    report.dropped |= skipped
    return state, report


def _choose(
    variables: Mapping[str, Any],
    own_name: Callable[[str], str],
    is_bookkeeping: Callable[[str], bool],
    shape: BertConfig,
    prefix: str,
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables to read, their name -> ours, and the skipped ones,
    their name -> reason.
    """
    known = parameter_shapes(shape)
    chosen: dict[str, str] = {}
    skipped: dict[str, str] = {}
    poolers: dict[str, str] = {}
    preferred = ("next_sentence", "model/classification_heads")
    for name in sorted(variables, key=lambda name: (not name.startswith(preferred), name)):
        own = own_name(name)
        if is_bookkeeping(name):
            skipped[name] = "optimizer slot or counter"
        elif own not in known:
            _refuse_further_layers(name, shape, prefix)
            skipped[name] = "no such parameter"
        elif own.startswith("bert.pooler.") and poolers.setdefault(own, name) != name:
            # If the next-sentence head has a pooler, the encoder's pooler is untrained.
            skipped[name] = f"{poolers[own]} is taken"
        else:
            chosen[name] = own
    return chosen, skipped


def _read_or_raise(prefix: str, part: str, read: Callable[..., Any], *names: str) -> Any:
    """Call TensorFlow's reader.

    For damaged files it raises many kinds of errors; raise one UserError instead.
    """
    try:
        return read(*names)
    except Exception as error:
        text = " ".join(str(getattr(error, "message", None) or error).split())
        raise UserError(
            "checkpoint.damaged", prefix, f"is damaged at {part} ({text})", REMEDY
        ) from None


def _refuse_further_layers(name: str, shape: BertConfig, prefix: str) -> None:
    """Raise UserError for an unknown variable of a layer:
    configuration or architecture do not match.
    """
    layer = re.search(r"/layer_(\d+)/", name)
    if "/_attention_layer/" in name or (
        layer is not None and int(layer[1]) >= shape.num_hidden_layers
    ):
        raise UserError(
            "checkpoint.shape",
            prefix,
            f"{name} does not belong to a BERT of this shape",
            OTHER_CONFIG,
        )


def _as_ours(
    array: Any, name: str, own: str, known: Shape, shape: BertConfig, prefix: str
) -> np.ndarray:
    """Return a variable as our float32 parameter, [out, in] or [out];
    vocabulary rows padded or not.
    """
    numbers = numpy_float32(array)
    if numbers is None:
        raise UserError(
            "checkpoint.damaged", prefix, f"{name} contains no floating-point numbers", ANOTHER
        )
    heads = (shape.num_attention_heads, shape.head_size)
    if numbers.ndim == 3 and ".attention.self." in own and numbers.shape[1:] == heads:
        numbers = numbers.reshape(len(numbers), -1)
    elif numbers.ndim == 3 and ".attention.output." in own and numbers.shape[:2] == heads:
        numbers = numbers.reshape(-1, numbers.shape[2])
    elif numbers.ndim == 2 and len(known) == 1 and numbers.shape == heads:
        numbers = numbers.reshape(-1)
    return np.ascontiguousarray(numbers.T if is_transposed(name) else numbers)
