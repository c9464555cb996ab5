"""How a run ends: who notices, who writes the last line of its log, and with which status a process leaves.

| cause                       | noticed by                     | last line: status, reason   | rank 0    | others   |
|-----------------------------|--------------------------------|-----------------------------|-----------|----------|
| target reached              | the loop, on all ranks         | success                     | 0         | 0        |
| limit reached               | the loop, on all ranks         | aborted                     | 1         | 0        |
| exception, one process      | `guard`                        | aborted, its name           | 1 or 2 *  |          |
| exception on rank 0         | `guard`, which tells the watch | aborted, rank and exception | 1 or 2 *  | 3        |
| exception on another rank   | the same                       | aborted, rank and exception | 3         | 3        |
| SIGTERM, SIGINT, SIGHUP     | a thread of each rank that     | aborted, the signal         | 128 + n   | the same |
|   to all ranks              | gets it; the main thread       |                             |           | or 3     |
| the same to another rank    | `guard`, which tells the watch | aborted, rank and signal    | 3         | 3        |
| SIGUSR1, a checkpoint saved | the loop, all in the same step | aborted, SIGUSR1            | 138       | 138      |
| SIGUSR1 before that         | `guard`                        | none: nothing has begun     | 138       | 138 or 3 |
| a rank dies, stops, hangs   | `dist.watch` on rank 0         | aborted, rank and how       | 3         | 3        |
| rank 0 dies or stops        | `dist.watch` on the others     | aborted, rank 0 and how     | lost      | 3        |

* 2 for a `UserError`, by the command line.

Rank 0 writes the last line; where it is lost, rank 1 or the first rank of another machine does, on the file that it has
left. Whichever comes first counts, and none does where the run has not begun (no run_start). A main thread that has not
left 20 s after a signal, because it hangs in a collective, is ended with the signal's status. docs/how_a_run_ends.md
says the same to operators, and what the launchers make of each status.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from mlbert.distributed.health import HANG_SECONDS, HealthMonitor
from mlbert.host.errors import UserError

if TYPE_CHECKING:  # the command line needs the constants, and no torch
    from mlbert.distributed.world import World

# Status of a run, in MLPerf's words.
SUCCESS, ABORTED = "success", "aborted"

# Exit statuses. Python's own for an exception is FAILED.
SUCCEEDED = 0
FAILED = 1
WRONG_INPUT = 2
LOST_RANK = 3
BY_SIGNAL = 128  # plus the signal's number, as shells count
INTERRUPTED = BY_SIGNAL + signal.SIGINT

UNWIND_SECONDS = 20.0  # for the main thread to leave after a signal; less than Slurm's KillWait of 30
WARNING = signal.SIGUSR1
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Terminated(SystemExit):
    """A signal asked the process to end; exits with 128 + the signal's number."""

    def __init__(self, signum: int) -> None:
        super().__init__(BY_SIGNAL + signum)
        self.signum = signum

    def __str__(self) -> str:
        return signal.Signals(self.signum).name


def exit_status(status: str, rank: int) -> int:
    """Status of a process whose run has come to its end, SUCCESS or ABORTED by a limit.

    Rank 0 still writes the results when the others leave; a launcher that ends all at the first failure must not take
    a missed target for one, so rank 0 alone tells it.
    """
    return SUCCEEDED if status == SUCCESS or rank else FAILED


class Lifecycle:
    """One rank's part of how the run ends; see the module's table.

        lifecycle = Lifecycle(world, close_log)
        with lifecycle.guard():
            ...                                  # set up
            lifecycle.accept_warnings()          # there is something to save from here on
            for each step:
                lifecycle.watch.mark(step, Stage.READ)
                anyone = ...                     # sum of lifecycle.warned over the ranks, so that all leave in one step
                if anyone: save a checkpoint; lifecycle.leave()
            lifecycle.finish(SUCCESS)

    Args:
        world: started.
        close_log: writes the last line of the run's log: status and reason, None at the end of a finished run. Called
            on rank 0, and on another rank only where rank 0 is lost: then on the file that it has left. May be
            called several times, from any thread: the first call counts, and none before the run has begun.
        hang_seconds: see `mlbert.distributed.health`.

    Attributes:
        watch: takes the marks of the main thread.
        warned: SIGUSR1 came after `accept_warnings`: the job is about to end.
    """

    def __init__(
        self, world: World, close_log: Callable[[str, str | None], object], hang_seconds: float = HANG_SECONDS
    ) -> None:
        self.world = world
        self.watch = HealthMonitor(world, self._tell, self._end_process, hang_seconds)
        self.warned = False
        self._accepts_warnings = False
        self._close_log = close_log

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Whatever leaves the block before `finish` ends the run as aborted, on every rank; exceptions are passed on,
        but for a `UserError` of a rank other than 0, which rank 0 tells: that rank exits with LOST_RANK.

        All ranks enter together, each in its main thread. Within, SIGTERM and SIGHUP raise `Terminated`, unless they
        are ignored (nohup) or handled already; SIGINT raises KeyboardInterrupt as usual; SIGUSR1 raises Terminated
        until `accept_warnings`.
        """
        # From the outside in: a signal is taken while the watch ends, and the other ranks learn of an exception before
        # it is written down, for the watch may know better what it is the consequence of, and writes that.
        with self._signals():
            try:
                with self.watch.guard():
                    yield
            except BaseException as error:
                self._abort_on_rank_0(_reason(error))
                if self.world.rank != 0 and self.watch.joined and isinstance(error, UserError):
                    raise SystemExit(LOST_RANK) from error  # rank 0 has told it
                raise

    def accept_warnings(self) -> None:
        """From now on SIGUSR1 sets `warned` and does nothing else."""
        self._accepts_warnings = True

    def leave(self) -> NoReturn:
        """Ends a warned run, whose checkpoint is written, as SIGUSR1; called on all ranks in the same step."""
        # No rank's end is a failure of it, so none is told.
        self.watch.say_farewell()
        raise Terminated(WARNING)

    def finish(self, status: str) -> None:
        """Writes the last line of a run that has reached its target (SUCCESS) or a limit (ABORTED)."""
        if self.world.rank == 0:
            self._close_log(status, None)

    def _abort(self, reason: str) -> None:
        # A full disk must not keep the process alive, nor take the place of the reason.
        with contextlib.suppress(Exception):
            self._close_log(ABORTED, reason)

    def _abort_on_rank_0(self, reason: str) -> None:
        if self.world.rank == 0:
            self._abort(reason)

    # The watch's thread: the main thread may hang in a collective for ever

    def _tell(self, story: str, aloud: bool) -> None:
        """A rank is lost, and this one tells it."""
        if aloud:
            print(f"mlbert: error: {story}. The run is aborted on every rank.", file=sys.stderr, flush=True)
        self._abort(story)

    def _end_process(self) -> NoReturn:
        os._exit(LOST_RANK)

    # Signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Takes the signals for a block.

        Python runs handlers in the main thread only, between two of its own instructions: never, while that hangs in a
        collective. The C part of a signal's arrival writes its number to a socket at once, on which a thread waits. So
        the line is written the moment the signal comes, and the process ends even then.
        """
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        left = threading.Event()
        replaced = self._install_handlers()

        def watch() -> None:
            while data := receiver.recv(1):
                # A warning is the main thread's alone: who hangs has nothing to save.
                if data[0] in replaced and data[0] != WARNING:
                    self.watch.take_signal()
                    self._abort_on_rank_0(signal.Signals(data[0]).name)
                    if not left.wait(UNWIND_SECONDS):
                        os._exit(BY_SIGNAL + data[0])

        watcher = threading.Thread(target=watch, name="signal-watch", daemon=True)
        previous_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        watcher.start()
        try:
            yield
        finally:
            # First, so that the thread's patience with a signal that came before ends in peace.
            left.set()
            signal.set_wakeup_fd(previous_fd)
            for signum, handler in replaced.items():
                signal.signal(signum, handler)
            sender.close()  # ends the thread's recv
            watcher.join()
            receiver.close()

    def _install_handlers(self) -> dict[int, Any]:
        """Makes the signals raise; returns the handlers to restore. Ignored or otherwise used ones are left."""
        replaced: dict[int, Any] = {WARNING: signal.signal(WARNING, self._on_warning)}
        for signum in _ENDING_SIGNALS:
            current = signal.getsignal(signum)
            if current is signal.SIG_DFL:
                replaced[signum] = signal.signal(signum, _terminate)
            elif signum == signal.SIGINT and current is signal.default_int_handler:
                replaced[signum] = current
        return replaced

    def _on_warning(self, signum: int, frame: FrameType | None) -> None:
        if not self._accepts_warnings:
            raise Terminated(signum)
        self.warned = True


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise Terminated(signum)


def _reason(error: BaseException) -> str:
    if isinstance(error, Terminated):
        return str(error)
    return signal.SIGINT.name if isinstance(error, KeyboardInterrupt) else type(error).__name__
