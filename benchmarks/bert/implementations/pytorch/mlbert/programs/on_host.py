"""Run a program on one of several hosts for `mlbert.programs.over_ssh`, which sends on standard
input

    one line of JSON    what to run: an `Order`
    further lines       the number of a signal for the program

If standard input ends, the launcher or the connection is lost, and the program is ended: ``sshd``
itself leaves a program running then.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from mlbert.host.environment import environment
from mlbert.host.errors import UserError
from mlbert.host.exit_statuses import LOST_RANK, status_of_process

STARTED = "mlbert: started on this host"  # first line of standard output
# Until a program that was asked to end is killed; torchrun gives its ranks 30 s.
END_SECONDS = 40.0
_IDLE_SECONDS = 3.0  # without any rank
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Order:
    """What to run on a host.

    Attributes:
        folder: working directory.
        words: program and arguments.
        exports: variables to set.
    """

    folder: str
    words: Sequence[str]
    exports: Mapping[str, str]

    def as_line(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def of_line(cls, line: bytes) -> Self:
        """Return the order of `as_line`."""
        return cls(**json.loads(line))


def run_order() -> int:
    """Run what the launcher sends, and return the exit status.

    Raises UserError if this host does not have the folder.
    """
    # Unbuffered: the thread that waits for a line holds no lock when the process exits.
    with open(0, "rb", buffering=0, closefd=False) as orders:
        line = orders.readline()
        if not line:
            return LOST_RANK
        order = Order.of_line(line)
        print(STARTED, flush=True)
        if not Path(order.folder).is_dir():
            reason = f"is not a folder on {socket.gethostname()}"
            remedy = "Start from a folder that all hosts have under the same path"
            raise UserError("file.missing", order.folder, reason, remedy)
        program = _Program(order)
        threading.Thread(target=_obey, args=(orders, program), daemon=True).start()
        return program.wait()


def _obey(orders: io.RawIOBase, program: _Program) -> None:
    """Send the program the signals of the launcher, and end it if the launcher is gone."""
    for line in orders:
        program.send_signal(int(line))
    program.send_signal(signal.SIGTERM)


class _Program:
    """The launcher of this host's ranks.

    Signals that would end this process end the program.
    """

    def __init__(self, order: Order) -> None:
        self._process = subprocess.Popen(
            list(order.words),
            cwd=order.folder,
            env={**environment(), **order.exports},
            stdin=subprocess.DEVNULL,
        )
        self._is_ending = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._take_signal)

    def wait(self) -> int:
        """Return the exit status once the program has ended."""
        return status_of_process(self._process.wait())

    def send_signal(self, number: int) -> None:
        """Send a signal that ends the program. SIGKILL ends all that it started, too."""
        if number == signal.SIGKILL:
            self._kill()
            return
        self._process.send_signal(number)
        if not self._is_ending:
            self._is_ending = True
            threading.Thread(target=self._see_end, daemon=True).start()

    def _take_signal(self, number: int, _: FrameType | None) -> None:
        self.send_signal(number)

    def _see_end(self) -> None:
        """Kill the program if it takes too long to end, or if its ranks have ended and it has not:
        torchrun then waits for other hosts and does not react to signals.
        """
        deadline = time.monotonic() + END_SECONDS
        idle_since = None
        while self._process.poll() is None:
            now = time.monotonic()
            if len(_family(self._process.pid)) > 1:
                idle_since = None
            elif idle_since is None:
                idle_since = now
            if now > deadline or (idle_since is not None and now > idle_since + _IDLE_SECONDS):
                self._kill()
                return
            time.sleep(_LOOK_SECONDS)

    def _kill(self) -> None:
        for pid in _family(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _family(pid: int) -> list[int]:
    """Return a process and all that it started and that have not ended, directly or not."""
    found = [pid]
    for member in found:
        with contextlib.suppress(OSError):  # it has ended
            for task in os.listdir(f"/proc/{member}/task"):
                children = Path(f"/proc/{member}/task/{task}/children").read_text()
                found += map(int, children.split())
    return found
