"""Run the items of a preparation step in worker processes, and report progress.

An item (a text part, a shard) writes its own file atomically. Rerunning an interrupted step keeps
these files. The output does not depend on the number of worker processes.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from mlbert.data.prepare.shares import Share
from mlbert.data.prepare.worker_pool import WorkerKilled, WorkerPool
from mlbert.host.errors import UserError
from mlbert.host.progress import Progress

Item = TypeVar("Item")
Result = TypeVar("Result")
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
        self,
        function: Callable[[Item], Result],
        where: Path | str,
        ahead: int = 0,
        load: Callable[[], None] | None = None,
    ) -> Iterator[Callable[[Iterable[Item]], Iterator[tuple[Item, Result]]]]:
        """Yield what maps items as `stream` does, several times with the same processes.

        ``load``: loads what the processes share, see `WorkerPool`.
        """
        if self.workers <= 1:
            yield lambda items: ((item, function(item)) for item in items)
            return
        workers = min(self.workers, _MOST_WORKERS)
        with _processes(workers, function, where, load) as pool:
            yield lambda items: _in_order(pool, items, ahead or _AHEAD * workers)


def _in_order(pool: WorkerPool, items: Iterable[Item], most: int) -> Iterator[tuple[Item, Any]]:
    waiting: deque[tuple[Item, Future]] = deque()
    for item in items:
        waiting.append((item, pool.submit(item)))
        if len(waiting) >= most:
            yield _first_result(waiting)
    while waiting:
        yield _first_result(waiting)


def _first_result(waiting: deque[tuple[Item, Future]]) -> tuple[Item, Any]:
    item, future = waiting.popleft()
    return item, future.result()


@contextmanager
def _processes(
    workers: int,
    function: Callable[[Any], Any],
    where: Path | str,
    load: Callable[[], None] | None,
) -> Iterator[WorkerPool]:
    """Yield a pool of processes that end with this one.

    After an error, running work finishes. Ctrl-C and SIGTERM (raised as SystemExit meanwhile) kill
    it at once, which is safe because files are written atomically. Raises UserError if a process
    was killed; ``where`` is its subject.
    """
    pool = WorkerPool(workers, function, load)
    with sigterm_raises():
        try:
            try:
                pool.start()
                yield pool
            except Exception:
                pool.close()
                raise
            pool.close()
        except WorkerKilled:
            reason = "a worker process was killed, possibly for lack of memory"
            raise UserError("machine.memory", where, reason, _FEWER) from None
        except Exception:
            raise
        except BaseException:
            pool.kill()
            pool.close()
            raise


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
