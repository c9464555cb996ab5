"""Run a program on each of several hosts over ssh, and end all when one fails.

Each ssh starts `mlbert.programs.on_host`, which receives the program on its standard input. So no
shell reads its arguments, and no list of processes shows its variables.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import IO

from mlbert.host.errors import UserError
from mlbert.host.exit_statuses import (
    BY_SIGNAL,
    LOST_RANK,
    SUCCEEDED,
    WRONG_INPUT,
    status_of_process,
)
from mlbert.programs.on_host import END_SECONDS, STARTED, Order

# Several could not ask for a password at once. A host that vanishes is noticed within a minute.
SSH = (
    "ssh",
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=30",
    "-o",
    "ServerAliveInterval=15",
    "-o",
    "ServerAliveCountMax=4",
)
# Variables that the hosts get besides the user's `--export`.
CARRIED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "CPU_THREADS")
CARRIED_PREFIXES = ("CUDA_", "GLOO_", "HF_", "NCCL_", "OMP_", "TORCH_")
_BROKEN = 255  # ssh's own status
_PATIENCE = END_SECONDS + 15.0  # seconds, until a host counts as lost that should have ended
_LATE_SECONDS = 5.0  # for output after the end, by what a program left behind
_ONE_LINE = threading.Lock()  # held while a line is printed
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def carried(environ: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the variables of this process that the hosts get, with those that the user names.

    Raises UserError if one of these is not set.
    """
    for name in names:
        if name not in environ:
            raise UserError("config.missing", f"--export {name}", "is not set", "Export it first")
    known = {*CARRIED, *names}
    return {
        name: value
        for name, value in environ.items()
        if name in known or name.startswith(CARRIED_PREFIXES)
    }


class _Host:
    """A host's program, seen through its ssh.

    Attributes:
        name: of the host.
        is_reached: the host has received its order.
    """

    def __init__(
        self, name: str, order: Order, ended: queue.SimpleQueue[tuple[_Host, int]]
    ) -> None:
        self.name = name
        self.is_reached = False
        try:
            self._ssh = subprocess.Popen(
                [*SSH, name, _remote_line(order.exports)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # Ctrl-C in the terminal must not end the connection, which passes it on.
                start_new_session=True,
            )
        except FileNotFoundError:
            remedy = "Install OpenSSH's client"
            raise UserError("program.missing", "ssh", "is not installed here", remedy) from None
        self._write(order.as_line())
        threading.Thread(target=self._watch, args=(ended,), daemon=True).start()

    def send_signal(self, number: int) -> None:
        """Send the program a signal, if it has not ended."""
        self._write(f"{int(number)}\n")

    def close(self) -> None:
        """End the connection, after which the host ends what still runs."""
        with contextlib.suppress(OSError):
            assert self._ssh.stdin is not None
            self._ssh.stdin.close()
        self._ssh.terminate()

    def _write(self, line: str) -> None:
        assert self._ssh.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self._ssh.stdin.write(line.encode())
            self._ssh.stdin.flush()

    def _watch(self, ended: queue.SimpleQueue[tuple[_Host, int]]) -> None:
        assert self._ssh.stdout is not None
        assert self._ssh.stderr is not None
        threads = [
            threading.Thread(target=self._show, args=pair, daemon=True)
            for pair in ((self._ssh.stdout, sys.stdout), (self._ssh.stderr, sys.stderr))
        ]
        for thread in threads:
            thread.start()
        status = self._ssh.wait()
        for thread in threads:
            thread.join(_LATE_SECONDS)
        ended.put((self, status_of_process(status)))

    def _show(self, given: IO[bytes], to: IO[str]) -> None:
        """Print each line of the host behind its name."""
        for line in given:
            text = line.decode(errors="replace").rstrip("\n")
            if text == STARTED:
                self.is_reached = True
                continue
            with _ONE_LINE, contextlib.suppress(OSError):  # the reader has ended
                to.write(f"{self.name}: {text}\n")
                to.flush()


def _remote_line(exports: Mapping[str, str]) -> str:
    """Return the line for the host's shell, which starts this Python there."""
    words = [sys.executable, "-m", "mlbert", "launch", "on-host"]
    if "PYTHONPATH" in exports:  # else this package might not be found
        words = ["env", f"PYTHONPATH={exports['PYTHONPATH']}", *words]
    return f"exec {shlex.join(words)}"


class HostRun:
    """A program on each of several hosts.

    Signals that would end this process are passed on to all; the second one kills all.

    Args:
        names: of the hosts.
        words: program and arguments for each.
        exports: variables for all.
    """

    def __init__(
        self, names: Sequence[str], words: Sequence[Sequence[str]], exports: Mapping[str, str]
    ) -> None:
        self._orders = {
            name: Order(os.getcwd(), of_host, exports)
            for name, of_host in zip(names, words, strict=True)
        }
        self._hosts: list[_Host] = []
        self._ended: queue.SimpleQueue[tuple[_Host, int]] = queue.SimpleQueue()
        self._signal: int | None = None

    def run(self) -> int:
        """Return the status of the host that failed first, once all have ended.

        Raises UserError if ssh is missing, or if a host could not start its program.
        """
        with self._signals():
            try:
                for name, order in self._orders.items():
                    if self._signal is None:
                        self._hosts.append(_Host(name, order, self._ended))
                status = self._wait()
            finally:
                for host in self._hosts:
                    host.close()
        if self._signal is not None and status != SUCCEEDED:
            return BY_SIGNAL + self._signal
        return status

    def _wait(self) -> int:
        """Return the first status that is not 0; end the other hosts after it."""
        running = list(self._hosts)
        failed: tuple[_Host, int] | None = None
        deadline: float | None = None
        while running:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                host, status = self._ended.get(timeout=left)
            except queue.Empty:
                names = ", ".join(one.name for one in running)
                _say(f"{names} did not end within {_PATIENCE:.0f} s, and may still run")
                break
            running.remove(host)
            if status == SUCCEEDED or failed is not None:
                continue
            failed = (host, status)
            if self._signal is None:
                self._report(host, status, bool(running))
                deadline = time.monotonic() + _PATIENCE
                for other in running:
                    other.send_signal(signal.SIGTERM)
        if failed is None:
            return SUCCEEDED
        host, status = failed
        if not host.is_reached and self._signal is None:
            reason = f"could not start this program there (status {status})"
            remedy = (
                "It must connect without a password, and find the same Python and packages: "
                f"ssh {host.name} {sys.executable} -m mlbert --version"
            )
            raise UserError("program.failed", f"ssh {host.name}", reason, remedy)
        return LOST_RANK if status == _BROKEN else status

    def _report(self, host: _Host, status: int, has_others: bool) -> None:
        """Name the host that failed, unless its own message says all, or an error follows."""
        if status == WRONG_INPUT or not host.is_reached:
            return
        how = f"failed first, with status {status}"
        if status == _BROKEN:
            how = "is lost: ssh's connection broke"
        end = ". The other hosts are ended" if has_others else ""
        _say(f"{host.name} {how}{end}")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass signals on during a block, except those that are ignored."""
        before = {number: signal.getsignal(number) for number in _FORWARDED}
        chosen = [number for number, known in before.items() if known is not signal.SIG_IGN]
        for number in chosen:
            signal.signal(number, self._forward)
        try:
            yield
        finally:
            for number in chosen:
                signal.signal(number, before[number])

    def _forward(self, number: int, _: FrameType | None) -> None:
        sent = number if self._signal is None else signal.SIGKILL
        self._signal = self._signal or number
        for host in self._hosts:
            host.send_signal(sent)


def _say(sentence: str) -> None:
    print(f"mlbert: error: {sentence}.", file=sys.stderr, flush=True)
