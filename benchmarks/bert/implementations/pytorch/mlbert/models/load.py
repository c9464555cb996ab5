"""Starting weights: a safetensors file, a folder that holds one, or NVIDIA's ``.pt`` file, tensors only."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from mlbert.core.errors import UserError
from mlbert.models.bert import AnyBert
from mlbert.models.renaming import Report, load_state, read_nvidia_pt


def load_weights(model: AnyBert, path: Path) -> Report:
    """Copies weights into the model; returns the report of `load_state`. Raises UserError on a damaged file."""
    file = path / "model.safetensors" if path.is_dir() else path
    remedy = "Set INIT_CHECKPOINT to a model.safetensors or a .pt file, or to none"
    if file.suffix == ".pt":
        return load_state(model, read_nvidia_pt(file), str(file))
    if file.suffix != ".safetensors":
        raise UserError(file, "is neither a safetensors nor a .pt file", "Convert it first: mlbert convert --help")
    try:
        state = load_file(file)
    except OSError as error:
        raise UserError(file, f"cannot be read ({error.strerror or error})", remedy) from None
    except SafetensorError as error:
        raise UserError(file, f"is damaged ({error})", remedy) from None
    return load_state(model, state, str(file))
