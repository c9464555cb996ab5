"""Many independent pieces of work over several processes, with progress.

A preparation step cuts its work into items (a text part, a shard), each of which writes its own file atomically; so
a step that was interrupted is run again and keeps what is there. What a step makes does not depend on how many
``workers`` (processes) it has, and its ``progress`` is told of every finished item.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

from mlbert.host.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

_PR_SET_PDEATHSIG = 1
_MOST_WORKERS = max(2, os.cpu_count() or 1)  # more take memory and save no time


class Progress:
    """Where a step tells how far it is. This one is silent; the command line has one that draws a bar."""

    def __call__(self, line: str) -> None:
        """Say one line."""

    @contextmanager
    def task(self, name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """A piece of work of ``total`` units (for example bytes); call what it gives with the units just done."""
        del name, total, unit
        yield lambda units: None


SILENT = Progress()


def run_jobs(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    name: str,
    where: Path,
    sizes: Sequence[int],
    unit: str = "bytes",
    workers: int = 1,
    progress: Progress = SILENT,
) -> list[Result]:
    """``[function(item) for item in items]`` over ``workers`` processes.

    Args:
        function: picklable (a module's function or the method of a picklable object); one item at a time.
        name: what the work is, for the progress bar.
        where: output folder, named when a process is killed.
        sizes: units of work of each item, for the estimate.
        unit: what ``sizes`` counts.
        workers: processes; 1 works in this one.

    Raises UserError: what ``function`` raised, or a process was killed (for example for want of memory). Items not
    begun are left; finished ones stay.
    """
    with progress.task(name, sum(sizes), unit) as advance:
        if workers <= 1 or len(items) <= 1:
            results = []
            for item, size in zip(items, sizes, strict=True):
                results.append(function(item))
                advance(size)
            return results
        return _in_processes(function, items, sizes, min(workers, len(items), _MOST_WORKERS), where, advance)


def _in_processes(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    sizes: Sequence[int],
    workers: int,
    where: Path,
    advance: Callable[[int], None],
) -> list[Result]:
    try:
        with processes(workers) as pool:
            place = {pool.submit(function, item): index for index, item in enumerate(items)}
            results: dict[int, Result] = {}
            for future in as_completed(place):
                results[place[future]] = future.result()
                advance(sizes[place[future]])
            return [results[index] for index in range(len(items))]
    except BrokenProcessPool:
        reason = "a worker process was killed, perhaps for want of memory"
        raise UserError("machine.memory", where, reason, "Use fewer --workers; finished parts are kept") from None


@contextmanager
def processes(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Fresh processes that end with this one. An error lets running work finish; Ctrl-C and SIGTERM, which raises
    SystemExit meanwhile, end it at once: files are written as a whole or not at all."""
    # Spawned, not forked: a fork copies locks that other threads (progress bar, OpenMP) hold at that moment.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_die_with_parent, initargs=(os.getpid(),))
    with _sigterm_raises():
        try:
            yield pool
        except (KeyboardInterrupt, SystemExit):
            for process in multiprocessing.active_children():
                process.kill()
            raise
        finally:
            # Also gives back the pool's semaphores: a signal's default action would leave them, with a warning.
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM as an exception, where nobody has set another action; only a main thread can set one."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _die_with_parent(parent: int) -> None:
    """In a worker: end at once when the main process is killed; leave Ctrl-C and SIGTERM to the main process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # killed before this process could ask for the signal
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
