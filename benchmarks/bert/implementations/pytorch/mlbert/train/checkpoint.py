"""Checkpoints: safetensors and JSON in one folder a step, written atomically, the newest N kept.

    checkpoints/step_00000120/tensors.safetensors   weights and optimizer state
    checkpoints/step_00000120/state.json            numbers, source position, sha256 of the tensors

A folder appears under its final name only when complete. A damaged newest one is passed over with a warning.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from mlbert.core.errors import UserError
from mlbert.core.files import fsync_path

FORMAT = "mlbert-checkpoint-1"
_NAME = re.compile(r"step_(\d{8})")


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: named tensors on the CPU, and JSON-able numbers."""

    path: Path
    tensors: dict[str, Tensor]
    state: dict


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        path: the folder; made at the first save.
        keep: how many of the newest stay.
        identity: what a checkpoint must agree on to be loaded here (model shape, data, batch); JSON-able.
    """

    def __init__(self, path: Path, keep: int, identity: dict) -> None:
        self.path, self.keep, self.identity = path, keep, json.loads(json.dumps(identity))

    def save(self, step: int, tensors: dict[str, Tensor], state: dict) -> Path:
        """Writes one checkpoint; on failure (a full disk) nothing half-written is left and UserError is raised."""
        final = self.path / f"step_{step:08d}"
        partial = self.path / f".partial_step_{step:08d}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            file = partial / "tensors.safetensors"
            save_file(tensors, file)
            record = {
                "format": FORMAT,
                "step": step,
                "identity": self.identity,
                "tensors_sha256": _sha256(file.read_bytes()),
                "state": state,
            }
            (partial / "state.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            for written in (file, partial / "state.json", partial):
                fsync_path(written)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            fsync_path(self.path)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            reason = getattr(error, "strerror", None) or error
            raise UserError(final, f"could not be written ({reason})", "Free space or change LOGDIR") from None
        for old in self._complete()[: -max(self.keep, 1)]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def load_newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest good checkpoint (None when there is none) and a warning for each damaged one passed over.

        Raises UserError when the newest good one belongs to another model, data set or batch.
        """
        warnings: list[str] = []
        for folder in reversed(self._complete()):
            try:
                return self._load(folder), warnings
            except _DamagedError as damage:
                warnings.append(f"{folder}: {damage}; falling back to the checkpoint before it")
        if warnings:
            raise UserError(self.path, "every checkpoint is damaged", "Remove the folder to start anew")
        return None, warnings

    def _complete(self) -> list[Path]:
        if not self.path.is_dir():
            return []
        return sorted(entry for entry in self.path.iterdir() if _NAME.fullmatch(entry.name))

    def _load(self, folder: Path) -> Checkpoint:
        try:
            record = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            blob = (folder / "tensors.safetensors").read_bytes()
        except (OSError, ValueError) as error:
            raise _DamagedError(f"cannot be read ({error})") from None
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise _DamagedError(f"state.json is not of format {FORMAT}")
        if _sha256(blob) != record.get("tensors_sha256"):
            raise _DamagedError("tensors.safetensors differs from its checksum")
        if record.get("identity") != self.identity:
            raise UserError(folder, self._difference(record["identity"]), "Remove the folder or set another LOGDIR")
        return Checkpoint(folder, load(blob), record["state"])

    def _difference(self, found: dict) -> str:
        keys = sorted(k for k in {*found, *self.identity} if found.get(k) != self.identity.get(k))
        return (
            f"belongs to another run: {keys[0]} is {found.get(keys[0])!r}, this run has {self.identity.get(keys[0])!r}"
        )


class _DamagedError(Exception):
    pass


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
