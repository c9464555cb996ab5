"""End a run's process so that every log gets its last line, even after an exception or a signal.

The exit statuses are those of docs/how_a_run_ends.md: 1 for a missed target, 2 for wrong input, 128 + n for signal n,
138 after SIGUSR1 (the job is about to end; a checkpoint has been saved). If a worker is lost, TensorFlow raises an
error on the others.
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
    """Whether SIGUSR1 was received."""

    def __init__(self) -> None:
        self.is_set = False

    def leave(self) -> None:
        """End the process after a checkpoint was saved."""
        raise _Left(signal.SIGUSR1)


class _Left(SystemExit):
    def __init__(self, number: int) -> None:
        super().__init__(BY_SIGNAL + number)
        self.number = number

    def __str__(self) -> str:
        return signal.Signals(self.number).name


@contextmanager
def guard(log: MLPerfLogger) -> Iterator[Warned]:
    """Close the log as aborted if the block raises or a signal ends the process.

    A signal ends the process at once because the main thread may be in a loop of steps for minutes.
    """
    warned = Warned()
    received, notice = os.pipe()
    os.set_blocking(notice, False)

    def note(number: int, frame: FrameType | None) -> None:
        warned.is_set |= number == signal.SIGUSR1

    def listen() -> None:  # a thread, because Python's handlers wait for the main thread
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
