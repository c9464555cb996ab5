"""Read and write files of tensors: safetensors, and the ``.pt`` files of NVIDIA and Composer.

Reading a ``.pt`` file never calls anything that it names, except a list of stand-ins. Files are
written atomically; a safetensors file has a checksum of its tensors in its header.

NVIDIA: ``{'model': state_dict}``, ``{'state_dict': state_dict}`` or a bare one, tensors only.

Composer: a full checkpoint with weights in ``state.model``, or the container of MosaicML's MLPerf
v2.1 submission with only these. Configurations, times and random states are replaced with
stand-ins. The model is a Hugging Face BERT, with query, key and value possibly fused, or a
MosaicBERT.

Apply `mlbert.models.weights.checkpoint_state` to torch tensors and our models.

Matrices are [out, in], vectors [out]; vocabulary rows may be padded or not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mlbert.config.bert_config import BertConfig
from mlbert.host.errors import UserError
from mlbert.host.files import (
    CHECKSUM,
    Tensors,
    fsync_path,
    open_plain,
    tensors_sha256,
    write_weights_file,
)
from mlbert.models.bert import AnyBert
from mlbert.models.weights import checkpoint_state
from mlbert.models.weights.checkpoint_names import (
    PREDICTION_BIAS,
    TIED,
    VOCABULARY,
    WORD_EMBEDDINGS,
    composer_name,
    fused_position,
    own_torch_names,
)
from mlbert.models.weights.checkpoint_state import (
    ANOTHER,
    ENCODER,
    HEADS,
    PREDICTIONS,
    TRANSFORM,
    Report,
    Shape,
    parameter_shapes,
)
from mlbert.models.weights.flexbert import (
    flexbert_config,
    flexbert_state,
    is_flexbert,
    shape_of_flexbert,
)
from mlbert.models.weights.huggingface import config_from_huggingface, huggingface_config, obstacle
from mlbert.models.weights.modernbert import with_gated_bias
from mlbert.models.weights.stand_ins import stand_ins
from mlbert.runs.starting_weights import shards_of

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PYTORCH_WEIGHTS = "pytorch_model.bin"  # in older Hugging Face folders: a bare state dict
# Keys under which programs save a state dict.
_STATE_KEYS = ("model", "state_dict")
_NVIDIA_REMEDY = "Give a .pt file of a state dict, or of the form {'model': state_dict}"
_COMPOSER_REMEDY = "Give an undamaged checkpoint that Composer or PyTorch wrote"
_ALIBI_SIZE = 512  # positions of MosaicBERT's table by default; it grows on demand


def parameters_in(tensors: Mapping[str, Tensor], shape: BertConfig) -> dict[str, Shape]:
    """Return `parameter_shapes` of the encoder and of the heads that a checkpoint has,
    including a classifier.
    """
    own = {name: tensor for theirs, tensor in tensors.items() for name in own_torch_names(theirs)}
    known = parameter_shapes(shape)
    if (classifier := own.get("classifier.weight")) is not None:
        rows = (len(classifier), shape.hidden_size) if classifier.ndim else (0, 0)
        known |= {"classifier.weight": rows, "classifier.bias": rows[:1]}
    heads = [head for head in HEADS if any(name.startswith(head) for name in own)]
    is_classifier = "classifier.weight" in own
    if is_classifier and shape.classifier_pooling != "tanh" and PREDICTIONS in heads:
        heads[heads.index(PREDICTIONS)] = TRANSFORM
    return {name: size for name, size in known.items() if name.startswith((*ENCODER, *heads))}


def architecture_of(names: Iterable[str]) -> str:
    """Return the name of our model's class with the heads that a checkpoint has,
    by its tensors' names.
    """
    own = {part for name in names for part in own_torch_names(name)}
    if "classifier.weight" in own:
        return "BertForSequenceClassification"
    if any("seq_relationship" in name for name in own):
        return "BertForPreTraining"
    return "BertForMaskedLM"


def num_labels(tensors: Mapping[str, Tensor]) -> int:
    """Return the number of outputs of a checkpoint's classifier, which it must have."""
    own = {own_torch_names(name)[0]: tensor for name, tensor in tensors.items()}
    return len(own["classifier.weight"])


def own_state(
    tensors: Mapping[str, Tensor],
    shape: BertConfig,
    source: str,
    known: Mapping[str, Shape] | None = None,
) -> tuple[dict[str, Tensor], Report]:
    """Convert a checkpoint's torch tensors; see
    `mlbert.models.weights.checkpoint_state.own_state`.
    """
    return checkpoint_state.own_state(tensors, shape, source, _float32, known=known)


def _float32(tensor: object) -> Tensor | None:
    return tensor.float() if isinstance(tensor, Tensor) and tensor.dtype in _FLOATS else None


@torch.no_grad()
def load_state(model: AnyBert, tensors: Mapping[str, Tensor], source: str) -> Report:
    """Copy a checkpoint's tensors into ``model``.

    Set padding rows to zero; leave missing heads unchanged.

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
    num_rows = shape.padded_vocab_size - shape.vocab_size
    for name in (*VOCABULARY, *TIED):
        if name in state:
            rows = state[name].new_zeros(num_rows, *state[name].shape[1:])
            result[name] = torch.cat([state[name], rows])
    return result


def read_safetensors(path: Path, remedy: str) -> tuple[dict[str, Tensor], bool]:
    """Return all tensors of a file, and whether it had a checksum to verify them.

    Raise UserError if it is missing, not a regular file, damaged, or does not match its checksum.
    """
    try:
        with open_plain(path):  # rejects pipes, which would block the library
            pass
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            checksum = (file.metadata() or {}).get(CHECKSUM)
        is_valid = checksum is None or checksum == tensors_sha256(_parts(tensors))
    except OSError as error:
        raise UserError(
            "file.unreadable", path, f"cannot be read ({error.strerror or error})", remedy
        ) from None
    except Exception as error:  # a damaged header can fail in any way
        raise UserError(
            "checkpoint.damaged", path, f"is damaged ({str(error).splitlines()[0]})", remedy
        ) from None
    if not is_valid:
        raise UserError(
            "checkpoint.checksum",
            path,
            "is damaged: its tensors differ from their checksum",
            remedy,
        )
    return tensors, checksum is not None


def read_sharded(index: Path, read: Callable[[Path], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return all tensors of the files that an index names; ``read`` reads one of them.

    Raise UserError if the index is damaged, a file is missing, or a tensor is not in its file.
    """
    tensors: dict[str, Tensor] = {}
    for file, names in shards_of(index).items():
        found = read(file)
        if absent := next((name for name in names if name not in found), None):
            reason = f"does not contain the tensor {absent}, although {index.name} says so"
            raise UserError("checkpoint.incomplete", file, reason, ANOTHER)
        tensors |= {name: found[name] for name in names}
    return tensors


def save_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write contiguous CPU tensors with their checksum. Raise OSError."""
    write_weights_file(path, _parts(tensors))


def _parts(tensors: Mapping[str, Tensor]) -> Tensors:
    return [
        (
            name,
            str(one.dtype),
            tuple(one.shape),
            one.contiguous().reshape(-1).view(torch.uint8).numpy().data,
        )
        for name, one in tensors.items()
    ]


def read_pt(path: Path, remedy: str, allowed: Sequence[tuple[Any, str]] = ()) -> Any:
    """Return the content of a ``.pt`` file. Tensors are memory-mapped.

    Args:
        path: the file.
        remedy: for error messages.
        allowed: (replacement, name) of classes and functions
            that the file may name besides tensors and containers.

    Raises:
        UserError: the file is missing or damaged, or names anything else, which is not called.
    """
    try:
        with open_plain(path) as file:
            is_zip = zipfile.is_zipfile(file)
    except OSError as error:
        raise UserError(
            "file.unreadable", path, f"cannot be read ({error.strerror or error})", remedy
        ) from None
    try:
        if is_zip:
            _check_records(path)
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except UserError:
        raise
    except Exception as error:  # a damaged file can fail in any way
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            reason = f"refers to {found[1]}, which is not loaded from a checkpoint"
            raise UserError("checkpoint.unsafe", path, reason, remedy) from None
        reason = (
            f" ({str(error).splitlines()[0]})"
            if str(error) and not isinstance(error, UnpicklingError)
            else ""
        )
        raise UserError(
            "checkpoint.damaged", path, f"is damaged or not a PyTorch file{reason}", remedy
        ) from None


def read_pt_tensors(path: Path, remedy: str) -> dict[str, Tensor]:
    """Return the tensors of a ``.pt`` file that contains a part of a state dict.

    Raise UserError as `read_pt`.
    """
    content = read_pt(path, remedy)
    if not isinstance(content, dict):
        raise UserError("checkpoint.format", path, "is not a state dict", remedy)
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _check_records(path: Path) -> None:
    """Verify the checksum of every record of the zip file, which torch.load does not do."""
    again = "Fetch or convert it again"
    with zipfile.ZipFile(path) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise UserError(
                "checkpoint.damaged", path, "is compressed, which PyTorch never does", again
            )
        if damaged := archive.testzip():
            raise UserError("checkpoint.damaged", path, f"is damaged at record {damaged}", again)


def write_pt(target: Path, content: dict[str, Any]) -> None:
    """Write or replace a file for torch.load.

    Its bytes do not depend on its name. Raise UserError if it cannot be written.
    """
    with new_path(target) as path:
        with path.open("wb") as file:  # given a path, torch.save would store its name in the file
            torch.save(content, file)
        fsync_path(path)


@contextlib.contextmanager
def new_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path in the target's folder, which is created, and rename it to
    ``target`` on exit; if the block raises, remove it.

    Raise UserError if it cannot be written.
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.rename(target)
        fsync_path(target.parent)
    except (OSError, SafetensorError, RuntimeError) as error:
        # torch.save reports a full disk as RuntimeError.
        first_line, _, _ = str(error).partition("\n")
        reason = f"cannot be written ({getattr(error, 'strerror', None) or first_line})"
        raise UserError(
            "file.unwritable", target, reason, "Free space or name another place"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def check_target(target: Path) -> None:
    """Raise UserError if the target already exists. Call it before a long conversion."""
    if target.exists() or target.is_symlink():
        raise UserError("file.exists", target, "already exists", "Name a new one")


@dataclass(frozen=True)
class Weights:
    """Tensors by their names in the file, the shape if the file has it,
    and whether a checksum verified them.
    """

    tensors: dict[str, Tensor]
    shape: BertConfig | None = None
    is_checked: bool = True


def read_weights(path: Path) -> Weights:
    """Read NVIDIA's or Composer's weights, or a bare state dict.

    Raise UserError if the file is missing, damaged, in another format,
    or names a class or function without a stand-in.
    """
    remedy = "Give a .pt file of the form {'model': state_dict}, or a checkpoint of Composer"
    content = read_pt(path, remedy, stand_ins())
    if (found := _state_dict(content)) is not None:
        return Weights(_tensors(found, path))
    if not isinstance(content, dict) or not content.keys() & {*_STATE_KEYS, "state"}:
        reason = "has no state dict, and none under 'model', 'state_dict' or 'state'"
        raise UserError("checkpoint.format", path, reason, remedy)
    if "state" not in content:
        raise UserError("checkpoint.format", path, "has no tensors in its state dict", remedy)
    return _composer_weights(content, path)


def read_nvidia_pt(path: Path) -> dict[str, Tensor]:
    """Read the state dict of NVIDIA's file, or a bare one: tensors and containers only.

    Raise UserError as `read_weights`.
    """
    found = _state_dict(read_pt(path, _NVIDIA_REMEDY))
    if found is None:
        reason = "has no state dict, and none under 'model' or 'state_dict'"
        raise UserError("checkpoint.format", path, reason, _NVIDIA_REMEDY)
    return _tensors(found, path)


def read_composer(path: Path) -> Weights:
    """Read the weights of a Composer checkpoint. Raise UserError as `read_weights`."""
    return _composer_weights(read_pt(path, _COMPOSER_REMEDY, stand_ins()), path)


def write_composer(state: Mapping[str, Tensor], shape: BertConfig, path: Path) -> None:
    """Write or replace a checkpoint from which Composer's BERT, MosaicBERT or ModernBERT can start.

    The file loads with ``weights_only=True``. It has ``state.model``, and the shape as Composer's
    Hugging Face configuration. MosaicBERT's vocabulary is padded with zeros, as in Composer.

    Args:
        state: our parameters by name, vocabulary unpadded.
            The next-sentence head is skipped: Composer has none.
        shape: of the model.
        path: the new file.

    Raises:
        UserError: Composer's BERTs do not support the shape, or the file cannot be written.
    """
    if shape.is_rotary:
        _write_composer_content(path, flexbert_state(state, shape), flexbert_config(shape))
        return
    if why_not := composer_obstacle(shape):
        raise UserError(
            "model.unsupported", "Composer", why_not, "Keep the weights in mlbert's own format"
        )
    mosaic_bert = _is_mosaic_bert(shape)
    plain = _of_kind(shape, mosaic_bert=False) if mosaic_bert else shape
    parts: dict[str, list[Tensor]] = {}
    tensors = padded(state, shape) if mosaic_bert else state
    # Rows of the query, then of the key, then of the value.
    for own in sorted(tensors, key=fused_position):
        if not own.startswith("cls.seq_relationship."):
            parts.setdefault(composer_name(own, mosaic_bert), []).append(tensors[own])
    model = {name: torch.cat(rows) if len(rows) > 1 else rows[0] for name, rows in parts.items()}
    if PREDICTION_BIAS in state:
        for own, decoder in ((WORD_EMBEDDINGS, "weight"), (PREDICTION_BIAS, "bias")):
            model[f"model.cls.predictions.decoder.{decoder}"] = model[
                composer_name(own, mosaic_bert)
            ]
    values = huggingface_config(
        plain, "BertForMaskedLM" if PREDICTION_BIAS in state else "BertForSequenceClassification"
    )
    if mosaic_bert:
        values["alibi_starting_size"] = _ALIBI_SIZE
    _write_composer_content(path, model, values)


def _write_composer_content(
    path: Path, model: Mapping[str, Tensor], values: Mapping[str, object]
) -> None:
    """Write a checkpoint with ``state.model`` and the Hugging Face configuration."""
    config = {"file_extension": ".json", "content": dict(values)}
    integrations = {"huggingface": {"model": {"config": config}}}
    write_pt(path, {"state": {"model": dict(model), "integrations": integrations}})


def _of_kind(shape: BertConfig, mosaic_bert: bool) -> BertConfig:
    return dataclasses.replace(
        shape, position_embedding_type="alibi" if mosaic_bert else "absolute", gated_mlp=mosaic_bert
    )


def _is_mosaic_bert(shape: BertConfig) -> bool:
    return shape.position_offset == 0 and shape == _of_kind(shape, mosaic_bert=True)


def composer_obstacle(shape: BertConfig) -> str | None:
    """Return why Composer's BERT and MosaicBERT do not have a shape without rotary positions, or
    None if one of them does.
    """
    mosaic_bert = _is_mosaic_bert(shape)
    plain = _of_kind(shape, mosaic_bert=False) if mosaic_bert else shape
    if not plain.tie_word_embeddings:
        return "its BERTs have no separate decoder weights"
    if mosaic_bert and not plain.exact_gelu:
        return "its MosaicBERT computes the exact GELU"
    return obstacle(plain)


def _state_dict(content: Any) -> dict[Any, Any] | None:
    """Return the state dict in a file's content, which may be the content itself, or None."""
    if not isinstance(content, dict):
        return None
    for candidate in (content, *(content.get(key) for key in _STATE_KEYS)):
        if isinstance(candidate, dict) and any(
            isinstance(value, Tensor) for value in candidate.values()
        ):
            return candidate
    return None


def _composer_weights(content: Any, path: Path) -> Weights:
    state = content.get("state") if isinstance(content, dict) else None
    model = state.get("model") if isinstance(state, dict) else None
    if not isinstance(state, dict) or not isinstance(model, dict) or not model:
        raise UserError(
            "checkpoint.format", path, "has no state.model", "Give a checkpoint that Composer wrote"
        )
    tensors = _tensors(model, path)
    values = state
    for key in ("integrations", "huggingface", "model", "config", "content"):
        values = values.get(key, {}) if isinstance(values, dict) else {}
    shape: BertConfig | None
    if not isinstance(values, dict) or not values:
        shape = None
    elif is_flexbert(values):
        shape = shape_of_flexbert(values, str(path))
    else:
        shape = composer_shape(config_from_huggingface(values, str(path)), tensors)
    return Weights(*with_gated_bias(tensors, shape))


def composer_shape(shape: BertConfig, tensors: Mapping[str, Tensor]) -> BertConfig:
    """Return the shape as a MosaicBERT or a plain BERT, whichever Composer's tensors belong to."""
    if shape.is_rotary:
        return shape
    return _of_kind(shape, mosaic_bert=any(".mlp.gated_layers." in name for name in tensors))


def _tensors(state: Mapping[Any, Any], path: Path) -> dict[str, Tensor]:
    tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    for name, value in tensors.items():
        if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
            raise UserError("checkpoint.format", path, f"{name} is not a plain tensor", ANOTHER)
    if not any(WORD_EMBEDDINGS in own_torch_names(name) for name in tensors):
        raise UserError("checkpoint.incomplete", path, f"contains no {WORD_EMBEDDINGS}", ANOTHER)
    return tensors
