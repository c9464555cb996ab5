"""Start a larger model from a smaller one: tile each matrix, and repeat layers.

A matrix is repeated in both directions from its middle outwards, so that the smaller one stands
whole in the middle of the larger one. Query, key, value and both halves of a gated feed-forward
layer are separate matrices here. Layer i of N takes layer round(i P / N) of P.

Source of the method: Warner et al., arXiv 2412.13663, section 2.2.3, after the weights of Phi and
the depth of Gopher; the middle and the rounding are those of ModernBERT's research repository.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields

import torch
from torch import Tensor

from mlbert.config.bert_config import BertConfig
from mlbert.host.errors import UserError
from mlbert.models.weights.checkpoint_names import TIED, VOCABULARY
from mlbert.models.weights.checkpoint_state import ENCODER, Shape, parameter_shapes

# Options that may be larger in the larger model.
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
# Options that change neither the parameters nor what they compute.
_FREE = (
    "max_position_embeddings",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "embedding_dropout_prob",
    "attention_output_dropout_prob",
    "initializer",
    "initializer_range",
    "initializer_cutoff_factor",
    "classifier_pooling",
    "vocab_size_multiple",
)
_LAYER = re.compile(r"(?<=^bert\.encoder\.layer\.)\d+")


def check_growth(small: BertConfig, large: BertConfig, subject: str) -> None:
    """Raise UserError unless a model of the shape ``large`` can start from one of ``small``.

    ``subject``: names the larger shape in messages.
    """
    remedy = "Give the shape of a larger model of the same kind"
    for field in fields(BertConfig):
        name = field.name
        theirs = getattr(small, name)
        ours = getattr(large, name)
        if name in SIZES and ours < theirs:
            reason = f"has {name} {ours}, but the smaller model has {theirs}"
            raise UserError("model.shape", subject, reason, remedy)
        is_free = name in _FREE or name in SIZES
        if name == "max_position_embeddings" and large.position_embedding_type == "absolute":
            is_free = False
        if not is_free and ours != theirs:
            reason = f"has {name} {ours}, but the smaller model has {theirs}"
            raise UserError("model.shape", subject, reason, remedy)
    if small.head_size != large.head_size:
        reason = (
            f"has heads of size {large.head_size}, but the smaller model's have {small.head_size}"
        )
        raise UserError("model.shape", subject, reason, remedy)


def layer_source(layer: int, small: BertConfig, large: BertConfig) -> int:
    """Return the layer of the smaller model from which a layer of the larger one starts."""
    return round(layer * small.num_hidden_layers / large.num_hidden_layers)


def grow(
    state: Mapping[str, Tensor], small: BertConfig, large: BertConfig
) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Return the parameters of the larger model, and which of them each smaller one became.

    Args:
        state: our parameters of the smaller model by name, vocabulary unpadded.
        small, large: shapes for which `check_growth` passes.

    The larger model has the heads of the smaller one. The first layer of a ModernBERT has no
    LayerNorm before its attention. A later layer that starts from it gets a LayerNorm with gain 1
    and bias 0.
    """
    sizes = parameter_shapes(large)
    for name in state:
        if name.startswith("classifier."):
            sizes[name] = (*state[name].shape[:1], *[large.hidden_size] * (state[name].ndim - 1))
    grown: dict[str, Tensor] = {}
    became: dict[str, list[str]] = {name: [] for name in state}
    for name, size in sizes.items():
        source = _source(name, small, large)
        if source in state:
            grown[name] = _tiled(name, state[source], size, large.gated_mlp)
            became[source].append(name)
        elif name.startswith(ENCODER):
            grown[name] = torch.ones(size) if name.endswith("weight") else torch.zeros(size)
    return grown, became


def _source(name: str, small: BertConfig, large: BertConfig) -> str:
    """Return the smaller model's parameter from which one of the larger model starts."""
    match = _LAYER.search(name)
    if match is None:
        return name
    return _LAYER.sub(str(layer_source(int(match[0]), small, large)), name)


def _tiled(name: str, tensor: Tensor, size: Shape, gated_mlp: bool) -> Tensor:
    """Return one parameter in the larger model's size, without padding of the vocabulary."""
    if tensor.ndim == 2:
        tensor = tile(tensor, 1, size[1])
    if name in VOCABULARY or name in TIED:
        return tensor
    if ".intermediate.dense." not in name or not gated_mlp:
        return tile(tensor, 0, size[0])
    halves = [tile(half, 0, size[0] // 2) for half in tensor.chunk(2)]
    return torch.cat(halves)


def tile(tensor: Tensor, dimension: int, size: int) -> Tensor:
    """Repeat a tensor along a dimension from its middle outwards.

    The tensor, of n entries, is at (size - n) // 2 of the result, and its entries go on in the same
    order on both sides.
    """
    count = tensor.shape[dimension]
    first = (size - count) // 2
    places = (torch.arange(size) - first) % count
    return tensor.index_select(dimension, places)
