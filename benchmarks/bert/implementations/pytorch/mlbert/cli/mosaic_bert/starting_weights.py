"""Weights to fine-tune from, wherever they come from, with the shape and the vocabulary that lie beside them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from mlbert.convert.common import CONFIG, WEIGHTS
from mlbert.convert.composer import composer_to_torch
from mlbert.convert.huggingface_folder import huggingface_to_torch
from mlbert.core.errors import UserError

CACHE = Path("local-bert-checkpoints")


@dataclass(frozen=True)
class Start:
    """Weights that a recipe reads, and the shape and the vocabulary beside them, None where there is none."""

    weights: Path
    shape: Path | None
    vocabulary: Path | None


def find_start(source: Path, shape: Path, cache: Path = CACHE) -> Start:
    """The weights of a run folder, of our own ``weights/``, of a Hugging Face folder, or of a Composer checkpoint.

    Args:
        source: what is given.
        shape: bert_config.json of a Composer checkpoint that does not tell its own.
        cache: where converted weights are kept, by their source's path and time.

    Raises:
        UserError: nothing is there, or it is damaged or of another architecture.
    """
    remedy = "Name a run folder, its weights/, a Hugging Face folder, or a Composer checkpoint"
    if not source.exists():
        raise UserError(source, "does not exist", remedy)
    if source.is_dir() and not (source / WEIGHTS).exists() and (source / "weights" / WEIGHTS).exists():
        source = source / "weights"
    if source.is_dir():
        if (source / CONFIG).exists():
            return _own(source)
        if not (source / "config.json").exists():
            raise UserError(source, f"has neither {CONFIG} nor config.json", remedy)
    elif source.suffix == ".safetensors":
        return _own(source.parent, source)
    return _own(_converted(source.absolute(), shape, cache))


def _own(folder: Path, weights: Path | None = None) -> Start:
    shape, vocabulary = folder / CONFIG, folder / "vocab.txt"
    return Start(weights or folder, shape if shape.exists() else None, vocabulary if vocabulary.exists() else None)


def _converted(source: Path, shape: Path, cache: Path) -> Path:
    file = source / WEIGHTS if source.is_dir() else source
    about = f"{source} {file.stat().st_mtime_ns if file.exists() else 0}"
    target = cache / f"{source.stem}-{hashlib.sha256(about.encode()).hexdigest()[:12]}"
    if not target.exists():
        if source.is_dir():
            report = huggingface_to_torch(source, target)
        else:
            report = composer_to_torch(source, target, shape)
        # What the checkpoint does not have is drawn by each run from its own seed.
        state = load_file(target / WEIGHTS)
        kept = {name: tensor for name, tensor in state.items() if name not in report.missing}
        save_file(kept, target / WEIGHTS, metadata={"format": "pt"})
    return target
