"""What all sources of training steps share: steps are made ahead in a background thread, and resumed by number."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mlbert.data.formats.order import StepShare
from mlbert.data.loading.exchange import ExchangeGroup, GatheredReading, Read
from mlbert.data.loading.host_batch import HostBatch
from mlbert.host.errors import UserError

PREFETCHED_STEPS = 4


class StepSource:
    """Endless optimizer steps; what step n holds depends on the settings and on n alone (`batches_of`). ``name`` is
    the data's, for messages; ``identity``, JSON-able, is what a position must be resumed with."""

    def __init__(self, name: str | Path, identity: dict[str, Any]) -> None:
        self._name, self._identity = name, identity
        self._step = 0
        self._prefetcher: Prefetcher | None = None
        self._closing = threading.Event()
        # The copy to the device runs beside the computation from such memory only; it needs a CUDA driver.
        self._page_locked = torch.cuda.is_available()

    @property
    def is_preparing(self) -> bool:
        """Whether an epoch is being prepared, so that `next_step` may wait for minutes; read by another thread."""
        return False

    def open(self) -> None:
        """First touch of the data."""

    def batches_of(self, step: int) -> list[HostBatch]:
        """This rank's micro-batches of optimizer step ``step`` (from 0), a pure function of the step."""
        raise NotImplementedError

    def next_step(self) -> list[HostBatch]:
        """This rank's micro-batches of the next optimizer step."""
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self.batches_of, self._step)
        batches = self._prefetcher.next()
        self._step += 1
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Position, JSON-able: the number of steps taken, and what it must be resumed with."""
        return {"step": self._step, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; the next step is the one after it. Raises UserError: the position belongs to other
        data, another seed or another global batch."""
        for key, value in self._identity.items():
            if state.get(key) != value:
                reason = f"the saved position has {key} {state.get(key)}, this run has {value}"
                raise UserError(
                    "run.other-settings",
                    self._name,
                    reason,
                    "Resume with the settings and data that the run started with",
                )
        self.close()
        self._step = int(state["step"])

    def finish(self) -> None:
        """Waits for what is still being found out of the data that was read. Raises UserError: it was damaged, so that
        the run is no success."""

    def close(self) -> None:
        """Stop the background thread; `next_step` starts it again. A source that gathers from other ranks can be used
        again by all of them together at most, as it may stop between two of them."""
        if self._prefetcher is not None:
            self._closing.set()
            self._prefetcher.stop()
            self._prefetcher = None
            self._closing.clear()

    def _exchanged(self, read: Read, share: StepShare, group: ExchangeGroup | None) -> Read:
        """The same steps, exchanged over a group of ranks where there is one."""
        return read if group is None else GatheredReading(read, share, group, self._closing.is_set)


class Prefetcher:
    """Calls ``make(step)`` for step, step + 1, ... in a background thread, `PREFETCHED_STEPS` ahead."""

    def __init__(self, make: Callable[[int], list[HostBatch]], first_step: int) -> None:
        self._make = make
        self._queue: queue.Queue[list[HostBatch] | BaseException] = queue.Queue(PREFETCHED_STEPS)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(first_step,), name="prefetch", daemon=True)
        self._thread.start()

    def _run(self, step: int) -> None:
        try:
            while not self._stopped.is_set():
                self._put(self._make(step))
                step += 1
        except BaseException as error:  # handed to the consumer, who raises it
            self._put(error)

    def _put(self, item: list[HostBatch] | BaseException) -> None:
        # With a time limit: nobody takes from a full queue any more once the source is closed.
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def next(self) -> list[HostBatch]:
        """The next step's batches; raises what the thread raised."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()
