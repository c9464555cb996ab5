"""Convert a checkpoint's tensors, under other programs' names, to our models' parameters,
for any tensor library.

A `Report` records what happened to each tensor. Matrices are [out, in], vectors [out]; vocabulary
rows may be padded or not. This module only uses shapes, slices and comparisons of tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlbert.config.bert_config import BertConfig
from mlbert.host.errors import UserError
from mlbert.models.weights.checkpoint_names import (
    PREDICTION_BIAS,
    TIED,
    VOCABULARY,
    own_torch_names,
    parameter_names,
)

Shape = tuple[int, ...]

ENCODER = ("bert.embeddings.", "bert.encoder.")
PREDICTIONS = "cls.predictions."
TRANSFORM = "cls.predictions.transform."  # what a classifier can have of it
HEADS = ("bert.pooler.", PREDICTIONS, "cls.seq_relationship.", "classifier.")
ANOTHER = "Choose a complete BERT checkpoint"
OTHER_CONFIG = "Use the bert_config.json of the checkpoint"
# Options that may differ between models with the same tensor shapes.
_UNSEEN = (
    "num_attention_heads",
    "hidden_act",
    "position_embedding_type",
    "rope_theta",
    "norm_position",
    "gated_bias",
    "local_attention",
    "global_attn_every_n_layers",
    "local_rope_theta",
)

_ROTARY_BASES = ("rope_theta", "local_rope_theta")


@dataclass
class Report:
    """What happened to each tensor.

    Attributes:
        taken: their name -> our name (three names for a fused query, key and value).
        dropped: their name -> reason.
        missing: expected name -> what is used instead.
        is_checked: whether the file was verified with a checksum.
        notes: further lines for the user.
    """

    taken: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    is_checked: bool = True
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return one line per tensor, sorted by name, then the counts."""
        fates = {
            name: "taken" if own == name else f"taken as {own}" for name, own in self.taken.items()
        }
        fates |= {name: f"dropped ({why})" for name, why in self.dropped.items()}
        fates |= {name: f"missing ({instead})" for name, instead in self.missing.items()}
        counts = (
            f"{len(self.taken)} taken, {len(self.dropped)} dropped, {len(self.missing)} missing"
        )
        return [*(f"{name}: {fate}" for name, fate in sorted(fates.items())), counts, *self.notes]

    def unused_heads(self) -> list[str]:
        """Return the heads whose tensors the model does not use, each with the reason."""
        heads = {}
        for name, why in self.dropped.items():
            own = own_torch_names(name)[0]
            if own.startswith(HEADS) and not why.startswith(("tied", "the same")):
                heads[next(head for head in HEADS if own.startswith(head)).rstrip(".")] = why
        return [f"{head} ({why})" for head, why in sorted(heads.items())]

    def warnings(self, source: object) -> list[str]:
        """Return the warnings for a run that starts from these weights:
        heads initialized anew, and unused heads.
        """
        lines = [f"warning: {source} has no {name}" for name in self.missing]
        if unused := self.unused_heads():
            lines.append(f"warning: of {source} is not used: {', '.join(unused)}")
        if not self.is_checked:
            lines.append(
                f"note: {source} has no checksum, so a damaged number in it would not be noticed"
            )
        return lines


def parameter_shapes(shape: BertConfig) -> dict[str, Shape]:
    """Return the pre-training model's parameters, our name -> shape,
    vocabulary rows padded; matrices are [out, in].
    """
    shapes: dict[str, Shape] = {}
    for name in parameter_names(shape.num_hidden_layers):
        for own in _with_options(name, shape):
            rows, columns = _matrix(own, shape)
            is_norm = ".LayerNorm." in own
            shapes[own] = (
                (columns,) if is_norm else (rows,) if own.endswith("bias") else (rows, columns)
            )
    if shape.norm_position == "pre":
        kinds = ["weight", "bias"] if shape.norm_bias else ["weight"]
        for kind in kinds:
            shapes[f"bert.encoder.LayerNorm.{kind}"] = (shape.hidden_size,)
    return shapes


def _with_options(name: str, shape: BertConfig) -> Sequence[str]:
    """Return the parameters that replace a plain BERT's parameter in a model with these options."""
    is_gone = (
        (shape.position_embedding_type != "absolute" and ".position_embeddings." in name)
        or (shape.is_rotary and ".token_type_embeddings." in name)
        or (shape.is_rotary and ".layer.0.attention.output.LayerNorm." in name)
        or (_has_no_gated_bias(shape) and name.endswith("intermediate.dense.bias"))
        or (name.endswith(".bias") and not _has_bias(name, shape))
    )
    if is_gone:
        return ()
    if name == PREDICTION_BIAS and not shape.tie_word_embeddings:
        return tuple(TIED)
    if shape.norm_position == "pre":
        name = name.replace(".attention.output.LayerNorm.", ".attention.LayerNorm.")
        name = re.sub(r"(layer\.\d+)\.output\.LayerNorm\.", r"\1.intermediate.LayerNorm.", name)
    return (name,)


def _has_no_gated_bias(shape: BertConfig) -> bool:
    return shape.gated_mlp and not shape.gated_bias


def _has_bias(name: str, shape: BertConfig) -> bool:
    """Return whether the linear layer or LayerNorm of a plain BERT's bias has one with these
    options."""
    if ".LayerNorm." in name:
        return shape.norm_bias
    if ".attention." in name:
        return shape.attention_bias
    if ".transform.dense." in name:
        return shape.classifier_bias
    return shape.mlp_bias or ".output.dense." not in name


def _matrix(name: str, shape: BertConfig) -> tuple[int, int]:
    """Return rows and columns of a parameter's matrix;
    for a bias, of the matrix that it belongs to.
    """
    size = shape.hidden_size
    table = {
        r"word_embeddings|predictions\.(?:decoder|bias)": (shape.padded_vocab_size, size),
        r"position_embeddings": (shape.max_position_embeddings, size),
        r"token_type_embeddings": (shape.type_vocab_size, size),
        r"intermediate\.dense": (shape.inner_rows, size),
        r"layer\.\d+\.output\.dense": (size, shape.intermediate_size),
        r"seq_relationship": (2, size),
    }
    return next(
        (found for pattern, found in table.items() if re.search(pattern, name)), (size, size)
    )


def numpy_float32(array: Any) -> np.ndarray | None:
    """Return floating-point numbers as a float32 numpy array, copied only if needed;
    None for other types.
    """
    array = np.asarray(array)
    return (
        array.astype(np.float32, copy=False)
        if array.dtype.kind == "f" or array.dtype.name == "bfloat16"
        else None
    )


def own_state(
    tensors: Mapping[str, Any],
    shape: BertConfig,
    source: str,
    float32: Callable[[Any], Any | None],
    own_names: Callable[[str], tuple[str, ...]] = own_torch_names,
    spelling: Mapping[str, str] | None = None,
    known: Mapping[str, Shape] | None = None,
) -> tuple[dict[str, Any], Report]:
    """Rename, split and check the tensors of a checkpoint.

    Args:
        tensors: by their names; the first of two for one parameter is used.
        shape: of our model.
        source: name of the checkpoint, for messages.
        float32: converts a tensor to float32; returns None if it has no floating-point numbers.
        own_names: returns our names for one of theirs.
        spelling: our name -> the checkpoint's, to report missing parameters.
        known: the target model's parameters; by default `parameter_shapes`.

    Returns:
        Float32 tensors by our names, vocabulary rows unpadded, and the report;
            heads may be missing.

    Raises:
        UserError: a tensor has another shape or is not finite, the encoder is incomplete, two
            copies of a tensor differ, or the encoder has a tensor that does not belong to a BERT.
    """
    known = known or parameter_shapes(shape)
    _refuse_other_feed_forward({own for name in tensors for own in own_names(name)}, shape, source)
    report = Report()
    state: dict[str, Any] = {}
    origin: dict[str, str] = {}
    # Tied copies last, then by name, so that errors do not depend on the order in the file.
    for name in sorted(tensors, key=lambda name: (own_names(name)[0] in TIED, name)):
        names = own_names(name)
        own = tuple(part if part in known else TIED.get(part, part) for part in names)
        if not all(part in known for part in own):
            if own[0].startswith(ENCODER) and not name.endswith(
                ("_extra_state", "_ids", ".inv_freq")
            ):  # the latter two are buffers
                problem = f"{name} does not belong to a BERT of this shape"
                raise UserError("checkpoint.shape", source, problem, OTHER_CONFIG)
            report.dropped[name] = "no such parameter"
            continue
        tensor = tensors[name]
        if own[0].startswith("classifier.") and tensor.shape[:1] != known[own[0]][:1]:
            report.dropped[name] = (
                f"of {tensor.shape[0]} labels, but the model has {known[own[0]][0]}"
            )
            continue
        if len(own) > 1:
            _check_shape(name, tensor, [len(own) * known[own[0]][0], *known[own[0]][1:]], source)
        for part, piece in zip(own, _pieces(tensor, len(own)), strict=True):
            piece = _fitted(part, name, piece, float32, known[part], shape, source)
            if part not in state:
                state[part] = piece
                origin[part] = name
                report.taken[name] = ", ".join(own)
            elif bool((state[part] == piece).all()):
                report.dropped[name] = (
                    f"tied to {part}" if names[0] in TIED else f"the same as {origin[part]}"
                )
            else:
                problem = f"{name} and {origin[part]} differ"
                raise UserError(
                    "checkpoint.damaged", source, problem, "The model has one tensor for both"
                )
    report.missing.update(
        _missing([name for name in known if name not in state], spelling or {}, source)
    )
    return state, report


def _missing(own_names: Sequence[str], spelling: Mapping[str, str], source: str) -> dict[str, str]:
    """Return the report's entries for missing parameters.

    Raise UserError if one belongs to the encoder.
    """
    for own_name in own_names:
        if own_name.startswith(ENCODER):
            problem = f"tensor {spelling.get(own_name, own_name)} is missing"
            raise UserError("checkpoint.incomplete", source, problem, ANOTHER)
    return {spelling.get(name, name): "initialized" for name in own_names}


def _refuse_other_feed_forward(own: set[str], shape: BertConfig, source: str) -> None:
    """Raise UserError unless checkpoint and model agree on gated feed-forward layers
    (MosaicBERT).
    """
    if shape.gated_bias:
        return
    inner = {name.rsplit(".", 1)[1] for name in own if ".intermediate.dense." in name}
    kinds = {True: "a MosaicBERT (gated feed-forward layers)", False: "a plain BERT"}
    if inner and (is_gated := "bias" not in inner) != shape.gated_mlp:
        reason = f"is {kinds[is_gated]}, but the model is {kinds[shape.gated_mlp]}"
        raise UserError("checkpoint.shape", source, reason, OTHER_CONFIG)


def _pieces(tensor: Any, count: int) -> list[Any]:
    """Split the rows of a tensor into equal parts."""
    rows = len(tensor) // count if count > 1 else 0
    return (
        [tensor[part * rows : (part + 1) * rows] for part in range(count)]
        if count > 1
        else [tensor]
    )


def _fitted(
    own: str,
    name: str,
    tensor: Any,
    float32: Callable[[Any], Any | None],
    known: Shape,
    shape: BertConfig,
    source: str,
) -> Any:
    """Return the tensor in the parameter's shape, without vocabulary padding; ``name`` is for
    messages. Check the shape before reading the numbers: a file may claim any size.
    """
    wanted = list(known)
    vocabulary = own in (*VOCABULARY, *TIED)
    if vocabulary:
        is_padded = tensor.shape[:1] == (shape.padded_vocab_size,)
        wanted[0] = shape.padded_vocab_size if is_padded else shape.vocab_size
    _check_shape(name, tensor, wanted, source)
    tensor = float32(tensor)
    if tensor is None:
        raise UserError(
            "checkpoint.damaged", source, f"{name} contains no floating-point numbers", ANOTHER
        )
    if not bool((abs(tensor) < math.inf).all()):
        remedy = "Take a checkpoint from before that"
        raise UserError(
            "checkpoint.damaged", source, f"{name} contains numbers that are not finite", remedy
        )
    return tensor[: shape.vocab_size] if vocabulary else tensor


def _check_shape(name: str, tensor: Any, wanted: list[int], source: str) -> None:
    if list(tensor.shape) != wanted:
        reason = f"{name} has shape {list(tensor.shape)}, but the model expects {wanted}"
        raise UserError("checkpoint.shape", source, reason, OTHER_CONFIG)


def check_unseen(
    found: BertConfig, shape: BertConfig, source: str, extend_context: bool = False
) -> None:
    """Raise UserError if checkpoint and model differ in an option
    that tensor shapes do not show. With ``extend_context``, the rotary bases may differ.
    """
    for name in _UNSEEN:
        if extend_context and name in _ROTARY_BASES:
            continue
        theirs = getattr(found, name)
        ours = getattr(shape, name)
        if theirs != ours:
            remedy = f"Set MODEL_OPTIONS={name}={theirs}, or BERT_CONFIG to the checkpoint's"
            reason = f"comes from a model with {name} {theirs}, but BERT_CONFIG says {ours}"
            raise UserError("checkpoint.shape", source, reason, remedy)
