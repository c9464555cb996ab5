"""How a run ends: who detects it, who writes the last line of its log,
and the exit status of each process.

cause                     | noticed by              | last line                | rank 0   | others
--------------------------|-------------------------|--------------------------|----------|---------
target reached            | the loop, on all ranks  | success                  | 0        | 0
limit reached             | the loop, on all ranks  | aborted                  | 1        | 0
exception, one process    | `guard`                 | aborted: exception       | 1 or 2 * |
exception on rank 0       | `guard`, via the watch  | aborted: rank, exception | 1        | 3
exception on another rank | the same                | aborted: rank, exception | 3        | 3
`UserError` on any rank   | the same                | aborted: rank, message   | 2        | 2
SIGTERM, SIGINT, SIGHUP   | a thread of each rank,  | aborted: signal          | 128 + n  | the same
  to all ranks            | then its main thread    |                          |          | or 3
the same to another rank  | `guard`, via the watch  | aborted: rank, signal    | 3        | 3
SIGUSR1, checkpoint saved | the loop, in one step   | aborted: SIGUSR1         | 138      | 138
SIGUSR1 before that       | `guard`                 | none: not begun          | 138      | 138 or 3
a rank dies, stops, hangs | `HealthMonitor`, rank 0 | aborted: rank, how       | 3        | 3
the storage stalls        | after READ_TIMEOUT      | aborted: ranks that read | 3        | 3
rank 0 dies or stops      | `HealthMonitor`, others | aborted: rank 0, how     | lost     | 3

* 2 for a `UserError`, by the command line.

Rank 0 writes the last line. If it is lost, rank 1 or the first rank of another machine appends the
line to rank 0's file. The first line counts, and there is none before the run has begun
(run_start). If the main thread has not exited 20 s after a signal because it hangs in a collective,
the process ends with the signal's status. docs/how_a_run_ends.md explains this to operators, and
how the launchers handle each status.
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
from typing import Any, NoReturn

from mlbert.distributed.health import HANG_SECONDS, LOOK_SECONDS, READ_SECONDS, HealthMonitor
from mlbert.distributed.world import World
from mlbert.host.errors import UserError
from mlbert.host.exit_statuses import (
    ABORTED,
    BY_SIGNAL,
    LOST_RANK,
    WRONG_INPUT,
    Terminated,
)

# Time for the main thread to exit after a signal; less than Slurm's KillWait of 30.
UNWIND_SECONDS = 20.0
WARNING = signal.SIGUSR1
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Lifecycle:
    """Controls how the run ends on one rank; see the module's table.

        lifecycle = Lifecycle(world, close_log)
        with lifecycle.guard():
            ...                                  # set up
            lifecycle.accept_warnings()          # from here on there is something to save
            for each step:
                lifecycle.watch.mark(step, Stage.READ)
                anyone = ...                     # sum of lifecycle.warned over the ranks:
                                                 all leave in the same step
                if anyone: save a checkpoint; lifecycle.leave()
            lifecycle.finish(SUCCESS)

    Args:
        world: started.
        close_log: writes the last line of the run's log from status and reason (None for a finished
            run). Called on rank 0, or, if rank 0 is lost, on another rank for rank 0's file. May be
            called several times, from any thread: the first call counts, and calls before the run
            has begun do nothing.
        hang_seconds, read_seconds: see `mlbert.distributed.health`.

    Attributes:
        watch: receives the main thread's marks.
        warned: True once SIGUSR1 arrives after `accept_warnings`: the job is about to end.
    """

    def __init__(
        self,
        world: World,
        close_log: Callable[[str, str | None], object],
        hang_seconds: float = HANG_SECONDS,
        read_seconds: float = READ_SECONDS,
    ) -> None:
        self.world = world
        self.watch = HealthMonitor(
            world, self._report_loss, self._end_process, hang_seconds, read_seconds, _warn
        )
        self.warned = False
        self._accepts_warnings = False
        self._close_log = close_log

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Abort the run on every rank if an exception leaves the block, and re-raise it.

        A rank other than 0 exits with WRONG_INPUT after a `UserError` instead,
        because rank 0 reports it.

        All ranks enter together, each in its main thread. Inside, SIGTERM and SIGHUP raise
        `Terminated`, unless they are ignored (nohup) or already handled. SIGINT raises
        KeyboardInterrupt as usual. SIGUSR1 raises Terminated until `accept_warnings`.
        """
        # Order: signals are still handled while the watch ends, and the other ranks learn of an
        # exception before it is logged, because the watch may know its real cause and log that
        # instead.
        with self._signals():
            try:
                with self.watch.guard():
                    yield
            except BaseException as error:
                self._abort_on_rank_0(_reason(error))
                # Launchers send SIGTERM when the first rank exits;
                # the mistake that ends it still counts.
                cause = error.__context__ if isinstance(error, Terminated) else error
                if isinstance(cause, UserError) and (self.world.rank == 0 or not self.watch.joined):
                    cause.is_agreed = self.world.rank == 0
                    raise cause from None
                if isinstance(cause, UserError) or self.watch.is_mistake:
                    raise SystemExit(WRONG_INPUT) from error  # rank 0 reports it
                raise

    def accept_warnings(self) -> None:
        """Make SIGUSR1 set `warned` instead of ending the process."""
        self._accepts_warnings = True

    def leave(self) -> NoReturn:
        """End a warned run with SIGUSR1's status after its checkpoint is saved.

        Call on all ranks in the same step.
        """
        # All ranks exit on purpose, so none is reported as lost.
        self.watch.say_farewell()
        raise Terminated(WARNING)

    def finish(self, status: str) -> None:
        """Write the last line of a run that reached its target (SUCCESS) or a limit (ABORTED)."""
        if self.world.rank == 0:
            self._close_log(status, None)

    def _abort(self, reason: str) -> None:
        # A full disk must neither keep the process alive nor hide the reason.
        with contextlib.suppress(Exception):
            self._close_log(ABORTED, reason)

    def _abort_on_rank_0(self, reason: str) -> None:
        if self.world.rank == 0:
            self._abort(reason)

    # Called by the watching thread, since the main thread may hang in a collective forever

    def _report_loss(self, story: str, aloud: bool) -> None:
        """Report a lost rank."""
        if aloud:
            print(f"mlbert: error: {story}. The run is aborted on every rank.", file=sys.stderr)
        self._abort(story)

    def _end_process(self, is_mistake: bool) -> NoReturn:
        os._exit(WRONG_INPUT if is_mistake else LOST_RANK)

    # Signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Handle signals during a block.

        Python runs handlers in the main thread only, between two bytecode instructions, so never
        while it hangs in a collective. But the C-level handler writes the signal's number to a
        socket at once, and a thread waits on it. So the log line is written soon after the signal
        arrives, and the process ends even if the main thread hangs.
        """
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        left = threading.Event()
        replaced = self._install_handlers()

        def watch() -> None:
            while signum := int.from_bytes(receiver.recv(1)):  # 0: the sender is closed
                # Only the main thread handles a warning: if it hangs, there is nothing to save.
                if signum in replaced and signum != WARNING:
                    # Slurm sends it when a rank is lost.
                    # The watch, which looks this often, is to name that rank first.
                    left.wait(2 * LOOK_SECONDS * self.watch.joined)
                    self._abort_on_rank_0(signal.Signals(signum).name)
                    self.watch.take_signal()
                    if not left.wait(UNWIND_SECONDS):
                        os._exit(BY_SIGNAL + signum)

        watcher = threading.Thread(target=watch, name="signal-watch", daemon=True)
        previous_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        watcher.start()
        try:
            yield
        finally:
            # First, so that the thread stops waiting after an earlier signal
            # and does not exit the process.
            left.set()
            signal.set_wakeup_fd(previous_fd)
            for signum, handler in replaced.items():
                signal.signal(signum, handler)
            sender.close()  # ends the thread's recv
            watcher.join()
            receiver.close()

    def _install_handlers(self) -> dict[int, Any]:
        """Make the signals raise, and return the handlers to restore.

        Skip signals that are ignored or in use.
        """
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


def _warn(sentence: str) -> None:
    print(f"mlbert: warning: {sentence}.", file=sys.stderr, flush=True)


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise Terminated(signum)


def _reason(error: BaseException) -> str:
    if isinstance(error, Terminated):
        return str(error)
    return signal.SIGINT.name if isinstance(error, KeyboardInterrupt) else type(error).__name__
