"""Checkpoint folders, one per step, written atomically; the newest N are kept.

Works with any framework's tensors.

    checkpoints/step_00000120/state.json   numbers, the run's identity,
                                           sha256 of the other files and of itself

A folder gets its final name only when complete. If the newest one is damaged,
loading warns and uses the one before.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from mlbert.host.errors import UserError
from mlbert.host.files import fsync_path, open_plain, writing
from mlbert.host.json_files import as_json, json_sha256, read_json

FORMAT = "mlbert-checkpoint-2"
_FORMATS = "mlbert-checkpoint-"
_FORMAT_NAME = re.compile(_FORMATS + r"\d+")
_NAME = re.compile(r"step_(\d{8})")
STATE = "state.json"
_DIGEST = "record_sha256"
_BLOCK = 1 << 20  # bytes
Loaded = TypeVar("Loaded")


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, damaged ones included, in order."""
    if not folder.is_dir():
        return []
    matches = (_NAME.fullmatch(entry.name) for entry in folder.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def step_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step in a folder."""
    return folder / f"step_{step:08d}"


def remove_checkpoints(folder: Path) -> None:
    """Remove all checkpoints in a folder.

    Raises UserError, before it removes anything, if a folder with the name of a checkpoint does not
    have our mark: a record with the name of one of our formats.
    """
    found = [step_path(folder, step) for step in steps_in(folder)]
    for one in found:
        try:
            name = read_json(one / STATE, "").get("format")
        except UserError:
            name = None
        if one.is_symlink() or not str(name).startswith(_FORMATS):
            reason = "is not a checkpoint that this program wrote, so it is not removed"
            raise UserError("file.in-the-way", one, reason, "Move it away, or use another folder")
    for one in found:
        with writing(one, "Remove it"):
            shutil.rmtree(one)


class StepFolders:
    """The checkpoints of one run.

    Args:
        path: the folder, created at the first save.
        keep: how many of the newest checkpoints to keep.
        identity: what a checkpoint must match to be loaded here (model shape, data, batch);
            JSON-serializable.
    """

    def __init__(self, path: Path, keep: int, identity: dict) -> None:
        self.path = path
        self.keep = keep
        self.identity = as_json(identity)

    def save(self, step: int, state: dict, write: Callable[[Path], str | None]) -> Path:
        """Save a checkpoint of the files that ``write`` puts into a folder
        and the JSON-serializable ``state``.

        ``write`` returns the SHA-256 of its file, or None to have its files read again for it. On
        an OSError, also one from ``write``, remove the partial checkpoint and raise UserError.
        """
        final = step_path(self.path, step)
        partial = self.path / f".partial_{final.name}"
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
        """Return what ``load`` returns for the newest good folder and its state (None if there are
        no checkpoints), and a warning for each damaged one skipped.

        Raises UserError if all are damaged, or the newest undamaged one is in the format of another
        version or belongs to another model, data set or batch.
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
        found = self._in_present_names(record["identity"])
        # A setting that only one has was not fixed when it was written, or may change in this run.
        names = [
            name
            for name in {**self.identity, **found}
            if not name.isupper() or (name in found and name in self.identity)
        ]
        self._refuse_others(folder, found, names)
        return record["state"]

    def _in_present_names(self, found: dict) -> dict:
        """Return a checkpoint's identity with the batch of all ranks,
        if this run compares that, and it was written with a rank's.
        """
        sizes = ("train_batch_size", "ranks")
        if "global_batch_size" not in self.identity or not all(name in found for name in sizes):
            return found
        kept = {name: value for name, value in found.items() if name not in sizes}
        return {**kept, "global_batch_size": found["train_batch_size"] * found["ranks"]}

    def check_newest(self) -> None:
        """Raise UserError if the newest checkpoint is in the format of another version, or an entry
        that its identity shares with this one differs. Reads only its record, and leaves damage to
        `load_newest`.
        """
        for folder in self._complete()[-1:]:
            try:
                record = read_json(folder / STATE, "Remove it")
            except UserError:
                continue
            _refuse_other_format(folder, record)
            found = record.get("identity")
            if isinstance(found, dict):
                self._refuse_others(
                    folder, found, [name for name in self.identity if name in found]
                )

    def _refuse_others(self, folder: Path, found: dict, names: Sequence[str]) -> None:
        """Raise UserError about the first of these entries
        that is not the same in a checkpoint and in this run.
        """
        for name in names:
            before = found.get(name)
            here = self.identity.get(name)
            if before != here:
                reason = f"belongs to a different run: {name} is {before!r} there and {here!r} here"
                remedy = "Set it to the former value, or use another LOGDIR"
                raise UserError("run.other-settings", folder, reason, remedy)


def read_step(folder: Path) -> tuple[dict, dict]:
    """Return a checkpoint's identity and state, whichever run wrote it.

    Raises UserError if it is damaged, or in the format of another version.
    """
    try:
        record = _undamaged(folder)
    except _DamagedError as damage:
        remedy = "Use another one, such as the checkpoint before it"
        raise UserError("checkpoint.damaged", folder, str(damage), remedy) from None
    return record["identity"], record["state"]


class _DamagedError(Exception):
    pass


def _undamaged(folder: Path) -> dict:
    """Return a checkpoint's record after checking its files against their checksums.

    Raises UserError if it is in the format of another version.
    """
    try:
        record = read_json(folder / STATE, "Remove it")
    except UserError as error:
        raise _DamagedError(f"{STATE} {error.problem}") from None
    _refuse_other_format(folder, record)
    try:
        size = _num_bytes(folder)
        if record.get("tensors_bytes", size) != size:  # not in checkpoints of earlier code
            raise _DamagedError(
                f"its tensors have {size} bytes, but {STATE} says {record['tensors_bytes']}"
            )
        tensors = _sha256(folder)
    except OSError as error:
        raise _DamagedError(f"cannot be read ({error.strerror or error})") from None
    if record.get("format") != FORMAT:
        raise _DamagedError(f"{STATE} is not of format {FORMAT}")
    if not all(isinstance(record.get(name), dict) for name in ("identity", "state")):
        raise _DamagedError(f"{STATE} has no identity or no state")
    if record.pop(_DIGEST, None) != json_sha256(record):
        raise _DamagedError(f"{STATE} differs from its checksum")
    if tensors != record.get("tensors_sha256"):
        raise _DamagedError("its tensors differ from their checksum")
    return record


def _refuse_other_format(folder: Path, record: dict) -> None:
    """Raise UserError if an undamaged record is in the format of another version.

    Without a digest, which another version may store elsewhere, the name of the format decides.
    """
    name = record.get("format")
    if name == FORMAT or not isinstance(name, str):
        return
    content = dict(record)
    digest = content.pop(_DIGEST, None)
    is_format = bool(_FORMAT_NAME.fullmatch(name)) if digest is None else True
    if is_format and digest in (None, json_sha256(content)):
        reason = f"is in the format {name}; this version of mlbert reads {FORMAT}"
        remedy = "Resume with the version that wrote it, or use another LOGDIR"
        raise UserError("checkpoint.format", folder, reason, remedy)


def _num_bytes(folder: Path) -> int:
    """Return the size of all files but the state."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.name != STATE)


def _sha256(folder: Path) -> str:
    """Return the digest of the contents of all files but the state,
    concatenated in order of their names.
    """
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name != STATE:
            with open_plain(path) as file:
                while block := file.read(_BLOCK):
                    found.update(block)
    return found.hexdigest()
