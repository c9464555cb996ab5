"""Checkpoints (`mlbert.runs.step_folders`) of torch's tensors.

checkpoints/step_00000120/tensors.safetensors   weights and optimizer state
checkpoints/step_00000120/state.json            numbers, source position, sha256 of the tensors

The whole state of a run in checkpoints: weights, optimizer, what the model derives, data position, progress.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from mlbert.distributed.world import World
from mlbert.host.errors import UserError
from mlbert.host.files import write_tensors
from mlbert.runs.progress import TrainState
from mlbert.runs.step_folders import StepFolders
from mlbert.training.protocols import Method

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


WEIGHTS, OPTIMIZER, DERIVED, SCALE = "weights", "optimizer.", "derived.", "loss_scale."


class Snapshots:
    """Saves and continues one run.

    Args:
        folder: where checkpoints lie.
        method: of the run.
        state: of the run; changed by `load`.
        seed: of the run.
        world: the ranks, which call each method together.
    """

    def __init__(self, folder: CheckpointFolder, method: Method, state: TrainState, seed: int, world: World) -> None:
        self._folder, self._method, self._state, self._seed, self._world = folder, method, state, seed, world

    def save(self) -> None:
        """Writes a checkpoint from rank 0; the other ranks wait. Raises UserError for a full disk."""
        method = self._method
        optimizer = method.optimizer.state_dict()
        tensors = {OPTIMIZER + name: value for name, value in optimizer.items() if isinstance(value, Tensor)}
        tensors |= {DERIVED + name: value for name, value in method.model.derived_state().items()}
        if method.loss_scale:
            tensors |= {SCALE + name: value for name, value in method.loss_scale.state_dict().items()}
        numbers = {name: value for name, value in optimizer.items() if not isinstance(value, Tensor)}
        position = method.source.state_dict()
        state = {"train": self._state.to_json(), "optimizer": numbers, "source": position, "seed": self._seed}
        state |= {"parameters": method.flat.layout}  # for those who read the weights without the run
        with method.optimizer.exact_weights():
            if self._world.rank == 0:
                self._folder.save(self._state.step, {WEIGHTS: method.flat.data, **tensors}, state)
            self._world.barrier()

    def load(self, warn: Callable[[str], None]) -> bool:
        """Continues from the newest good checkpoint, if there is one; says with ``warn`` what was passed over.

        Raises UserError: it is of a run with another seed, or of a program that keeps other things.
        """
        checkpoint, warnings = self._folder.load_newest()
        for warning in warnings:
            warn(f"warning: {warning}")
        if checkpoint is None:
            warn(f"warning: RESUME=1, but {self._folder.path} holds no checkpoint: the run begins at step 0")
            return False
        seed = checkpoint.state.get("seed")
        if seed != self._seed:
            raise UserError(
                "run.other-settings",
                checkpoint.path,
                f"is of a run with seed {seed}, not {self._seed}",
                f"Set SEED={seed}",
            )
        try:
            self._take_over(checkpoint)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
            told = error.problem if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            reason = f"does not hold what this program keeps ({told})"
            raise UserError(
                "checkpoint.damaged", checkpoint.path, reason, "Remove it; the run goes on from one before, or anew"
            ) from None
        return True

    def _take_over(self, checkpoint: Checkpoint) -> None:
        method = self._method
        method.flat.data.copy_(checkpoint.tensors[WEIGHTS])
        numbers = checkpoint.state["optimizer"]
        method.optimizer.load_state_dict({**_part(checkpoint.tensors, OPTIMIZER), **numbers})
        method.model.load_derived_state(_part(checkpoint.tensors, DERIVED))
        if method.loss_scale:
            method.loss_scale.load_state_dict(_part(checkpoint.tensors, SCALE))
        method.source.load_state_dict(checkpoint.state["source"])
        self._state.restore(checkpoint.state["train"])


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
