"""How a process of a run ends: every log that has begun gets its last line, also after an exception or a signal.

The statuses are those of docs/how_a_run_ends.md: 1 for a missed target, 2 for wrong input, 128 + n for a signal n,
138 after SIGUSR1 (the job is about to end; a checkpoint was saved before). A worker that is lost makes TensorFlow raise
on the others.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from mlbert.mlperf.mllog import MLPerfLogger, constants

BY_SIGNAL = 128
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Warned:
    """Whether SIGUSR1 has come."""

    def __init__(self) -> None:
        self.is_set = False

    def leave(self) -> None:
        """Ends the process behind a checkpoint."""
        raise _Left(signal.SIGUSR1)


class _Left(SystemExit):
    def __init__(self, number: int) -> None:
        super().__init__(BY_SIGNAL + number)
        self.number = number

    def __str__(self) -> str:
        return signal.Signals(self.number).name


@contextmanager
def guard(log: MLPerfLogger) -> Iterator[Warned]:
    """Within it a signal that ends the process closes the log as aborted, and the process is gone at once: the main
    thread may be in a loop of steps for minutes. An exception closes the log, too, with its name."""
    warned = Warned()
    received, notice = os.pipe()
    os.set_blocking(notice, False)

    def note(number: int, frame: FrameType | None) -> None:
        warned.is_set |= number == signal.SIGUSR1

    def listen() -> None:  # Python's handlers wait for the main thread
        while number := next(iter(os.read(received, 1)), 0):
            if number in _ENDING:
                name = signal.Signals(number).name
                log.run_stop(constants.ABORTED, {"reason": name})
                print(f"mlbert: error: {name}", file=sys.stderr, flush=True)
                sys.stdout.flush()
                os._exit(BY_SIGNAL + number)

    before = {number: signal.signal(number, note) for number in (*_ENDING, signal.SIGUSR1)}
    wakeup = signal.set_wakeup_fd(notice, warn_on_full_buffer=False)
    threading.Thread(target=listen, daemon=True).start()
    try:
        yield warned
    except BaseException as error:
        words = str(error).splitlines()[0][:300] if str(error) else ""
        reason = words if isinstance(error, _Left) else f"{type(error).__name__}: {words}"
        log.run_stop(constants.ABORTED, {"reason": reason})
        raise
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(notice)  # ends the listener
        log.close()
