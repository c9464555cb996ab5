"""Hold back what native libraries write to standard error,
such as the stack of an error that has its own message.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

STANDARD_ERROR = 2


class HeldBack:
    """What was written to standard error within a block of `hold_back`.

    Attributes:
        terminal: still writes to standard error within the block.
    """

    def __init__(self, terminal: TextIO) -> None:
        self.terminal = terminal
        self.is_dropped = False

    def drop(self) -> None:
        """Print none of it at the end of the block."""
        self.is_dropped = True


@contextmanager
def hold_back() -> Iterator[HeldBack]:
    """Print what the block writes to file descriptor 2 when it ends, unless the block drops it."""
    sys.stderr.flush()
    with (
        os.fdopen(os.dup(STANDARD_ERROR), "w") as terminal,
        tempfile.TemporaryFile() as written,
    ):
        held = HeldBack(terminal)
        os.dup2(written.fileno(), STANDARD_ERROR)
        try:
            yield held
        finally:
            sys.stderr.flush()
            os.dup2(terminal.fileno(), STANDARD_ERROR)
            if not held.is_dropped:
                written.seek(0)
                shutil.copyfileobj(written, terminal.buffer)
