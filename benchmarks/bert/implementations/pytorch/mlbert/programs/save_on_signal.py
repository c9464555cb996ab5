"""Let Ctrl-C or SIGTERM save a checkpoint and end the run that is inside the block."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from mlbert.host.exit_statuses import BY_SIGNAL, Terminated

_caught: list[int] = []


@contextmanager
def signals_save() -> Iterator[None]:
    """On Ctrl-C or SIGTERM let the run save a checkpoint and exit;
    a second signal ends it at once.
    """

    def request_save(signum: int, _: FrameType | None) -> None:
        signal.signal(signum, before[signal.Signals(signum)])
        if signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, signal.SIG_IGN):
            raise KeyboardInterrupt  # the run's handler is not installed
        _caught.append(signum)
        os.kill(os.getpid(), signal.SIGUSR1)

    _caught.clear()  # of an earlier run in this process
    before = {
        signum: signal.signal(signum, request_save) for signum in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def interrupted_status(end: Terminated) -> int:
    """Return the exit status for the signal that the user sent, which ``end`` may not name."""
    return BY_SIGNAL + (_caught[0] if _caught else end.signum)
