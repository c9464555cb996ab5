"""The command that runs a part of a call in its own process."""

from __future__ import annotations

import sys
from pathlib import Path


def command_of(call: int, work: Path, out: Path, first: Path, is_dry: bool) -> list[str]:
    """Return the command of a call's parts; append ``--part`` and the name of one."""
    words = [sys.executable, "-m", "gpu_check.main", "--call", str(call)]
    words += ["--out", str(out), "--work", str(work), "--first", str(first)]
    return [*words, "--dry-run"] if is_dry else words
