"""Starting weights: a safetensors file or a folder that holds one, under Hugging Face's names."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from mlbert.core.errors import UserError
from mlbert.models.bert import BertForPreTraining
from mlbert.models.huggingface import load_huggingface


def load_weights(model: BertForPreTraining, path: Path) -> dict[str, str]:
    """Copies weights into the model; returns the report of `load_huggingface`. Raises UserError on a damaged file."""
    file = path / "model.safetensors" if path.is_dir() else path
    remedy = "Set INIT_CHECKPOINT to a model.safetensors, or to none"
    if file.suffix != ".safetensors":
        raise UserError(file, "is not a safetensors file", "Convert it first: mlbert convert --help")
    try:
        state = load_file(file)
    except OSError as error:
        raise UserError(file, f"cannot be read ({error.strerror or error})", remedy) from None
    except SafetensorError as error:
        raise UserError(file, f"is damaged ({error})", remedy) from None
    return load_huggingface(model, state, str(file))
