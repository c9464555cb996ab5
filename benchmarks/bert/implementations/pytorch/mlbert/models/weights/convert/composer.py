"""Between our form and the checkpoints of MosaicML's Composer (`mlbert.models.weights.foreign`).

What is written on either side are the parts that the source has, a classifier too: no head is made up. A tensor of a
head that is incomplete is drawn, and the report says so.
"""

from __future__ import annotations

from pathlib import Path

from mlbert.models.bert import BertConfig
from mlbert.models.weights.checkpoint_state import Report
from mlbert.models.weights.convert.common import (
    CONFIG,
    WEIGHTS,
    Checkpoint,
    find_shape,
    read_weights_folder,
    with_heads,
    write_own,
)
from mlbert.models.weights.files import check_target
from mlbert.models.weights.foreign import read_composer, write_composer
from mlbert.models.weights.renaming import own_state, parameters_in


def composer_to_torch(source: Path, target: Path, config: Path | None = None) -> Report:
    """Reads a Composer checkpoint, writes our folder. The shape comes from ``config``, else from the checkpoint's own
    Hugging Face configuration, else from the ``bert_config.json`` beside it. Raises UserError for damage, a forbidden
    object, or another architecture."""
    check_target(target)
    weights = read_composer(source)
    shape = weights.shape if weights.shape and config is None else find_shape(config, source.parent)
    known = parameters_in(weights.tensors, shape)
    own, report = own_state(weights.tensors, shape, str(source), known=known)
    return write_own(Checkpoint(shape, own, report, source.parent), target, known)


def torch_to_composer(source: Path, target: Path) -> Report:
    """Reads our folder, writes what Composer's BERT, or MosaicBERT, starts from. Raises UserError for other shapes."""
    check_target(target)
    shape = BertConfig.from_json(source / CONFIG)
    tensors = read_weights_folder(source)
    known = parameters_in(tensors, shape)
    state, report = own_state(tensors, shape, str(source / WEIGHTS), known=known)
    checkpoint = with_heads(Checkpoint(shape, state, report, source), known)
    write_composer(checkpoint.state, shape, target)
    for own in (name for name in checkpoint.state if name.startswith("cls.seq_relationship.")):
        report.missing.pop(own, None)
        report.taken.pop(own, None)
        report.dropped[own] = "Composer's models have no such part"
    return report
