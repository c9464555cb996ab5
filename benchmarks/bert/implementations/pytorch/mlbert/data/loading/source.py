"""Common parts of all sources of training steps: prefetching and resuming."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mlbert.data.batches import HostBatch
from mlbert.host.errors import UserError

PREFETCHED_STEPS = 4

MakeBatches = Callable[[], list[HostBatch]]


def _raise(error: BaseException) -> list[HostBatch]:
    raise error


class EvaluationBatches:
    """This rank's batches of an evaluation set, in the same order for every evaluation;
    `open` makes them.
    """

    _batches: list[HostBatch] | None = None

    def __iter__(self) -> Iterator[HostBatch]:
        """Iterate over this rank's batches."""
        assert self._batches is not None, "open() first"
        return iter(self._batches)


class StepSource:
    """Endless optimizer steps; the contents of step n depend only on the settings
    and n (`batches_of`).

    Args:
        name: of the data, for messages.
        identity: JSON-serializable settings that must be the same when a run is resumed.
        threads: make this many steps at a time; the batches do not depend on it.

    Attributes:
        identity: as given.
        locks_pages: make batches in page-locked memory.
    """

    def __init__(self, name: str | Path, identity: dict[str, Any], threads: int = 1) -> None:
        self._name = name
        self._threads = threads
        self.identity = identity
        self._step = 0
        self._prefetcher: Prefetcher | None = None
        # The copy to the device overlaps computation only from page-locked memory,
        # which needs a CUDA driver.
        self.locks_pages = torch.cuda.is_available()

    @property
    def is_preparing(self) -> bool:
        """True while an epoch is being prepared, when `next_step` may take minutes;
        read by another thread.
        """
        return False

    def open(self) -> None:
        """Open the data; nothing is read before."""

    def batches_of(self, step: int) -> list[HostBatch]:
        """Return this rank's micro-batches of optimizer step ``step`` (from 0),
        a pure function of the step.
        """
        raise NotImplementedError

    def begin(self, step: int) -> MakeBatches:
        """Do the part of `batches_of` that must be done step by step, and return what does the
        rest, in any thread.
        """
        return partial(self.batches_of, step)

    def next_step(self) -> list[HostBatch]:
        """Return this rank's micro-batches of the next optimizer step."""
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self.begin, self._step, self._threads)
        batches = self._prefetcher.next()
        self._step += 1
        return batches

    def state_dict(self, back: int = 0) -> dict[str, Any]:
        """Return the position ``back`` steps ago: the number of steps taken by then,
        and the source's identity.
        """
        return {"step": self._step - back, **self.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position.

        Raises UserError if it was saved with other data, another seed or another global batch.
        """
        for key, value in self.identity.items():
            if state.get(key) != value:
                reason = f"the saved position has {key} {state.get(key)}, but this run has {value}"
                remedy = "Resume with the settings and data that the run started with"
                raise UserError("run.other-settings", self._name, reason, remedy)
        self.close()
        self._step = int(state["step"])

    def finish(self) -> None:
        """Wait for background checks of the data.

        Raises UserError if data was damaged, which invalidates the run.
        """

    def close(self) -> None:
        """Stop the background thread; `next_step` starts it again."""
        if self._prefetcher is not None:
            self._prefetcher.stop()
            self._prefetcher = None


class Prefetcher:
    """Makes the batches of one step after the other in the background, `PREFETCHED_STEPS` ahead.

    Args:
        begin: called in one thread for step, step + 1, ...; what it returns makes the batches.
        first_step: the first step.
        threads: steps whose batches are made at the same time.
    """

    def __init__(
        self, begin: Callable[[int], MakeBatches], first_step: int, threads: int = 1
    ) -> None:
        self._begin = begin
        self._threads = threads
        self._queue: queue.Queue[list[HostBatch] | BaseException] = queue.Queue(PREFETCHED_STEPS)
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(first_step,), name="prefetch", daemon=True
        )
        self._thread.start()

    def _run(self, step: int) -> None:
        try:
            if self._threads == 1:
                self._make_in_turn(step)
            else:
                self._make_together(step)
        except BaseException as error:  # `next` raises it in the consumer's thread
            self._put(error)

    def _make_in_turn(self, step: int) -> None:
        while not self._stopped.is_set():
            self._put(self._begin(step)())
            step += 1

    def _make_together(self, step: int) -> None:
        with ThreadPoolExecutor(self._threads, "batches") as pool:
            made: deque[MakeBatches] = deque()  # each waits for its step
            while not self._stopped.is_set():
                while len(made) < self._threads:
                    made.append(self._started(pool, step))
                    step += 1
                self._put(made.popleft()())

    def _started(self, pool: ThreadPoolExecutor, step: int) -> MakeBatches:
        """Start to make a step's batches, and return what waits for them and raises its error."""
        try:
            return pool.submit(self._begin(step)).result
        except BaseException as error:  # the steps before it are handed over first
            return partial(_raise, error)

    def _put(self, item: list[HostBatch] | BaseException) -> None:
        # With a timeout, because a full queue is not emptied after the source is closed.
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def next(self) -> list[HostBatch]:
        """Return the next step's batches; re-raises an exception of the thread."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        self._thread.join()
