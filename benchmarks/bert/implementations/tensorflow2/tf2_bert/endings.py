"""End a run's process so that every log gets its last line, even after an exception or a signal.

The exit statuses are those of docs/how_a_run_ends.md: 1 for a missed target, 2 for wrong input, 128
+ n for signal n, 138 after SIGUSR1 (the job is about to end; a checkpoint has been saved), 3 after
the loss of another worker, which TensorFlow's error names. If that is the chief, the others close
its log.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from mlbert.host.errors import UserError
from mlbert.host.exit_statuses import BY_SIGNAL, LOST_RANK, Terminated
from mlbert.host.provenance import tree_root
from mlbert.mlperf.mllog import MLPerfLogger, close_interrupted, constants

if TYPE_CHECKING:
    from tf2_bert.workers import Workers

_TASK = re.compile(r"/job:worker/(?:replica:\d+/)?task:(\d+)")
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Warned:
    """Whether SIGUSR1 was received."""

    def __init__(self) -> None:
        self.is_set = False

    def leave(self) -> None:
        """End the process after a checkpoint was saved."""
        raise Terminated(signal.SIGUSR1)


def lost_worker(error: BaseException, workers: Workers) -> str | None:
    """Return a sentence that names the worker whose loss this error of TensorFlow reports,
    or None.
    """
    text = str(error)
    if type(error).__name__ != "UnavailableError" and "Collective ops is aborted" not in text:
        return None
    others = [
        task
        for task in map(int, _TASK.findall(text))
        if task != workers.task and task < workers.count
    ]
    return (
        f"rank {others[0]} on {workers.hosts[others[0]]} died, hangs or is cut off"
        if others
        else None
    )


@contextmanager
def guard(log: MLPerfLogger, workers: Workers, path: Path) -> Iterator[Warned]:
    """Close the log as aborted if the block raises or a signal ends the process.

    ``path`` is the chief's log.

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
        reason = words if isinstance(error, Terminated) else f"{type(error).__name__}: {words}"
        lost = lost_worker(error, workers)
        log.run_stop(constants.ABORTED, {"reason": lost or reason})
        if lost is None:
            raise
        if lost.startswith("rank 0 ") and path.exists():
            with suppress(UserError):
                close_interrupted(path, tree_root(), lost)
        print(f"mlbert: error: {lost}. The run is aborted on every rank.", file=sys.stderr)
        raise SystemExit(LOST_RANK) from None
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(notice)  # ends the listener
        log.close()
