"""Apply `mlbert.models.weights.checkpoint_state` to torch tensors and our models.

Matrices are [out, in], vectors [out]; vocabulary rows may be padded or not.
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
    """Return `parameter_shapes` of the encoder and of the heads that a checkpoint has, including a classifier."""
    own = {name: tensor for theirs, tensor in tensors.items() for name in own_torch_names(theirs)}
    known = parameter_shapes(shape)
    if (classifier := own.get("classifier.weight")) is not None:
        rows = (len(classifier), shape.hidden_size) if classifier.ndim else (0, 0)
        known |= {"classifier.weight": rows, "classifier.bias": rows[:1]}
    heads = tuple(head for head in HEADS if any(name.startswith(head) for name in own))
    return {name: size for name, size in known.items() if name.startswith((*ENCODER, *heads))}


def own_state(
    tensors: Mapping[str, Tensor],
    shape: BertConfig,
    source: str,
    known: Mapping[str, Shape] | None = None,
) -> tuple[dict[str, Tensor], Report]:
    """Convert a checkpoint's torch tensors; see `mlbert.models.weights.checkpoint_state.own_state`."""
    return checkpoint_state.own_state(tensors, shape, source, _float32, known=known)


def _float32(tensor: object) -> Tensor | None:
    return tensor.float() if isinstance(tensor, Tensor) and tensor.dtype in _FLOATS else None


@torch.no_grad()
def load_state(model: AnyBert, tensors: Mapping[str, Tensor], source: str) -> Report:
    """Copy a checkpoint's tensors into ``model``. Set padding rows to zero; leave missing heads unchanged.

    Raise UserError as `own_state` does, before changing anything.
    """
    state, report = own_state(tensors, model.config, source, known=parameter_sizes(model))
    for name, parameter in model.named_parameters():
        if name in state:
            parameter.zero_()
            parameter[: state[name].shape[0]].copy_(state[name])
    return report


def parameter_sizes(model: AnyBert) -> dict[str, Shape]:
    """Return the shapes of a model's parameters by name."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def padded(state: Mapping[str, Tensor], shape: BertConfig) -> dict[str, Tensor]:
    """Return the state with the vocabulary padded with zero rows."""
    result = dict(state)
    for name in (name for name in (*VOCABULARY, *TIED) if name in state):
        rows = state[name].new_zeros(shape.padded_vocab_size - shape.vocab_size, *state[name].shape[1:])
        result[name] = torch.cat([state[name], rows])
    return result
