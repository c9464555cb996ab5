"""Between our form and NVIDIA's ``.pt`` file: ``{'model': state_dict}`` in float32.

Their state dict has the vocabulary padded to a multiple of 8 (30528 rows) and holds the decoder a second time under
``cls.predictions.decoder.weight``. Files that a training program saved have segmented and fused names; these are read.
"""

from __future__ import annotations

from pathlib import Path

from mlbert.host.errors import UserError
from mlbert.models.weights.checkpoint_names import WORD_EMBEDDINGS, parameter_names
from mlbert.models.weights.checkpoint_state import Report
from mlbert.models.weights.convert.common import Checkpoint, find_shape, read_own, with_heads, write_own
from mlbert.models.weights.convert.tensorflow_checkpoint import read_tf1
from mlbert.models.weights.files import check_target, write_pt
from mlbert.models.weights.foreign import read_nvidia_pt
from mlbert.models.weights.huggingface import obstacle
from mlbert.models.weights.renaming import own_state, padded


def nvidia_to_torch(source: Path, target: Path, config: Path | None = None) -> Report:
    """Reads a ``.pt`` file, tensors only; writes our folder. Raises UserError as `read_nvidia_pt` and `own_state`."""
    check_target(target)
    shape = find_shape(config, source.parent)
    state, report = own_state(read_nvidia_pt(source), shape, str(source))
    return write_own(Checkpoint(shape, state, report, source.parent), target)


def torch_to_nvidia(source: Path, target: Path) -> Report:
    """Reads our folder, writes a ``.pt`` file that NVIDIA's program loads with ``torch.load(path)['model']``."""
    check_target(target)
    return _write(read_own(source), target)


def tf1_to_nvidia(prefix: Path, target: Path, config: Path | None = None) -> Report:
    """Reads a TensorFlow 1 checkpoint, writes a ``.pt`` file as `torch_to_nvidia`. Raises UserError as `read_tf1`."""
    check_target(target)
    return _write(with_heads(read_tf1(prefix, config)), target)


def _write(checkpoint: Checkpoint, target: Path) -> Report:
    shape = checkpoint.shape
    why_not = obstacle(shape) or (None if shape.tie_word_embeddings else "its BERT has no decoder of its own")
    if why_not:
        raise UserError("model.unsupported", "NVIDIA", why_not, "Keep the weights in our own form")
    state = padded(checkpoint.state, shape)
    content = {name: state[name] for name in parameter_names(shape.num_hidden_layers)}
    content["cls.predictions.decoder.weight"] = content[WORD_EMBEDDINGS]
    write_pt(target, {"model": content})
    return checkpoint.report
