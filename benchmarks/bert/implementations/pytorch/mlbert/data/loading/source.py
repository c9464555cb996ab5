"""What all sources of training steps share: steps are made ahead in a background thread, and resumed by number.

Exchange of padding by communication: ranks read their own sequences, gather their group's, and deal them out.

The twin of reading what `mlbert.data.formats.order.by_length` deals to a rank: the same sequences, read once in the
whole group instead of by whoever gets them, at the price of a collective a step. Both give the same batches, bit for
bit.

Per step every rank sends one array of 16-bit numbers, all its micro-batches one after the other:

    step number (4 numbers, low bits first); per micro-batch S, T, M (2 each), then
    lengths [S], masked tokens [S], first_lengths [S], next_sentence [S], tokens [T], masked_positions [M],
    masked_labels [M], sequences of each unit [P]

Which units they are needs no telling. Legend: P units, S sequences, T tokens, M masked tokens.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from mlbert.data.formats.order import MicroBatchRows, RankSlice, contiguous, snake
from mlbert.data.formats.ragged import Ragged, offsets_of
from mlbert.data.loading.batches import HostBatch
from mlbert.host.errors import UserError

WORD = np.dtype("<u2")
Read = Callable[[int], list[MicroBatchRows]]  # from a step's number to this rank's micro-batches


class ExchangeGroup(Protocol):
    """The ranks that share out their sequences; these are in a row."""

    @property
    def rank(self) -> int:
        """Of this process within the group."""

    @property
    def size(self) -> int:
        """Ranks of the group."""

    def all_gather(self, data: np.ndarray, given_up: Callable[[], bool]) -> list[np.ndarray]:
        """Every rank's ``data`` (uint8 [n], any n), in the order of ranks. All call it together, in the source's
        thread. Raises RuntimeError where a rank is lost, and soon after ``given_up`` says so."""


class GatheredReading:
    """Reads steps as `by_length` over the group would deal them, but every sequence once.

    Args:
        read: this rank's part of a step as `contiguous` gives it.
        share: of this rank.
        group: ranks in a row, as many as divide the number of all.
        given_up: whether this rank waits for the others no more: its run has ended.
    """

    def __init__(self, read: Read, share: RankSlice, group: ExchangeGroup, given_up: Callable[[], bool]) -> None:
        assert share.world_size % group.size == 0, "groups are equally large"
        assert share.rank % group.size == group.rank, "groups are ranks in a row"
        self._read, self._group, self._given_up = read, group, given_up
        first = share.rank - group.rank
        # units of each micro-batch of each of the group's ranks
        self._held = [contiguous(replace(share, rank=rank)) for rank in range(first, first + group.size)]

    def __call__(self, step: int) -> list[MicroBatchRows]:
        """This rank's micro-batches of the step, all ranks of the group together."""
        words = _to_words(step, self._read(step))
        gathered = self._group.all_gather(words.view(np.uint8), self._given_up)
        of_ranks = [_from_words(step, data.view(WORD), held) for data, held in zip(gathered, self._held, strict=True)]
        return [self._dealt(parts) for parts in zip(*of_ranks, strict=True)]

    def _dealt(self, parts: Sequence[MicroBatchRows]) -> MicroBatchRows:
        """This rank's units of one micro-batch of the whole group."""
        rows, counts = (
            Ragged.concatenate([p.rows for p in parts]),
            np.concatenate([p.sequences_per_unit for p in parts]),
        )
        first = offsets_of(counts)
        chosen = snake(np.diff(rows.offsets[first]), self._group.size, self._group.rank)
        sizes = counts[chosen]
        sequences = np.arange(sizes.sum()) + np.repeat(first[chosen] - offsets_of(sizes)[:-1], sizes)
        return MicroBatchRows(rows.take(sequences), sizes, np.concatenate([part.units for part in parts])[chosen])


def _to_words(step: int, parts: Sequence[MicroBatchRows]) -> np.ndarray:
    """uint16, as the module's docstring says."""
    words = [np.asarray([step], "<u8").view(WORD)]
    for part in parts:
        rows = part.rows
        assert rows.labels is None, "task labels do not travel"
        words.append(np.asarray([len(rows), len(rows.tokens), len(rows.masked_labels)], "<u4").view(WORD))
        columns = [rows.lengths, np.diff(rows.masked_offsets), rows.first_lengths, rows.next_sentence]
        columns += [rows.tokens, rows.masked_positions, rows.masked_labels, part.sequences_per_unit]
        words += [column.astype(WORD) for column in columns]
    return np.concatenate(words)


def _from_words(step: int, words: np.ndarray, held: Sequence[np.ndarray]) -> list[MicroBatchRows]:
    """Back to one rank's micro-batches; ``held``: units of each."""
    sent = int(words[:4].view("<u8")[0])
    if sent != step:
        raise RuntimeError(f"the ranks exchange different steps, {step} and {sent}")
    at, parts = 4, []
    for units in held:
        sequences, tokens, masked = words[at : at + 6].view("<u4").tolist()
        at += 6
        ends = at + np.cumsum([*[sequences] * 4, tokens, masked, masked, len(units)])
        columns = np.split(words[at : ends[-1]], ends[:-1] - at)
        at = int(ends[-1])
        rows = Ragged(
            tokens=columns[4],
            offsets=offsets_of(columns[0]),
            masked_positions=columns[5],
            masked_labels=columns[6],
            masked_offsets=offsets_of(columns[1]),
            first_lengths=columns[2],
            next_sentence=columns[3].astype(np.uint8),
        )
        parts.append(MicroBatchRows(rows, columns[7].astype(np.int64), units))
    assert at == len(words), "more was sent than said"
    return parts


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

    def _exchanged(self, read: Read, share: RankSlice, group: ExchangeGroup | None) -> Read:
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
