"""Between our form and the checkpoints of MosaicML's Composer.

Read: a whole checkpoint of a run (weights in ``state.model``) of their Hugging Face BERT, and the containers of their
MLPerf v2.1 submission, where query, key and value may be one matrix. The configurations, times and random states
beside the weights are not made: a stand-in takes their place, and any class or function that is not on the list ends
the reading. A MosaicBERT is recognised and refused: a plain BERT cannot hold it.
Written: the bare container ``{"state": {"model": ...}}`` of that submission, names below ``model.``, vocabulary of the
true size, without pooler and next-sentence head, which their masked-LM model does not have.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

from torch import Tensor

from mlbert.convert.common import Checkpoint, check_target, find_shape, read_own, write_own, write_pt
from mlbert.core.checkpoint_names import PREDICTION_BIAS, WORD_EMBEDDINGS, composer_names
from mlbert.core.errors import UserError
from mlbert.models import BertConfig
from mlbert.models.huggingface import config_from_huggingface
from mlbert.models.renaming import Report, own_state, read_pt, refuse_other_architecture


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


def composer_to_torch(source: Path, target: Path, config: Path | None = None) -> Report:
    """Reads a Composer checkpoint, writes our folder. The shape comes from ``config``, else from the checkpoint's own
    Hugging Face configuration, else from the ``bert_config.json`` beside it. Raises UserError for damage, a forbidden
    object, or another architecture."""
    check_target(target)
    remedy = "Give an undamaged checkpoint that Composer or PyTorch wrote"
    content = read_pt(source, remedy, STAND_INS)
    state = content.get("state") if isinstance(content, dict) else None
    model = state.get("model") if isinstance(state, dict) else None
    if not isinstance(state, dict) or not isinstance(model, dict) or not model:
        raise UserError(source, "has no state.model", "Give a checkpoint that Composer wrote")
    tensors = {str(name): value for name, value in model.items() if isinstance(value, Tensor)}
    for name in tensors:  # before the shape is asked for, which a MosaicBERT's configuration does not give
        refuse_other_architecture(name, str(source))
    shape = _shape(state, config, source)
    own, report = own_state(tensors, shape, str(source))
    return write_own(Checkpoint(shape, own, report, source.parent), target)


def _shape(state: dict[str, Any], config: Path | None, source: Path) -> BertConfig:
    if config is None:
        values: Any = state
        for key in ("integrations", "huggingface", "model", "config", "content"):
            values = values.get(key) if isinstance(values, dict) else None
        if isinstance(values, dict):
            return config_from_huggingface(values, str(source))
    return find_shape(config, source.parent)


def torch_to_composer(source: Path, target: Path) -> Report:
    """Reads our folder, writes the bare container, which also loads with ``weights_only=True``."""
    check_target(target)
    checkpoint = read_own(source)
    names = composer_names(checkpoint.shape.num_hidden_layers)
    report = checkpoint.report
    for own in set(checkpoint.state) - set(names):
        report.missing.pop(own, None)
        report.taken.pop(own, None)
        report.dropped[own] = "Composer's masked-LM model has no such part"
    model = OrderedDict((key, checkpoint.state[own]) for own, key in names.items())
    model["model.cls.predictions.decoder.weight"] = model[names[WORD_EMBEDDINGS]]
    model["model.cls.predictions.decoder.bias"] = model[names[PREDICTION_BIAS]]
    write_pt(target, {"state": {"model": model}})
    return report
