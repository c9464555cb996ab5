"""Worker processes share what is loaded before they are forked, and fail with what went wrong."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

from mlbert.data.prepare.worker_pool import WorkerKilled, WorkerPool

SECONDS = 60


@dataclass
class Loaded:
    """Counts the calls of `load`, in the process where they happen."""

    processes: list[int] = field(default_factory=list)

    def load(self) -> None:
        self.processes.append(os.getpid())

    def places(self, _: int) -> tuple[list[int], int, int]:
        return self.processes, os.getppid(), os.getpid()


class Unsendable(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(one)


def divide(number: int) -> float:
    return 1 / number


def fail_unsendably(number: int) -> None:
    raise Unsendable(number, number)


def return_lock(_: int) -> object:
    return threading.Lock()


def refuse() -> None:
    raise ValueError("cannot be loaded")


def exit_at_once(_: int) -> None:
    os._exit(1)


@contextmanager
def started(pool: WorkerPool) -> Iterator[WorkerPool]:
    pool.start()
    try:
        yield pool
    finally:
        pool.close()


def error_of(future: Future) -> BaseException | None:
    return future.exception(timeout=SECONDS)


def test_what_is_loaded_once_is_shared() -> None:
    loaded = Loaded()
    with started(WorkerPool(3, loaded.places, loaded.load)) as pool:
        futures = [pool.submit(number) for number in range(20)]
        found = [future.result(timeout=SECONDS) for future in futures]
    servers = {server for _, server, _ in found}
    assert len(servers) == 1, "all workers are forks of one process"
    assert all(processes == [*servers] for processes, _, _ in found), "and only that one loaded"
    assert loaded.processes == []


def test_an_error_has_the_traceback_of_the_worker() -> None:
    with started(WorkerPool(2, divide)) as pool:
        futures = [pool.submit(number) for number in (1, 0, 2)]
        assert futures[0].result(timeout=SECONDS) == 1
        error = error_of(futures[1])
        assert futures[2].result(timeout=SECONDS) == 0.5
    assert isinstance(error, ZeroDivisionError)
    assert "in divide" in error.__notes__[0]


def test_an_item_that_cannot_be_sent_fails_alone() -> None:
    with started(WorkerPool(2, divide)) as pool:
        futures = [pool.submit(item) for item in (1, threading.Lock(), 2)]
        assert isinstance(error_of(futures[1]), TypeError)
        assert [futures[place].result(timeout=SECONDS) for place in (0, 2)] == [1, 0.5]


def test_a_result_that_cannot_be_sent_is_an_error() -> None:
    with started(WorkerPool(2, return_lock)) as pool:
        assert isinstance(error_of(pool.submit(1)), TypeError)


def test_an_error_that_cannot_be_read_ends_the_pool() -> None:
    with started(WorkerPool(2, fail_unsendably)) as pool:
        futures = [pool.submit(number) for number in range(3)]
        assert all(isinstance(error_of(future), TypeError) for future in futures)
        assert isinstance(error_of(pool.submit(4)), TypeError), "also of later items"


def test_a_function_that_cannot_be_loaded_fails_all_items() -> None:
    with started(WorkerPool(2, divide, refuse)) as pool:
        assert isinstance(error_of(pool.submit(1)), ValueError)


def test_a_worker_that_ends_ends_the_pool() -> None:
    with started(WorkerPool(2, exit_at_once)) as pool:
        futures = [pool.submit(number) for number in range(5)]
        assert all(isinstance(error_of(future), WorkerKilled) for future in futures)


def test_items_that_have_not_begun_are_dropped(tmp_path) -> None:
    with started(WorkerPool(1, tmp_path.joinpath)) as pool:
        first = pool.submit("a")
        futures = [pool.submit(f"{number}") for number in range(1000)]
        assert first.result(timeout=SECONDS) == tmp_path / "a"
    assert not all(future.done() and not future.exception() for future in futures)
