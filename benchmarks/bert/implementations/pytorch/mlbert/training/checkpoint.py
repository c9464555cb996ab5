"""Checkpoints (`mlbert.runs.step_folders`) of torch's tensors.

checkpoints/step_00000120/tensors.safetensors   weights and optimizer state
checkpoints/step_00000120/state.json            numbers, source position, sha256 of the tensors
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from mlbert.host.files import write_tensors
from mlbert.runs.step_folders import StepFolders

_TENSORS = "tensors.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: named tensors on the CPU, and JSON-able numbers."""

    path: Path
    tensors: dict[str, Tensor]
    state: dict


class CheckpointFolder:
    """The checkpoints of one run; the arguments are those of `StepFolders`."""

    def __init__(self, path: Path, keep: int, identity: dict) -> None:
        self.path, self._folders = path, StepFolders(path, keep, identity)

    def save(self, step: int, tensors: dict[str, Tensor], state: dict) -> Path:
        """Writes one checkpoint; on failure (a full disk) nothing half-written is left and UserError is raised."""

        def write(folder: Path) -> None:
            write_tensors(folder / _TENSORS, lambda path: save_file(tensors, path))

        return self._folders.save(step, state, write)

    def load_newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest good checkpoint (None when there is none) and a warning for each damaged one passed over.

        Raises UserError when the newest good one belongs to another model, data set or batch.
        """
        return self._folders.load_newest(lambda folder, state: Checkpoint(folder, load_file(folder / _TENSORS), state))
