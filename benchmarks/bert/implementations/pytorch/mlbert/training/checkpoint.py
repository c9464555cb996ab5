"""Checkpoints (`mlbert.runs.step_folders`) of a run's torch tensors
and its data position and progress.

checkpoints/step_00000120/tensors.safetensors   weights, optimizer state,
                                                and tensors that the model derives
checkpoints/step_00000120/state.json            numbers, source position, sha256 of the tensors
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from mlbert.distributed.world import World
from mlbert.host.errors import UserError
from mlbert.host.files import write_tensors
from mlbert.host.json_files import as_json
from mlbert.runs.progress import TrainState
from mlbert.runs.step_folders import StepFolders, read_step
from mlbert.training.protocols import Method

# Names of the tensors in a checkpoint: of the flat buffer of weights,
# and the prefixes of the others.
WEIGHTS = "weights"
OPTIMIZER = "optimizer."
DERIVED = "derived."  # by the model from its weights
SCALE = "loss_scale."
_TENSORS = "tensors.safetensors"  # file name

ALONE = World()


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: named tensors on the CPU, and JSON-serializable numbers."""

    path: Path
    tensors: dict[str, Tensor]
    state: dict


class CheckpointFolder:
    """The checkpoints of one run. Takes the same arguments as `StepFolders`."""

    def __init__(self, path: Path, keep: int, identity: dict) -> None:
        self.path = path
        self._folders = StepFolders(path, keep, identity)

    def save(self, step: int, tensors: dict[str, Tensor], state: dict) -> Path:
        """Write one checkpoint of tensors on the CPU.

        On failure (a full disk), remove the partial one and raise UserError.
        """

        def write(folder: Path) -> str:
            parts = [
                (
                    name,
                    str(one.dtype),
                    tuple(one.shape),
                    one.contiguous().reshape(-1).view(torch.uint8).numpy().data,
                )
                for name, one in tensors.items()
            ]
            return write_tensors(folder / _TENSORS, parts)

        return self._folders.save(step, state, write)

    def load_newest(self, world: World = ALONE) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest good checkpoint (None if there is none)
        and a warning for each damaged one skipped, on rank 0.

        All ranks call it together. Rank 0 alone reads and checks the files, and sends the
        checkpoint to the others: their machines need not have the folder.

        Raises UserError, on rank 0, if the newest good one is in another version's format or
        belongs to another model, data set or batch.
        """

        def read() -> tuple[Checkpoint | None, list[str]]:
            return self._folders.load_newest(
                lambda folder, state: Checkpoint(folder, load_file(folder / _TENSORS), state)
            )

        result = world.on_rank_0("checkpoint-reader", read)
        checkpoint, warnings = result or (None, [])
        return _send(checkpoint, world), warnings


def _send(checkpoint: Checkpoint | None, world: World) -> Checkpoint | None:
    """Return rank 0's checkpoint on all ranks. All ranks call it together."""
    if world.world_size == 1:
        return checkpoint
    header = b""
    if checkpoint is not None:
        shapes = {
            name: [str(one.dtype).removeprefix("torch."), list(one.shape)]
            for name, one in checkpoint.tensors.items()
        }
        content = [str(checkpoint.path), checkpoint.state, shapes]
        header = json.dumps(content).encode()
    header = world.broadcast_bytes(header)
    if not header:
        return None
    path, state, shapes = json.loads(header)
    if checkpoint is None:
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, (dtype, shape) in shapes.items()
        }
        checkpoint = Checkpoint(Path(path), tensors, state)
    for name in shapes:
        world.broadcast(checkpoint.tensors[name])
    return checkpoint


class Snapshots:
    """Save and resume one run.

    Args:
        folder: the run's checkpoints.
        method: the run's method.
        state: the run's progress; changed by `load`.
        seed: the run's seed.
        world: the ranks; all of them call each method together.
    """

    def __init__(
        self, folder: CheckpointFolder, method: Method, state: TrainState, seed: int, world: World
    ) -> None:
        self._folder = folder
        self._method = method
        self._state = state
        self._seed = seed
        self._world = world
        self._copies: dict[str, Tensor] = {}
        self._writer = ThreadPoolExecutor(1, "checkpoint-writer")
        self._writing: Future[Path] | None = None

    def prepare(self) -> None:
        """Allocate the memory for `save` and write to it once.

        Copying into new pages takes many times longer.
        """
        self._copy_state()

    def save(self, position: dict[str, Any]) -> None:
        """Copy the state; a thread of rank 0 writes it while training continues.

        Waits for the save before this one.

        ``position`` is the source's before the first step that was not taken.

        Raises UserError if that one failed, for example because the disk is full.
        """
        method = self._method
        self.wait()
        with method.optimizer.exact_weights():
            tensors, numbers = self._copy_state()
        state = {
            "train": self._state.to_json(),
            "optimizer": numbers,
            "source": position,
            "seed": self._seed,
        }
        state |= {"parameters": method.flat.layout}  # lets tools read the weights without the run
        if self._world.rank == 0:
            self._writing = self._writer.submit(self._folder.save, self._state.step, tensors, state)

    def wait(self) -> None:
        """Return once the last save is complete. Raises UserError if it failed."""
        self._world.wait_for_all(self._writing)

    def close(self) -> None:
        """Complete a save that was not waited for, because an error ended the run.

        Not collective.
        """
        self._writer.shutdown()

    def _copy_state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Return host copies of the run's tensors, on rank 0 only, and the optimizer's numbers.

        Later calls write to the same memory.
        """
        method = self._method
        optimizer = method.optimizer.state_dict()
        tensors = {
            OPTIMIZER + name: value
            for name, value in optimizer.items()
            if isinstance(value, Tensor)
        }
        tensors |= {DERIVED + name: value for name, value in method.model.derived_state().items()}
        if method.loss_scale:
            tensors |= {
                SCALE + name: value for name, value in method.loss_scale.state_dict().items()
            }
        if self._world.rank == 0:
            for name, value in {WEIGHTS: method.flat.data, **tensors}.items():
                if name not in self._copies:
                    self._copies[name] = torch.empty_like(
                        value, device="cpu", pin_memory=value.is_cuda
                    )
                self._copies[name].copy_(value)
        return self._copies, {
            name: value for name, value in optimizer.items() if not isinstance(value, Tensor)
        }

    def load(self, warn: Callable[[str], None]) -> bool:
        """Resume from the newest good checkpoint, if there is one.

        ``warn`` gets a line for each damaged one skipped.

        Returns False if there is no checkpoint. Raises UserError if the checkpoint has another
        seed, its data was read in another order, or it was written by an incompatible version.
        """
        checkpoint, warnings = self._folder.load_newest(self._world)
        for warning in warnings:
            warn(f"warning: {warning}")
        if checkpoint is None:
            warn(
                f"warning: RESUME=1, but {self._folder.path} has no checkpoint: "
                "the run starts at step 0"
            )
            return False
        seed = checkpoint.state.get("seed")
        if seed != self._seed:
            reason = f"comes from a run with seed {seed}, not {self._seed}"
            raise UserError("run.other-settings", checkpoint.path, reason, f"Set SEED={seed}")
        try:
            self._take_over(checkpoint)
        except UserError as error:
            raise error.about(checkpoint.path) from None
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
            # Its checksums are right, so it is as its writer made it.
            cause = f"{error.args[0]} is missing" if isinstance(error, KeyError) else "other fields"
            reason = f"does not match what this version of mlbert saves ({cause})"
            remedy = "Resume with the version that wrote it, or use another LOGDIR"
            raise UserError("checkpoint.format", checkpoint.path, reason, remedy) from None
        return True

    def start_optimizer(self, folder: Path) -> int:
        """Start with the optimizer state of another run's checkpoint, and return its updates.

        Raises UserError if it is damaged, or of another optimizer or another model.
        """
        identity, state = read_step(folder)
        method = self._method
        remedy = "Choose a checkpoint of the same model and optimizer, or start without its state"
        theirs = identity.get("optimizer")
        ours = method.identity.get("optimizer")
        if theirs != ours:
            reason = f"has the state of {theirs}, and this run uses {ours}"
            raise UserError("checkpoint.shape", folder, reason, remedy)
        if state.get("parameters") != as_json(method.flat.layout):
            reason = "has the optimizer state of a different model"
            raise UserError("checkpoint.shape", folder, reason, remedy)
        tensors = _part(load_file(folder / _TENSORS), OPTIMIZER)
        method.optimizer.load_state_dict({**tensors, **state["optimizer"]})
        return method.optimizer.num_updates

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
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
