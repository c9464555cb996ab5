"""Lock a run's folder against other processes that would train there."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from mlbert.host.files import writing

LOCK = ".lock"  # held by the process that trains


def lock_folder(folder: Path, remedy: str) -> int | None:
    """Lock a folder until the descriptor that this returns is closed; return None if another
    process has it.

    Raises UserError, with the remedy, if the folder cannot be written.
    """
    with writing(folder, remedy):
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
