"""How a process of a run ends: every log that has begun gets its last line, also after an exception or a signal.

The statuses are those of docs/how_a_run_ends.md: 1 for a missed target, 2 for wrong input, 128 + n for a signal n,
138 after SIGUSR1 (the job is about to end; a checkpoint was saved before). A worker that is lost makes TensorFlow raise
on the others.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from mlbert.core.mllog import MLPerfLogger, constants

BY_SIGNAL = 128
UNWIND_SECONDS = 20.0  # for a loop of steps to return after a signal; less than Slurm's KillWait of 30
WARNING = signal.SIGUSR1
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Terminated(SystemExit):
    """A signal asked the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(BY_SIGNAL + number)
        self.number = number

    def __str__(self) -> str:
        return signal.Signals(self.number).name


class Warned:
    """Whether SIGUSR1 has come."""

    def __init__(self) -> None:
        self.is_set = False

    def leave(self) -> None:
        """Ends the process behind a checkpoint."""
        raise Terminated(WARNING)


@contextmanager
def guard(log: MLPerfLogger) -> Iterator[Warned]:
    """Within it a signal that ends the process closes the log at once, as aborted, and the process leaves when
    TensorFlow's loop of steps returns, or after `UNWIND_SECONDS`; an exception closes it, too, with its name."""
    warned = Warned()
    received, notice = os.pipe()
    os.set_blocking(notice, False)

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    def warn(number: int, frame: FrameType | None) -> None:
        warned.is_set = True

    def listen() -> None:  # the handlers wait for the main thread, which may be in a loop of steps
        while number := next(iter(os.read(received, 1)), 0):
            if number in _ENDING:
                log.run_stop(constants.ABORTED, {"reason": str(Terminated(number))})
                time.sleep(UNWIND_SECONDS)
                os._exit(BY_SIGNAL + number)

    handlers = {**dict.fromkeys(_ENDING, end), WARNING: warn}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    wakeup = signal.set_wakeup_fd(notice, warn_on_full_buffer=False)
    threading.Thread(target=listen, daemon=True).start()
    try:
        yield warned
    except BaseException as error:
        words = str(error).splitlines()[0][:300] if str(error) else ""
        reason = words if isinstance(error, Terminated) else f"{type(error).__name__}: {words}"
        log.run_stop(constants.ABORTED, {"reason": reason})
        raise
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(notice)  # ends the listener
        log.close()
