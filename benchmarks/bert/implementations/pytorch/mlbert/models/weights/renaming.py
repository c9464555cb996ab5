"""`mlbert.models.weights.checkpoint_state` for torch: a checkpoint's tensors into our models.

A tensor is [out, in] for a matrix, [out] for a vector; the vocabulary's rows may be padded or not.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mlbert.config.bert_config import BertConfig
from mlbert.models.bert import AnyBert
from mlbert.models.weights import checkpoint_state
from mlbert.models.weights.checkpoint_names import TIED, VOCABULARY, own_torch_names
from mlbert.models.weights.checkpoint_state import ENCODER, HEADS, Report, Shape, parameter_shapes

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def parameters_in(tensors: Mapping[str, Tensor], shape: BertConfig) -> dict[str, Shape]:
    """As `parameter_shapes`, of the encoder and those heads of which a checkpoint holds anything, a classifier too."""
    own = {name: tensor for theirs, tensor in tensors.items() for name in own_torch_names(theirs)}
    known = parameter_shapes(shape)
    if (classifier := own.get("classifier.weight")) is not None:
        rows = (len(classifier), shape.hidden_size) if classifier.ndim else (0, 0)
        known |= {"classifier.weight": rows, "classifier.bias": rows[:1]}
    there = tuple(head for head in HEADS if any(name.startswith(head) for name in own))
    return {name: size for name, size in known.items() if name.startswith((*ENCODER, *there))}


def own_state(
    tensors: Mapping[str, Tensor],
    shape: BertConfig,
    source: str,
    known: Mapping[str, Shape] | None = None,
) -> tuple[dict[str, Tensor], Report]:
    """`mlbert.models.weights.checkpoint_state.own_state` of torch's tensors."""
    return checkpoint_state.own_state(tensors, shape, source, _float32, known=known)


def _float32(tensor: object) -> Tensor | None:
    return tensor.float() if isinstance(tensor, Tensor) and tensor.dtype in _FLOATS else None


@torch.no_grad()
def load_state(model: AnyBert, tensors: Mapping[str, Tensor], source: str) -> Report:
    """Copies a checkpoint's tensors into ``model``; padding rows become zero, missing heads stay as they are.

    Raises UserError as `own_state` does, before anything is changed.
    """
    state, report = own_state(tensors, model.config, source, known=parameter_sizes(model))
    for name, parameter in model.named_parameters():
        if name in state:
            parameter.zero_()
            parameter[: state[name].shape[0]].copy_(state[name])
    return report


def parameter_sizes(model: AnyBert) -> dict[str, Shape]:
    """The sizes of a model's parameters."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def padded(state: Mapping[str, Tensor], shape: BertConfig) -> dict[str, Tensor]:
    """The same state with zero rows up to the padded vocabulary."""
    result = dict(state)
    for name in (name for name in (*VOCABULARY, *TIED) if name in state):
        rows = state[name].new_zeros(shape.padded_vocab_size - shape.vocab_size, *state[name].shape[1:])
        result[name] = torch.cat([state[name], rows])
    return result
