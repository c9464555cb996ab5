"""Run the items of a preparation step in worker processes, and report progress.

An item (a text part, a shard) writes its own file atomically. Rerunning an interrupted step keeps
these files. The output does not depend on the number of worker processes.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from mlbert.data.prepare.shares import Share
from mlbert.host.errors import UserError
from mlbert.host.progress import Progress

Item = TypeVar("Item")
Result = TypeVar("Result")
_function: Callable[[Any], Any]  # of a worker process
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl  # found here: a lookup between fork and exec could wait for ever
_MOST_WORKERS = max(2, os.cpu_count() or 1)  # more use memory and save no time
_AHEAD = 2  # items of a stream for each process, so that none waits for the next
_FEWER = (
    "Use fewer processes: --workers, or CPU_THREADS of `mlbert pretrain`; finished parts are kept"
)


@dataclass(frozen=True)
class Executor:
    """How a step is run.

    Attributes:
        workers: number of processes; 1 works in the current process.
        progress: receives the progress.
        share: the part of a step that can be divided; others are run as a whole.
    """

    workers: int = 1
    progress: Progress = Progress()
    share: Share = Share()

    def run(
        self,
        function: Callable[[Item], Result],
        items: Sequence[Item],
        *,
        name: str,
        where: Path,
        sizes: Sequence[int],
        unit: str = "bytes",
    ) -> list[Result]:
        """Return ``[function(item) for item in items]``, computed by the worker processes.

        Args:
            function: picklable (a module's function or a method of a picklable object);
                processes one item.
            name: name of the work, for the progress bar.
            where: output folder, named in the error if a process is killed.
            sizes: units of work of each item, for the remaining time.
            unit: the unit of ``sizes``.

        Raises UserError: ``function`` raised it, or a process was killed (for example for lack of
        memory). Items not yet started are dropped; finished ones stay.
        """
        results = []
        some = replace(self, workers=min(self.workers, len(items)))
        with (
            self.progress.task(name, sum(sizes), unit) as advance,
            some.stream(function, items, where, ahead=len(items)) as made,
        ):
            for (_, result), size in zip(made, sizes, strict=True):
                results.append(result)
                advance(size)
        return results

    @contextmanager
    def stream(
        self,
        function: Callable[[Item], Result],
        items: Iterable[Item],
        where: Path | str,
        ahead: int = 0,
    ) -> Iterator[Iterator[tuple[Item, Result]]]:
        """Yield an iterator over each item and its result, in the order of the items.

        Items are taken as results are used: ``ahead`` of them at a time, or a few for each process.
        Raises UserError as `run`, or as ``items`` does.
        """
        with self.pool(function, where, ahead) as run:
            yield run(items)

    @contextmanager
    def pool(
        self, function: Callable[[Item], Result], where: Path | str, ahead: int = 0
    ) -> Iterator[Callable[[Iterable[Item]], Iterator[tuple[Item, Result]]]]:
        """Yield what maps items as `stream` does, several times with the same processes."""
        if self.workers <= 1:
            yield lambda items: ((item, function(item)) for item in items)
            return
        workers = min(self.workers, _MOST_WORKERS)
        with processes(workers, function, where) as pool:
            yield lambda items: _in_order(pool, items, ahead or _AHEAD * workers)


def _in_order(
    pool: ProcessPoolExecutor, items: Iterable[Item], most: int
) -> Iterator[tuple[Item, Any]]:
    waiting: deque[tuple[Item, Future]] = deque()
    for item in items:
        waiting.append((item, _submit(pool, item)))
        if len(waiting) >= most:
            first, future = waiting.popleft()
            yield first, future.result()
    yield from ((item, future.result()) for item, future in waiting)


def _submit(pool: ProcessPoolExecutor, item: Any) -> Future:
    """Submit an item.

    A process that is started for it never gets Ctrl-C and SIGTERM: the main process ends it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        return pool.submit(_call, item)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def processes(
    workers: int, function: Callable[[Any], Any], where: Path | str
) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of fresh processes in which `_call` calls the function,
    and that end with this one.

    After an error, running work finishes. Ctrl-C and SIGTERM (raised as SystemExit meanwhile) kill
    it at once, which is safe because files are written atomically. Raises UserError if a process
    was killed; ``where`` is its subject.
    """
    # Spawned, not forked: a fork copies locks that other threads (progress bar, OpenMP) hold at
    # that moment.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_begin_worker, initargs=(os.getpid(), function)
    )
    with sigterm_raises():
        try:
            yield pool
        except (KeyboardInterrupt, SystemExit, BrokenProcessPool) as end:
            for process in (
                multiprocessing.active_children()
            ):  # the pool's own way is SIGTERM, which they never get
                process.kill()
            if isinstance(end, BrokenProcessPool):
                reason = "a worker process was killed, possibly for lack of memory"
                raise UserError("machine.memory", where, reason, _FEWER) from None
            raise
        finally:
            # Also releases the pool's semaphores: a signal's default action would leak them,
            # with a warning.
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into an exception, unless it already has a handler;
    only the main thread can set one.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _call(item: Any) -> Any:
    return _function(item)


def _begin_worker(parent: int, function: Callable[[Any], Any]) -> None:
    """Make a worker end at once if the main process is killed.

    Keep the function, which is sent only once.
    """
    global _function
    _function = function
    # There is a worker for each core already, so the library tokenizers gets one thread. It is not
    # this one: a thread that allocates from its own arena, apart from Python's objects, needs a
    # fifth less time.
    os.putenv("RAYON_NUM_THREADS", "1")
    os.putenv("TOKENIZERS_PARALLELISM", "true")
    gc.freeze()  # collections need not search what is there for good
    end_with_parent(parent, signal.SIGKILL)


def end_with_parent(parent: int, number: int) -> None:
    """Let the kernel send this process a signal when its parent, a process id, ends.

    May be called before exec.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # killed before this process could ask for the signal
        os._exit(1)
