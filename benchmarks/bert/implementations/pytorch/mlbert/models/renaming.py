"""From a checkpoint's tensors under other programs' names to the parameters of our models.

Every tensor's fate is kept in a `Report`. A tensor is [out, in] for a matrix, [out] for a vector; the vocabulary's
rows may be padded or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mlbert.core.bert_config import BertConfig
from mlbert.core.checkpoint_names import TIED, VOCABULARY, own_torch_names
from mlbert.core.errors import UserError
from mlbert.models.bert import AnyBert, BertForPreTraining

ENCODER = ("bert.embeddings.", "bert.encoder.")
HEADS = ("bert.pooler.", "cls.predictions.", "cls.seq_relationship.", "classifier.")
ANOTHER = "Choose a complete BERT checkpoint"
OTHER_CONFIG = "Use the bert_config.json of the checkpoint"


@dataclass
class Report:
    """What became of each tensor.

    Attributes:
        taken: their name -> our name (names, where one tensor holds query, key and value).
        dropped: their name -> why.
        missing: the name that was looked for -> what stands in its place.
    """

    taken: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """One line a tensor, sorted by name, then the counts."""
        fates = {name: "taken" if own == name else f"taken as {own}" for name, own in self.taken.items()}
        fates |= {name: f"dropped ({why})" for name, why in self.dropped.items()}
        fates |= {name: f"missing ({instead})" for name, instead in self.missing.items()}
        counts = f"{len(self.taken)} taken, {len(self.dropped)} dropped, {len(self.missing)} missing"
        return [*(f"{name}: {fate}" for name, fate in sorted(fates.items())), counts]

    def unused_heads(self) -> list[str]:
        """Heads of which tensors were dropped that stand for nothing in the model, each with the reason."""
        heads = {}
        for name, why in self.dropped.items():
            own = own_torch_names(name)[0]
            if own.startswith(HEADS) and not why.startswith(("tied", "the same")):
                heads[next(head for head in HEADS if own.startswith(head)).rstrip(".")] = why
        return [f"{head} ({why})" for head, why in sorted(heads.items())]


def empty_parameters(shape: BertConfig) -> dict[str, Tensor]:
    """The parameters of this shape by our names, without memory: for their sizes (vocabulary rows padded)."""
    with torch.device("meta"):
        return dict(BertForPreTraining(shape).named_parameters())


def parameters_in(tensors: Mapping[str, Tensor], shape: BertConfig) -> dict[str, Tensor]:
    """As `empty_parameters`, of the encoder and those heads of which a checkpoint holds anything, a classifier too."""
    own = {name: tensor for theirs, tensor in tensors.items() for name in own_torch_names(theirs)}
    known = empty_parameters(shape)
    if (classifier := own.get("classifier.weight")) is not None:
        rows = (len(classifier), shape.hidden_size) if classifier.ndim else (0, 0)
        known |= {"classifier.weight": torch.empty(rows, device="meta")}
        known |= {"classifier.bias": torch.empty(rows[:1], device="meta")}
    there = tuple(head for head in HEADS if any(name.startswith(head) for name in own))
    return {name: parameter for name, parameter in known.items() if name.startswith((*ENCODER, *there))}


def own_state(
    tensors: Mapping[str, Tensor],
    shape: BertConfig,
    source: str,
    own_names: Callable[[str], tuple[str, ...]] = own_torch_names,
    spelling: Mapping[str, str] | None = None,
    known: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, Tensor], Report]:
    """Renames, splits and checks the tensors of a checkpoint.

    Args:
        tensors: by their names; of two for one parameter the first is taken.
        shape: of our model.
        source: what messages name.
        own_names: our names of one of theirs.
        spelling: our names as the checkpoint spells them, for what is missing.
        known: the parameters of the model that they are for; None: `BertForPreTraining`'s of this shape.

    Returns:
        Float32 tensors by our names, vocabulary rows unpadded, and the report; heads may be missing.

    Raises:
        UserError: a tensor has another shape, the encoder is incomplete, two copies of a tensor differ, or a matrix of
            the encoder is no BERT's.
    """
    known = known or empty_parameters(shape)
    _refuse_other_feed_forward({own for name in tensors for own in own_names(name)}, shape, source)
    report = Report()
    state: dict[str, Tensor] = {}
    came_from: dict[str, str] = {}
    for name in sorted(tensors, key=lambda name: own_names(name)[0] in TIED):
        names = own_names(name)
        own = tuple(part if part in known else TIED.get(part, part) for part in names)
        if not all(part in known for part in own):
            if own[0].startswith(ENCODER) and not name.endswith(("_extra_state", "_ids")):  # the latter are buffers
                raise UserError(source, f"{name} has no place in a BERT of this shape", OTHER_CONFIG)
            report.dropped[name] = "no such parameter"
            continue
        tensor = tensors[name]
        if own[0].startswith("classifier.") and tensor.shape[:1] != known[own[0]].shape[:1]:
            report.dropped[name] = f"of {tensor.shape[0]} labels, the model has {known[own[0]].shape[0]}"
            continue
        if len(own) > 1:
            _check_shape(name, tensor, [len(own) * known[own[0]].shape[0], *known[own[0]].shape[1:]], source)
        for part, piece in zip(own, tensor.chunk(len(own)) if len(own) > 1 else (tensor,), strict=True):
            piece = _fitted(part, name, piece, known[part], shape, source)
            if part not in state:
                state[part], came_from[part] = piece, name
                report.taken[name] = ", ".join(own)
            elif torch.equal(state[part], piece):
                report.dropped[name] = f"tied to {part}" if names[0] in TIED else f"the same as {came_from[part]}"
            else:
                raise UserError(source, f"{name} and {came_from[part]} differ", "The model has one tensor for both")
    for own_name in (name for name in known if name not in state):
        name = (spelling or {}).get(own_name, own_name)
        if own_name.startswith(ENCODER):
            raise UserError(source, f"tensor {name} is missing", ANOTHER)
        report.missing[name] = "initialised"
    return state, report


def _refuse_other_feed_forward(own: set[str], shape: BertConfig, source: str) -> None:
    """Raises UserError for the feed-forward layers of a MosaicBERT where the model is none, or the other way round."""
    inner = {name.rsplit(".", 1)[1] for name in own if ".intermediate.dense." in name}
    kinds = {True: "a MosaicBERT (gated feed-forward layers)", False: "a plain BERT"}
    if inner and (is_gated := "bias" not in inner) != shape.gated_mlp:
        raise UserError(source, f"is {kinds[is_gated]}, the model is {kinds[shape.gated_mlp]}", OTHER_CONFIG)


def _fitted(own: str, name: str, tensor: Tensor, parameter: Tensor, shape: BertConfig, source: str) -> Tensor:
    """The tensor as float32 in the parameter's shape, vocabulary padding cut off; ``name`` is for the message."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise UserError(source, f"{name} holds no floating-point numbers", ANOTHER)
    wanted = list(parameter.shape)
    vocabulary = own in (*VOCABULARY, *TIED)
    if vocabulary:
        is_padded = tensor.shape[:1] == (shape.padded_vocab_size,)
        wanted[0] = shape.padded_vocab_size if is_padded else shape.vocab_size
    _check_shape(name, tensor, wanted, source)
    return (tensor[: shape.vocab_size] if vocabulary else tensor).float()


def _check_shape(name: str, tensor: Tensor, wanted: list[int], source: str) -> None:
    if list(tensor.shape) != wanted:
        reason = f"{name} has shape {list(tensor.shape)}, the model wants {wanted}"
        raise UserError(source, reason, OTHER_CONFIG)


@torch.no_grad()
def load_state(model: AnyBert, tensors: Mapping[str, Tensor], source: str) -> Report:
    """Copies a checkpoint's tensors into ``model``; padding rows become zero, missing heads stay as they are.

    Raises UserError as `own_state` does, before anything is changed.
    """
    state, report = own_state(tensors, model.config, source, known=dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        if name in state:
            parameter.zero_()
            parameter[: state[name].shape[0]].copy_(state[name])
    return report


def padded(state: Mapping[str, Tensor], shape: BertConfig) -> dict[str, Tensor]:
    """The same state with zero rows up to the padded vocabulary."""
    result = dict(state)
    for name in (name for name in (*VOCABULARY, *TIED) if name in state):
        rows = state[name].new_zeros(shape.padded_vocab_size - shape.vocab_size, *state[name].shape[1:])
        result[name] = torch.cat([state[name], rows])
    return result
