"""Checkpoint folders, one per step, written atomically; the newest N are kept. Works with any framework's tensors.

    checkpoints/step_00000120/state.json   numbers, the run's identity, sha256 of the other files and of itself

A folder gets its final name only when complete. If the newest one is damaged, loading warns and uses the one before.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mlbert.host.errors import UserError
from mlbert.host.files import fsync_path, open_plain
from mlbert.host.json_files import json_sha256, read_json

FORMAT = "mlbert-checkpoint-2"
_NAME = re.compile(r"step_(\d{8})")
STATE = "state.json"
_DIGEST = "record_sha256"
_BLOCK = 1 << 20  # bytes
Loaded = TypeVar("Loaded")


class StepFolders:
    """The checkpoints of one run.

    Args:
        path: the folder, created at the first save.
        keep: how many of the newest checkpoints to keep.
        identity: what a checkpoint must match to be loaded here (model shape, data, batch); JSON-serializable.
    """

    def __init__(self, path: Path, keep: int, identity: dict) -> None:
        self.path, self.keep, self.identity = path, keep, json.loads(json.dumps(identity))

    def save(self, step: int, state: dict, write: Callable[[Path], str | None]) -> Path:
        """Save a checkpoint of the files that ``write`` puts into a folder and the JSON-serializable ``state``.

        ``write`` returns the SHA-256 of its file, or None to have its files read again for it. On an OSError, also one
        from ``write``, remove the partial checkpoint and raise UserError.
        """
        final = self.path / f"step_{step:08d}"
        partial = self.path / f".partial_step_{step:08d}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for stale in self.path.glob(".partial_step_*"):  # of a writer that was killed
                shutil.rmtree(stale, ignore_errors=True)
            partial.mkdir()
            digest = write(partial) or _sha256(partial)
            record = {
                "format": FORMAT,
                "step": step,
                "identity": self.identity,
                "tensors_sha256": digest,
                "tensors_bytes": _num_bytes(partial),
                "state": state,
            }
            record[_DIGEST] = json_sha256(record)
            (partial / STATE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            for written in (*partial.iterdir(), partial):
                fsync_path(written)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            fsync_path(self.path)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            reason = f"could not be written ({error.strerror or error})"
            raise UserError(
                "file.unwritable", final, reason, "Free space, or name another folder"
            ) from None
        for old in self._complete()[: -max(self.keep, 1)]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def load_newest(self, load: Callable[[Path, dict], Loaded]) -> tuple[Loaded | None, list[str]]:
        """Return what ``load`` returns for the newest good folder and its state (None if there are no checkpoints), and
        a warning for each damaged one skipped.

        Raises UserError if all are damaged, or the newest good one belongs to another model, data set or batch.
        """
        warnings: list[str] = []
        for folder in reversed(self._complete()):
            try:
                state = self._checked(folder)
            except _DamagedError as damage:
                warnings.append(f"{folder}: {damage}; falling back to the checkpoint before it")
            else:
                return load(folder, state), warnings
        if warnings:
            reason = "every checkpoint is damaged"
            raise UserError(
                "checkpoint.damaged", self.path, reason, "Remove the folder to start anew"
            )
        return None, warnings

    def _complete(self) -> list[Path]:
        if not self.path.is_dir():
            return []
        return sorted(entry for entry in self.path.iterdir() if _NAME.fullmatch(entry.name))

    def _checked(self, folder: Path) -> dict:
        record = _undamaged(folder)
        if _set_entries(record["identity"]) != _set_entries(self.identity):
            remedy = "Set it so, or use another LOGDIR"
            raise UserError(
                "run.other-settings", folder, self._difference(record["identity"]), remedy
            )
        return record["state"]

    def _difference(self, found: dict) -> str:
        name = next(k for k in {**self.identity, **found} if found.get(k) != self.identity.get(k))
        return f"belongs to another run: {name} is {found.get(name)!r}, this run has {self.identity.get(name)!r}"


def read_step(folder: Path) -> tuple[dict, dict]:
    """Return a checkpoint's identity and state, whichever run wrote it. Raises UserError if it is damaged."""
    try:
        record = _undamaged(folder)
    except _DamagedError as damage:
        remedy = "Use another one, such as the checkpoint before it"
        raise UserError("checkpoint.damaged", folder, str(damage), remedy) from None
    return record["identity"], record["state"]


def _set_entries(identity: dict) -> dict:
    """Return the entries that are not None. A setting added after the checkpoint was written counts as None."""
    return {name: value for name, value in identity.items() if value is not None}


class _DamagedError(Exception):
    pass


def _undamaged(folder: Path) -> dict:
    """Return a checkpoint's record after checking its files against their checksums."""
    try:
        record = read_json(folder / STATE, "Remove it")
        size = _num_bytes(folder)
        if record.get("tensors_bytes", size) != size:  # not in checkpoints of earlier code
            raise _DamagedError(
                f"its tensors have {size} bytes, {STATE} says {record['tensors_bytes']}"
            )
        tensors = _sha256(folder)
    except UserError as error:
        raise _DamagedError(f"{STATE} {error.problem}") from None
    except OSError as error:
        raise _DamagedError(f"cannot be read ({error})") from None
    if record.get("format") != FORMAT:
        raise _DamagedError(f"{STATE} is not of format {FORMAT}")
    if not all(isinstance(record.get(name), dict) for name in ("identity", "state")):
        raise _DamagedError(f"{STATE} has no identity or no state")
    if record.pop(_DIGEST, None) != json_sha256(record):
        raise _DamagedError(f"{STATE} differs from its checksum")
    if tensors != record.get("tensors_sha256"):
        raise _DamagedError("its tensors differ from their checksum")
    return record


def _num_bytes(folder: Path) -> int:
    """Return the size of all files but the state."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.name != STATE)


def _sha256(folder: Path) -> str:
    """Return the digest of the contents of all files but the state, concatenated in order of their names."""
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name != STATE:
            with open_plain(path) as file:
                while block := file.read(_BLOCK):
                    found.update(block)
    return found.hexdigest()
