"""Processes that call a function, and share the memory of everything that it needs.

    this process ─ spawns ─> server ─ forks ─> workers

The server is a fresh process that imports modules and unpickles the function. The workers are its
forks, so pages that they only read are in memory once. This process is not forked itself: a fork
copies locks that other threads (progress bar, OpenMP) hold at that moment. The server has no
threads except idle ones of libraries, which handle a fork.

All workers read items from one pipe and write results to another one, a lock for each. If a worker
is killed, perhaps with a lock, the server ends, and the kernel kills the others with it.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import queue
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from multiprocessing.synchronize import Lock
from typing import Any

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl  # found here: a lookup between fork and exec could wait for ever
_SERVER = -1  # in place of the number of an item: the server could not load the function

_Failure = tuple[BaseException, str]  # with its traceback as text


class WorkerKilled(Exception):
    """A worker process, or the server, ended before its work was done."""


class WorkerPool:
    """Worker processes, from `start` to `close`.

    Signals of Ctrl-C and SIGTERM never reach them: this process ends them with `kill`. If this
    process is killed, so are they.

    Args:
        workers: number of processes.
        function: picklable (a module's function or a method of a picklable object).
        load: picklable; called once, before the server forks the workers, which share what it
            loads. It must not start threads. A method of the object whose method ``function`` is
            has the same object there.

    Raises:
        Exception: ``function`` or ``load`` cannot be pickled.
    """

    def __init__(
        self,
        workers: int,
        function: Callable[[Any], Any],
        load: Callable[[], None] | None = None,
    ) -> None:
        self._pickled = bytes(ForkingPickler.dumps((function, load)))
        self._futures: dict[int, Future] = {}
        self._count = 0  # of items
        self._ended: BaseException | None = None  # of all futures from now on
        self._lock = threading.Lock()  # of the three above
        self._queued: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        # An item more than there are workers, so that none waits for the next; items that are sent
        # cannot be dropped.
        self._room = threading.Semaphore(workers + 1)
        self._is_closed = False
        context = multiprocessing.get_context("spawn")
        calls, self._calls = context.Pipe(duplex=False)
        self._answers, answers = context.Pipe(duplex=False)
        self._ends_of_server = (calls, answers)
        self._server = context.Process(
            target=_serve, args=(os.getpid(), workers, *self._ends_of_server), name="workers"
        )
        self._threads = [
            threading.Thread(target=self._send, name="items"),
            threading.Thread(target=self._receive, name="results"),
        ]

    def start(self) -> None:
        """Start the processes, which takes until the first result."""
        # The start of the tracker would let the signals in again.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            self._server.start()
            for end in self._ends_of_server:
                end.close()
            for thread in self._threads:
                thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def submit(self, item: Any) -> Future:
        """Return the future result of an item.

        The future raises what the function does, or `WorkerKilled`.
        """
        future: Future = Future()
        with self._lock:
            if self._ended is not None:
                future.set_exception(self._ended)
                return future
            number = self._count
            self._count += 1
            self._futures[number] = future
        self._queued.put((number, item))
        return future

    def kill(self) -> None:
        """End all processes at once."""
        if self._server.pid is not None:
            self._server.kill()  # the workers end with it

    def close(self) -> None:
        """Wait until running work is finished and all processes have ended; drop other items.

        May be called again, if it was interrupted.
        """
        self._is_closed = True
        self._queued.put(None)
        self._room.release()
        if self._server.pid is None:  # it could not be started
            return
        for thread in self._threads:
            thread.join()
        self._server.join()

    def _send(self) -> None:
        with self._calls as calls, suppress(BrokenPipeError):  # if no worker is left to read
            calls.send_bytes(self._pickled)
            while (queued := self._queued.get()) is not None:
                self._room.acquire()
                if self._is_closed:
                    break
                number, item = queued
                try:
                    message = ForkingPickler.dumps(queued)
                except Exception as error:
                    self._room.release()
                    self._take(number).set_exception(error)
                    continue
                calls.send_bytes(message)
                # Frees the memory before waiting for the next.
                del queued, item, message

    def _receive(self) -> None:
        ended: BaseException = WorkerKilled()
        try:
            with self._answers as answers:
                while True:
                    number, failure, result = answers.recv()
                    if number == _SERVER:
                        ended = _with_note(failure)
                        break
                    self._room.release()
                    future = self._take(number)
                    if failure is None:
                        future.set_result(result)
                    else:
                        future.set_exception(_with_note(failure))
                    del result, future
        except (EOFError, OSError):  # at the end, or in a message of a worker that was killed
            pass
        except Exception as error:  # a result cannot be unpickled
            ended = error
            self.kill()
        with self._lock:
            self._ended = ended
            left = list(self._futures.values())
            self._futures.clear()
        for future in left:
            future.set_exception(ended)
        self._is_closed = True
        self._room.release()

    def _take(self, number: int) -> Future:
        with self._lock:
            return self._futures.pop(number)


def _with_note(failure: _Failure) -> BaseException:
    """Return an error of a worker, with its traceback for unhandled ones."""
    error, trace = failure
    error.add_note(f"In a worker process:\n{trace}")
    return error


def _failure(error: BaseException) -> _Failure:
    return error, "".join(traceback.format_exception(error))


def _serve(parent: int, workers: int, calls: Connection, answers: Connection) -> None:
    """Load the function, fork the workers and wait for them. The server's main function."""
    end_with_parent(parent, signal.SIGKILL)
    # There is a worker for each core already, so the library tokenizers gets one thread. It is not
    # the main thread: one that allocates from its own arena, apart from Python's objects, needs a
    # fifth less time.
    os.putenv("RAYON_NUM_THREADS", "1")
    os.putenv("TOKENIZERS_PARALLELISM", "true")
    try:
        function, load = calls.recv()
        if load is not None:
            load()
    except EOFError:
        return
    except Exception as error:
        answers.send((_SERVER, _failure(error), None))
        return
    gc.collect()
    gc.freeze()  # collections would write to the pages of what is there for good
    context = multiprocessing.get_context("fork")
    reading = context.Lock()
    writing = context.Lock()
    arguments = (os.getpid(), function, calls, answers, reading, writing)
    processes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # idle threads of NumPy's library
        for _ in range(workers):
            process = context.Process(target=_work, args=arguments)
            process.start()
            processes.append(process)
    calls.close()
    answers.close()
    while processes:
        ended = wait([process.sentinel for process in processes])
        for process in [one for one in processes if one.sentinel in ended]:
            process.join()
            if process.exitcode:
                os._exit(1)
            processes.remove(process)


def _work(
    server: int,
    function: Callable[[Any], Any],
    calls: Connection,
    answers: Connection,
    reading: Lock,
    writing: Lock,
) -> None:
    """Call the function with items until there are no more. A worker's main function."""
    end_with_parent(server, signal.SIGKILL)
    while True:
        try:
            with reading:
                message = calls.recv_bytes()
        except EOFError:
            return
        number, item = ForkingPickler.loads(message)
        del message
        try:
            answer = ForkingPickler.dumps((number, None, function(item)))
        except BaseException as error:
            answer = ForkingPickler.dumps((number, _failure(error), None))
        del item
        with writing:
            answers.send_bytes(answer)
        del answer  # the next item may wait long, and memory is for those that work


def end_with_parent(parent: int, number: int) -> None:
    """Let the kernel send this process a signal when its parent, a process id, ends.

    May be called before exec.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # killed before this process could ask for the signal
        os._exit(1)
