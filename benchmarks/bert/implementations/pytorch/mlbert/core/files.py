"""What every writer of files needs."""

from __future__ import annotations

import os
import re
from pathlib import Path

_USUAL_UMASK = 0o022


def fsync_path(path: Path) -> None:
    """Waits until a file that is written, or the names in a folder, are on disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def share_file(path: Path) -> None:
    """Gives a file the mode that a new one has under this process's umask; safetensors makes its own for the owner
    alone. Raises OSError."""
    try:
        # os.umask tells only by changing it, for every thread.
        found = re.search(r"^Umask:\s*(\d+)$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        found = None
    path.chmod(0o666 & ~(int(found[1], 8) if found else _USUAL_UMASK))
