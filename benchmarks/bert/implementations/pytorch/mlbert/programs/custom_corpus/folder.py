"""The folder of a pre-training run on one's own text, and what it remembers from one call to the next.

DIR/pretrain.json      what was asked for and chosen; a folder without it is not ours
DIR/bert_config.json   the model's shape
DIR/text/              the prepared text, see `mlbert.data.prepare.own_text`
DIR/run_0/             the run, see `mlbert.training.experiment`
DIR/model/             the model for transformers
DIR/report.html
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlbert.data.formats.manifest import make_folder, reading, write_json
from mlbert.host.checksummed_json import add_checksum, parse_checksummed
from mlbert.host.errors import UserError
from mlbert.host.json_files import read_json

_OTHER = "Choose another --out"
_LOCK = ".lock"


@dataclass(frozen=True)
class OwnFolder:
    """Paths of DIR."""

    path: Path

    @property
    def text(self) -> Path:
        return self.path / "text"

    @property
    def shape(self) -> Path:
        return self.path / "bert_config.json"

    @property
    def run(self) -> Path:
        return self.path / "run_0"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def summary(self) -> Path:
        return self.run / "summary.json"

    @property
    def log(self) -> Path:
        return self.path / "result_0.txt"

    @property
    def _notes(self) -> Path:
        return self.path / "pretrain.json"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Makes the folder and keeps other processes out. Raises UserError: it is no folder, holds something else, or
        another process trains there."""
        with reading(self.path, _OTHER):
            if self.path.exists() and not self.path.is_dir():
                raise UserError("file.wrong-kind", self.path, "is a file, not a folder", _OTHER)
            names = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
            if names - {_LOCK} and not self._notes.is_file():
                raise UserError(
                    "file.in-the-way", self.path, "holds something else than a run of mlbert pretrain", _OTHER
                )
        make_folder(self.path)
        try:
            lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError("file.unwritable", self.path, f"cannot be written ({error.strerror})", _OTHER) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise UserError("run.in-use", self.path, "another process trains there", f"Wait for it. {_OTHER}") from None
        finally:
            os.close(lock)

    def remembered(self) -> dict[str, Any] | None:
        """What `remember` wrote; None before. Raises UserError: the file is damaged."""
        if not self._notes.is_file():
            return None
        with reading(self._notes):
            found = parse_checksummed(self._notes.read_text(encoding="utf-8", errors="replace"))
        if found is None:
            raise UserError("run.damaged", self._notes, "is damaged", f"Remove {self.path} to start anew")
        return found

    def remember(self, notes: Mapping[str, Any]) -> None:
        """Keeps JSON-able notes for the next call. Raises UserError: they cannot be written."""
        write_json(self._notes, add_checksum(notes))

    def has_checkpoint(self) -> bool:
        """Whether training can go on."""
        return any((self.run / "checkpoints").glob("step_*"))

    def finished(self) -> dict[str, Any] | None:
        """The summary of a run that came to its end; None before."""
        try:
            return read_json(self.summary, "")
        except UserError:
            return None
