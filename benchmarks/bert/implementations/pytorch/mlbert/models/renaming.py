"""From a checkpoint's tensors under other programs' names to the parameters of our models.

Every tensor's fate is kept in a `Report`. A tensor is [out, in] for a matrix, [out] for a vector; the vocabulary's
rows may be padded or not.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from mlbert.core.bert_config import BertConfig
from mlbert.core.checkpoint_names import TIED, VOCABULARY, WORD_EMBEDDINGS, own_torch_names
from mlbert.core.errors import UserError
from mlbert.models.bert import AnyBert, BertForPreTraining

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


def empty_parameters(shape: BertConfig) -> dict[str, Tensor]:
    """The parameters of this shape by our names, without memory: for their sizes (vocabulary rows padded)."""
    with torch.device("meta"):
        return dict(BertForPreTraining(shape).named_parameters())


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
    for name in tensors:
        refuse_other_architecture(name, source)
    known = known or empty_parameters(shape)
    report = Report()
    state: dict[str, Tensor] = {}
    came_from: dict[str, str] = {}
    for name in sorted(tensors, key=lambda name: own_names(name)[0] in TIED):
        names = own_names(name)
        own = tuple(part if part in known else TIED.get(part, part) for part in names)
        if not all(part in known for part in own):
            if own[0].startswith("bert.encoder.") and not name.endswith("_extra_state"):
                raise UserError(source, f"{name} has no place in a BERT of this shape", OTHER_CONFIG)
            report.dropped[name] = "no such parameter"
            continue
        tensor = tensors[name]
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
        if own_name.startswith(("bert.embeddings.", "bert.encoder.")):
            raise UserError(source, f"tensor {name} is missing", ANOTHER)
        report.missing[name] = "initialised"
    return state, report


def refuse_other_architecture(name: str, source: str) -> None:
    """Raises UserError for a tensor that says that the checkpoint's encoder is not a plain BERT's."""
    if ".mlp.gated_layers." in name or ".mlp.wo." in name or ".mlp.layernorm." in name:
        raise UserError(
            source,
            f"is a MosaicBERT ({name}: gated feed-forward layers, ALiBi in place of position embeddings)",
            "Plain BERT cannot hold it; choose a checkpoint of the hf_bert model or of MLPerf v2.1",
        )


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


def read_nvidia_pt(path: Path) -> dict[str, Tensor]:
    """The state dict of a ``.pt`` file of the form ``{'model': state_dict}``; only tensors and containers are loaded.

    Raises UserError for a file that is missing, damaged, of another form, or that holds any other object.
    """
    remedy = "Give a .pt file of the form {'model': state_dict}"
    content = read_pt(path, remedy)
    state = content.get("model") if isinstance(content, dict) else None
    if not isinstance(state, dict):
        raise UserError(path, "has no 'model'", remedy)
    tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    if not any(WORD_EMBEDDINGS in own_torch_names(name) for name in tensors):
        raise UserError(path, f"holds no {WORD_EMBEDDINGS}", remedy)
    return tensors


def read_pt(path: Path, remedy: str, allowed: Sequence[tuple[Any, str]] = ()) -> Any:
    """What a ``.pt`` file holds, tensors left on disk until they are read.

    Args:
        path: the file.
        remedy: what to say of a bad one.
        allowed: what to call for a class or function that the file names, beside tensors and containers.

    Raises:
        UserError: the file is missing or damaged, or names anything else; nothing of it has been called.
    """
    try:
        with path.open("rb") as file:
            is_zip = zipfile.is_zipfile(file)
    except OSError as error:
        raise UserError(path, f"cannot be read ({error.strerror or error})", remedy) from None
    try:
        if is_zip:
            _check_records(path)
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except UserError:
        raise
    except Exception as error:  # a damaged file can fail in any way
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            raise UserError(path, f"names {found[1]}, which is not loaded from a checkpoint", remedy) from None
        reason = f" ({str(error).splitlines()[0]})" if str(error) and not isinstance(error, UnpicklingError) else ""
        raise UserError(path, f"is damaged or no PyTorch file{reason}", remedy) from None


def _check_records(path: Path) -> None:
    """Compares every record of the zip file with its checksum, which torch.load does not."""
    again = "Fetch or convert it again"
    with zipfile.ZipFile(path) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise UserError(path, "is compressed, which PyTorch never does", again)
        if damaged := archive.testzip():
            raise UserError(path, f"is damaged at record {damaged}", again)
