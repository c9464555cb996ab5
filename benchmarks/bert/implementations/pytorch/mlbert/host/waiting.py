"""Let OpenMP's threads sleep while they wait for each other, if other programs use the cores.

A thread that spins answers fastest. But if there are more busy threads than cores, it takes the
core that the thread it waits for needs, and a step takes many times as long. On an idle machine,
sleeping costs more: waking up a thread takes longer than an op of a small model. So threads spin
until one of them often waits for a core, and again when none does (``csrc/cpu/waiting.c``).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlbert.host import native
from mlbert.host.environment import environment

LOOK_SECONDS = 0.2  # between two looks
BUSY = 0.1  # share of the time for which a thread waits for a core, from which on threads sleep
IDLE = 0.03  # share from which on they spin again
CALM_LOOKS = 10  # with less than `IDLE` in a row
# The user's choices of how long to spin.
CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_TASKS = Path("/proc/self/task")
_SIGNATURES = {"waiting_shorten": "i:i", "waiting_restore": ":v"}


class CoreWaits:
    """How long this process's threads wait for a core, from the system's statistics of them."""

    def __init__(self) -> None:
        self._before = _delays()
        self._looked = time.monotonic()

    def share(self) -> float:
        """Return the share of the time since the last call for which the thread that waited most
        was ready to run, but had no core.
        """
        delays = _delays()
        now = time.monotonic()
        waited = [delays[task] - self._before[task] for task in delays.keys() & self._before.keys()]
        seconds = now - self._looked
        self._before = delays
        self._looked = now
        return max(waited, default=0.0) / seconds


def _delays() -> dict[str, float]:
    """Return the seconds for which each thread of this process has waited for a core."""
    delays = {}
    for task in os.listdir(_TASKS):
        with suppress(OSError, IndexError, ValueError):  # it has ended, or there are no statistics
            text = (_TASKS / task / "schedstat").read_text()
            delays[task] = int(text.split()[1]) / 1e9
    return delays


class Watch:
    """Shortens and restores the threads' spinning.

    Attributes:
        is_short: whether threads sleep now.
    """

    def __init__(self) -> None:
        self.is_short = False
        self._library = native.load("waiting", ("waiting.c",), _SIGNATURES)
        self._cores = len(os.sched_getaffinity(0))
        self._calm = 0

    def look(self, share: float) -> None:
        """Change how threads wait, given a `CoreWaits.share`."""
        self._calm = self._calm + 1 if share < IDLE else 0
        if not self.is_short and share >= BUSY:
            self.is_short = self._library.waiting_shorten(self._cores) == 0
        elif self.is_short and self._calm >= CALM_LOOKS:
            self.restore()

    def restore(self) -> None:
        """Let threads spin again."""
        if self.is_short:
            self._library.waiting_restore()
            self.is_short = False


@contextmanager
def adapted_waits(num_threads: int) -> Iterator[Watch | None]:
    """Adapt how OpenMP's threads wait for each other within the block.

    Does nothing with one thread, without a compiler or the system's statistics, or if the user has
    set how they wait (`CHOICES`). Import torch before.

    Args:
        num_threads: threads of this process's parallel regions.
    """
    is_set = any(name in environment() for name in CHOICES)
    watch = None
    if num_threads > 1 and not is_set and _delays():
        with suppress(native.NativeUnavailable):
            watch = Watch()
    if watch is None:
        yield None
        return
    ended = threading.Event()
    waits = CoreWaits()

    def run() -> None:
        while not ended.wait(LOOK_SECONDS):
            watch.look(waits.share())

    thread = threading.Thread(target=run, name="adapted-waits", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        ended.set()
        thread.join()
        watch.restore()
