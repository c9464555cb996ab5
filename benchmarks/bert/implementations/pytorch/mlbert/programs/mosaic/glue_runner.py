"""Runs jobs as processes, side by side on the devices; tells a display what becomes of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any

from mlbert.programs.glue_jobs import FIRST, Job

POLL_SECONDS = 0.2
END_SECONDS = 20.0  # for a child to leave when it is told to
LOG = "output.log"


class State(Enum):
    """What has become of a job."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    BLOCKED = "not started"


@dataclass(frozen=True)
class Slot:
    """Where one job runs at a time: what its process finds in its environment, and the cores that it may use."""

    name: str
    exports: Mapping[str, str]
    cores: frozenset[int]


@dataclass
class Running:
    """A job's process."""

    job: Job
    slot: Slot
    process: subprocess.Popen[bytes]
    started: float


def make_slots(num_gpus: int, visible: str | None, cores: Sequence[int], most: int) -> list[Slot]:
    """A slot for each GPU; without one, for each core.

    Args:
        num_gpus: that this process sees.
        visible: its CUDA_VISIBLE_DEVICES.
        cores: that it may use; shared out.
        most: slots.
    """
    names = [name.strip() for name in visible.split(",")] if visible else [str(i) for i in range(num_gpus)]
    count = max(1, min(most, num_gpus or len(cores)))
    slots = []
    for index in range(count):
        share = list(cores[index::count]) or list(cores)
        environ = {"OMP_NUM_THREADS": str(len(share)), "TOKENIZERS_PARALLELISM": "false"}
        environ["CUDA_VISIBLE_DEVICES"] = names[index] if num_gpus else ""
        place = f"GPU {names[index]}" if num_gpus else f"CPU {index}"
        slots.append(Slot(place, environ, frozenset(share)))
    return slots


class Runner:
    """The jobs' processes.

    Args:
        jobs: in the order in which they are to begin.
        done: those that need not run.
        slots: where they run.
        prepare: writes what a job needs, and returns its command; called when it begins.
        folder: of a job.
        environ: of this process.
        tell: is called with a job whenever its state changes, and with None while time passes.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        done: Sequence[Job],
        slots: Sequence[Slot],
        prepare: Callable[[Job], list[str]],
        folder: Callable[[Job], Path],
        environ: Mapping[str, str],
        tell: Callable[[Job | None], object],
    ) -> None:
        self.states = {job: State.DONE if job in done else State.WAITING for job in jobs}
        self.seconds: dict[Job, float] = {}
        self.running: list[Running] = []
        self._free = list(slots)
        self._prepare, self._folder, self._environ, self._tell = prepare, folder, environ, tell
        self._first = next((job for job in jobs if job.task == FIRST), None)

    def run(self) -> None:
        """Returns when every job is done, has failed or cannot begin. Whatever ends this early ends the processes."""
        with _end_on_termination():
            try:
                while self._step():
                    time.sleep(POLL_SECONDS)
            finally:
                self._end_all()

    def last_line(self, job: Job) -> str:
        """Of the job's log: what it died of."""
        try:
            text = (self._folder(job) / LOG).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "no log"
        return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "an empty log")

    def _step(self) -> bool:
        """Collects what has ended, begins what can; False when nothing is left to do."""
        for one in [one for one in self.running if one.process.poll() is not None]:
            self._collect(one)
        for job in [job for job, state in self.states.items() if state is State.WAITING]:
            if job.waits and self._first and self.states[self._first] in (State.FAILED, State.BLOCKED):
                self._set(job, State.BLOCKED)
            elif self._free and not (job.waits and self._first and self.states[self._first] is not State.DONE):
                self._begin(job)
        self._tell(None)
        return bool(self.running) or State.WAITING in self.states.values()

    def _begin(self, job: Job) -> None:
        slot, command, folder = self._free.pop(0), self._prepare(job), self._folder(job)
        with (folder / LOG).open("wb") as log:
            # A session of its own: a Ctrl-C of the terminal comes to this process alone, which passes it on in order.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._environ, **slot.exports},
                start_new_session=True,
            )
        self.running.append(Running(job, slot, process, time.monotonic()))
        with contextlib.suppress(OSError):  # it has ended already
            os.sched_setaffinity(process.pid, slot.cores)
        self._set(job, State.RUNNING)

    def _collect(self, one: Running) -> None:
        self.running.remove(one)
        self._free.append(one.slot)
        self.seconds[one.job] = time.monotonic() - one.started
        self._set(one.job, State.FAILED if one.process.returncode else State.DONE)

    def _set(self, job: Job, state: State) -> None:
        self.states[job] = state
        self._tell(job)

    def _end_all(self) -> None:
        for one in self.running:
            _signal(one.process, signal.SIGTERM)
        deadline = time.monotonic() + END_SECONDS
        for one in self.running:
            try:
                one.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal(one.process, signal.SIGKILL)
                one.process.wait()


def _signal(process: subprocess.Popen[Any], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextlib.contextmanager
def _end_on_termination() -> Iterator[None]:
    """Within it SIGTERM ends the process as SystemExit, so that its children are ended."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
