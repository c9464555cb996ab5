"""The folder of a pre-training run on custom text:
its paths, its lock, and the notes for the next call.

DIR/pretrain.json      the request and the choices; a folder without it is not ours
DIR/bert_config.json   the model shape
DIR/text/              the prepared text, see `mlbert.data.prepare.custom_corpus`
DIR/run_0/             the run, see `mlbert.training.experiment`
DIR/grown/             weights tiled from a smaller model, with --grow-from
DIR/model/             the model for transformers
DIR/report.html        the report
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlbert.data.formats.manifest import make_folder, reading, write_json
from mlbert.data.prepare.custom_corpus import read_facts
from mlbert.data.prepare.finished_output import WORK_FOLDER
from mlbert.host.errors import UserError
from mlbert.host.json_files import add_checksum, parse_checksummed, read_json
from mlbert.programs.folder_lock import LOCK, lock_folder

_OTHER = "Choose another --out"  # remedy
_GROWN = "grown"
NOTES = "pretrain.json"  # what `OwnFolder.remember` writes


class OwnFolder:
    """Paths in DIR."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path / "text"
        self.shape = path / "bert_config.json"
        self.grown = path / _GROWN
        self.run = path / "run_0"
        self.checkpoints = self.run / "checkpoints"
        self.model = path / "model"
        self.report = path / "report.html"
        self.summary = self.run / "summary.json"
        self.log = path / "result_0.txt"
        self._notes = path / NOTES

    @contextmanager
    def held(self) -> Iterator[None]:
        """Create the folder and lock it against other processes. If the block fails before it has
        written anything that the next call can use, the folder is removed again.

        Raises UserError if it is not a folder, contains something else,
        or another process trains there.
        """
        with reading(self.path, _OTHER):
            if self.path.exists() and not self.path.is_dir():
                raise UserError("file.wrong-kind", self.path, "is a file, not a folder", _OTHER)
            names = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
            if names - {LOCK, _GROWN} and not self._notes.is_file():
                reason = "contains something other than a run of mlbert pretrain"
                raise UserError("file.in-the-way", self.path, reason, _OTHER)
        is_new = not self.path.exists()
        make_folder(self.path)
        lock = lock_folder(self.path, _OTHER)
        if lock is None:
            remedy = f"Wait for it. {_OTHER}"
            raise UserError("run.in-use", self.path, "another process trains there", remedy)
        try:
            yield
        except BaseException:
            self._remove_useless(is_new)
            raise
        finally:
            os.close(lock)

    def _remove_useless(self, is_new: bool) -> None:
        """Remove text that is not complete and cannot be continued. If only notes are left then,
        remove them and the lock, and the folder if it is new.
        """
        is_usable = read_facts(self.text) is not None or (self.text / WORK_FOLDER).is_dir()
        if not is_usable and not self.run.exists():
            shutil.rmtree(self.text, ignore_errors=True)
        if {path.name for path in self.path.iterdir()} - {LOCK, NOTES}:
            return
        self._notes.unlink(missing_ok=True)
        (self.path / LOCK).unlink()
        if is_new:
            self.path.rmdir()

    def remembered(self) -> dict[str, Any] | None:
        """Return what `remember` wrote, or None. Raises UserError if the file is damaged."""
        if not self._notes.is_file():
            return None
        with reading(self._notes):
            found = parse_checksummed(self._notes.read_text(encoding="utf-8", errors="replace"))
        if found is None:
            raise self.damaged()
        return found

    def damaged(self) -> UserError:
        """Return the error for notes that `remember` did not write."""
        return UserError(
            "run.damaged", self._notes, "is damaged", f"Remove {self.path} to start again"
        )

    def remember(self, notes: Mapping[str, Any]) -> None:
        """Save JSON-able notes for the next call. Raises UserError if they cannot be written."""
        write_json(self._notes, add_checksum(notes))

    def has_checkpoint(self) -> bool:
        """Return True if training can be resumed."""
        return any(self.checkpoints.glob("step_*"))

    def finished(self) -> dict[str, Any] | None:
        """Return the summary of a finished run, or None."""
        try:
            return read_json(self.summary, "")
        except UserError:
            return None
