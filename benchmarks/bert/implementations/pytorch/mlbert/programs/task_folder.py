"""The run folders of fine-tuning: which one a command creates, or continues after it was stopped.

OUT/run_<i>/finetune.json   the request, and the plan that a continued run follows
OUT/run_<i>/.lock           held by the process that trains
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlbert.data.formats.manifest import write_json
from mlbert.host.files import writing
from mlbert.host.json_files import add_checksum, parse_checksummed
from mlbert.programs.folder_lock import lock_folder
from mlbert.runs.run_folder import RunFolder
from mlbert.runs.step_folders import remove_checkpoints

_NOTES = "finetune.json"
REPORT = "report.txt"  # the last file of a finished run
_REMEDY = "Name another --out"


class TaskFolder:
    """The folder of one run, below OUT."""

    def __init__(self, out: Path, number: int) -> None:
        self.number = number
        self.path = RunFolder.at(out, number).folder
        self._lock: int | None = None

    @property
    def is_trained(self) -> bool:
        """True if training has ended."""
        return (self.path / "summary.json").exists()

    def has_checkpoint(self) -> bool:
        """Return True if training can be resumed."""
        return any((self.path / "checkpoints").glob("step_*"))

    def remembered(self) -> dict[str, Any] | None:
        """Return what `remember` wrote, or None if that is missing or damaged."""
        try:
            return parse_checksummed((self.path / _NOTES).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def remember(self, notes: Mapping[str, Any]) -> None:
        """Save JSON-able notes for the next call. Raises UserError if they cannot be written."""
        write_json(self.path / _NOTES, add_checksum(notes))

    def finish(self) -> None:
        """Remove what only a continued run needs."""
        remove_checkpoints(self.path / "checkpoints")
        with contextlib.suppress(OSError):
            (self.path / "checkpoints").rmdir()
        for file in (self.path / "best").glob("*"):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (self.path / "best").rmdir()

    def hold(self) -> bool:
        """Lock the folder against other processes; return whether that was possible."""
        self._lock = lock_folder(self.path, _REMEDY)
        return self._lock is not None

    def release(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


@contextmanager
def held_folder(out: Path, asked: Mapping[str, Any]) -> Iterator[TaskFolder]:
    """Yield the locked folder of the run that this request started and did not finish, or else a
    new one.

    Raises UserError if it cannot be written.
    """
    with writing(out, _REMEDY):
        folder = _unfinished(out, asked) or new_folder(out)
    try:
        yield folder
    finally:
        folder.release()


def new_folder(out: Path) -> TaskFolder:
    """Create and lock the folder of the next run. Another process may be doing the same.

    Raises OSError if it cannot be created.
    """
    out.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        folder = TaskFolder(out, number)
        with contextlib.suppress(FileExistsError):
            folder.path.mkdir()
            if folder.hold():
                return folder
        number += 1


def _unfinished(out: Path, asked: Mapping[str, Any]) -> TaskFolder | None:
    """Return the newest folder of a run with this request, locked, that has no report and that no
    other process holds."""
    numbers = [
        int(path.name.removeprefix("run_"))
        for path in out.glob("run_*")
        if path.name.removeprefix("run_").isdecimal()
    ]
    for number in sorted(numbers, reverse=True):
        folder = TaskFolder(out, number)
        notes = folder.remembered()
        if notes is None or notes.get("asked") != asked or (folder.path / REPORT).exists():
            continue
        if folder.hold():
            return folder
    return None
