"""Get the files of GLUE's tasks that are missing: download them, or make stand-ins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlbert.data.prepare import glue_download, glue_stand_ins
from mlbert.data.prepare.glue_files import is_complete

# How missing files are made.
HUB = "datasets"
STAND_INS = "python"
SOURCES = (HUB, STAND_INS)


def complete(folder: Path, source: str, tasks: Sequence[str]) -> None:
    """Download or make the tasks' files if some are missing; ``source`` is one of `SOURCES`."""
    if is_complete(folder, tasks):
        return
    if source == STAND_INS:
        glue_stand_ins.make(folder)
    else:
        glue_download.fetch(folder, tasks)
