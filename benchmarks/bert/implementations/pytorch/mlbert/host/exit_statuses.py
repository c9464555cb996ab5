"""How a process ends: exit statuses, the status of a run,
and ending early while another rank reports a mistake.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import NoReturn

# Status of a run, in MLPerf's words.
SUCCESS = "success"
ABORTED = "aborted"

# Exit statuses. FAILED is also Python's status for an exception.
SUCCEEDED = 0
FAILED = 1
WRONG_INPUT = 2
LOST_RANK = 3
BY_SIGNAL = 128  # plus the signal's number, as shells count
INTERRUPTED = BY_SIGNAL + signal.SIGINT


class Terminated(SystemExit):
    """A signal asked the process to end; exits with 128 + the signal's number."""

    def __init__(self, signum: int) -> None:
        super().__init__(BY_SIGNAL + signum)
        self.signum = signum

    def __str__(self) -> str:
        return signal.Signals(self.signum).name


def status_of_process(returncode: int) -> int:
    """Return the exit status for subprocess's return code, which is -n after signal n."""
    return returncode if returncode >= 0 else BY_SIGNAL - returncode


def exit_status(status: str, rank: int) -> int:
    """Return the exit status of a process after its run ended,
    with SUCCESS or with ABORTED by a limit.

    Rank 0 still writes the results when the others exit. Launchers that end all ranks at the first
    failure must not treat a missed target as one, so only rank 0 returns it.
    """
    return SUCCEEDED if status == SUCCESS or rank else FAILED


def leave_report(seconds: float, status: int = WRONG_INPUT) -> NoReturn:
    """End this process quietly with ``status`` after ``seconds``,
    in which another rank reports the mistake.
    """
    with quiet_on_signal(status):
        time.sleep(seconds)
        raise SystemExit(status)


@contextlib.contextmanager
def quiet_on_signal(status: int = WRONG_INPUT) -> Iterator[None]:
    """Let SIGTERM end this process with ``status`` within the block.

    Launchers send it to all ranks once one of them has reported a mistake and exited.
    Then it is the status of all.
    """
    previous = signal.signal(signal.SIGTERM, lambda *_: os._exit(status))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
