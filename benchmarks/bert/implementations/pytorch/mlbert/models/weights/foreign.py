"""Weights in the ``.pt`` files of other programs.

NVIDIA: ``{'model': state_dict}``, tensors only.

Composer: a whole checkpoint of a run, weights in ``state.model``, or the bare container of MosaicML's MLPerf v2.1
submission, which has nothing else. The configurations, times and random states beside the weights are not made: a
stand-in takes their place, and any class or function that is not on the list ends the reading. The model is a Hugging
Face BERT, whose query, key and value may be one matrix, or a MosaicBERT.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlbert.config.bert_config import BertConfig
from mlbert.host.errors import UserError
from mlbert.models.weights.checkpoint_names import PREDICTION_BIAS, WORD_EMBEDDINGS, composer_name, own_torch_names
from mlbert.models.weights.checkpoint_state import ANOTHER
from mlbert.models.weights.files import read_pt, write_pt
from mlbert.models.weights.huggingface import config_from_huggingface, huggingface_config, obstacle
from mlbert.models.weights.renaming import padded

PYTORCH_WEIGHTS = "pytorch_model.bin"  # of older folders of Hugging Face's: a bare state dict
_NVIDIA_REMEDY = "Give a .pt file of the form {'model': state_dict}"
_COMPOSER_REMEDY = "Give an undamaged checkpoint that Composer or PyTorch wrote"
_ALIBI_SIZE = 512  # MosaicBERT's default of a table that grows


class _Inert:
    """Stands in for an object that is not made: takes any argument and state, keeps nothing."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...


# What torch.load(weights_only=True) refuses of a Composer checkpoint, and what is called in its place.
STAND_INS = (
    *(
        (_Inert, name)
        for name in (
            *("datetime.datetime", "datetime.timedelta", "typing.Any", "torch.torch_version.TorchVersion"),
            *("numpy._core.multiarray._reconstruct", "numpy._core.multiarray.scalar", "numpy.dtype", "numpy.ndarray"),
            *("numpy.core.multiarray._reconstruct", "numpy.core.multiarray.scalar"),
            *("omegaconf.base.ContainerMetadata", "omegaconf.base.Metadata", "omegaconf.nodes.AnyNode"),
            *("omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig"),
        )
    ),
    (lambda *_: {}, "collections.defaultdict"),
    *((kind, f"{module}.{kind.__name__}") for kind in (dict, list, int) for module in ("builtins", "__builtin__")),
    (int, "__builtin__.long"),
)


@dataclass(frozen=True)
class Weights:
    """Tensors by their names in the file, the shape that the file tells, where it does, and whether it has a checksum,
    which a damaged bit would have changed."""

    tensors: dict[str, Tensor]
    shape: BertConfig | None = None
    is_checked: bool = True


def read_weights(path: Path) -> Weights:
    """Of either program, or a bare state dict. Raises UserError for a file that is missing, damaged, of another form,
    or that names a class or function which is not on the list."""
    remedy = "Give a .pt file of the form {'model': state_dict}, or a checkpoint of Composer"
    content = read_pt(path, remedy, STAND_INS)
    if isinstance(content, dict) and any(isinstance(value, Tensor) for value in content.values()):
        return Weights(_tensors(content, path))
    if not isinstance(content, dict) or not content.keys() & {"model", "state"}:
        raise UserError("checkpoint.format", path, "has no 'model' and no 'state'", remedy)
    return Weights(_nvidia_tensors(content, path)) if "model" in content else _composer_weights(content, path)


def read_nvidia_pt(path: Path) -> dict[str, Tensor]:
    """The state dict of NVIDIA's file; only tensors and containers are loaded. Raises UserError as `read_weights`."""
    return _nvidia_tensors(read_pt(path, _NVIDIA_REMEDY), path)


def read_composer(path: Path) -> Weights:
    """The weights of a Composer checkpoint. Raises UserError as `read_weights`."""
    return _composer_weights(read_pt(path, _COMPOSER_REMEDY, STAND_INS), path)


def write_composer(state: Mapping[str, Tensor], shape: BertConfig, path: Path) -> None:
    """Writes the weights as Composer's BERT or MosaicBERT starts from them, in place of a file that is there.

    The file loads with ``weights_only=True``: ``state.model``, and the shape where Composer keeps a Hugging Face
    configuration. MosaicBERT's vocabulary is padded as it is there, with zeros.

    Args:
        state: our parameters by name, vocabulary unpadded; those of the next-sentence head, which their models lack,
            are left out.
        shape: of the model.
        path: the new file.

    Raises:
        UserError: Composer's BERTs have no such shape, or the file cannot be written.
    """
    mosaic_bert = shape == _of_kind(shape, mosaic_bert=True)
    plain = _of_kind(shape, mosaic_bert=False) if mosaic_bert else shape
    if why_not := _composer_obstacle(plain, mosaic_bert):
        raise UserError("model.unsupported", "Composer", why_not, "Keep the weights in our own form")
    parts: dict[str, list[Tensor]] = {}
    tensors = padded(state, shape) if mosaic_bert else state
    # Rows of the query, then of the key, then of the value.
    for own in sorted(tensors, key=lambda name: (".self.key." in name) + 2 * (".self.value." in name)):
        if not own.startswith("cls.seq_relationship."):
            parts.setdefault(composer_name(own, mosaic_bert), []).append(tensors[own])
    model = {name: torch.cat(rows) if len(rows) > 1 else rows[0] for name, rows in parts.items()}
    if PREDICTION_BIAS in state:
        for own, decoder in ((WORD_EMBEDDINGS, "weight"), (PREDICTION_BIAS, "bias")):
            model[f"model.cls.predictions.decoder.{decoder}"] = model[composer_name(own, mosaic_bert)]
    values = huggingface_config(
        plain, "BertForMaskedLM" if PREDICTION_BIAS in state else "BertForSequenceClassification"
    )
    if mosaic_bert:
        values["alibi_starting_size"] = _ALIBI_SIZE
    config = {"file_extension": ".json", "content": values}
    write_pt(path, {"state": {"model": model, "integrations": {"huggingface": {"model": {"config": config}}}}})


def _of_kind(shape: BertConfig, mosaic_bert: bool) -> BertConfig:
    return dataclasses.replace(
        shape, position_embedding_type="alibi" if mosaic_bert else "absolute", gated_mlp=mosaic_bert
    )


def _composer_obstacle(plain: BertConfig, mosaic_bert: bool) -> str | None:
    """What of a shape, but for MosaicBERT's own, neither BERT of Composer has; None: nothing."""
    if not plain.tie_word_embeddings:
        return "its BERTs have no decoder of their own"
    if mosaic_bert and not plain.exact_gelu:
        return "its MosaicBERT computes the exact GELU"
    return obstacle(plain)


def _nvidia_tensors(content: Any, path: Path) -> dict[str, Tensor]:
    state = content.get("model") if isinstance(content, dict) else None
    if not isinstance(state, dict):
        raise UserError("checkpoint.format", path, "has no 'model'", _NVIDIA_REMEDY)
    return _tensors(state, path)


def _composer_weights(content: Any, path: Path) -> Weights:
    state = content.get("state") if isinstance(content, dict) else None
    model = state.get("model") if isinstance(state, dict) else None
    if not isinstance(state, dict) or not isinstance(model, dict) or not model:
        raise UserError("checkpoint.format", path, "has no state.model", "Give a checkpoint that Composer wrote")
    tensors, values = _tensors(model, path), state
    for key in ("integrations", "huggingface", "model", "config", "content"):
        values = values.get(key, {}) if isinstance(values, dict) else {}
    if not isinstance(values, dict) or not values:
        return Weights(tensors)
    mosaic_bert = any(".mlp.gated_layers." in name for name in tensors)
    return Weights(tensors, _of_kind(config_from_huggingface(values, str(path)), mosaic_bert))


def _tensors(state: Mapping[Any, Any], path: Path) -> dict[str, Tensor]:
    tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    for name, value in tensors.items():
        if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
            raise UserError("checkpoint.format", path, f"{name} is no plain tensor", ANOTHER)
    if not any(WORD_EMBEDDINGS in own_torch_names(name) for name in tensors):
        raise UserError("checkpoint.incomplete", path, f"holds no {WORD_EMBEDDINGS}", ANOTHER)
    return tensors
