"""Common parts of all sources of training steps: prefetching, resuming, and the exchange of sequences between ranks.

With EXCHANGE_BY=gather each rank reads its own sequences, gathers those of its group, and keeps the ones that
`mlbert.data.formats.order.by_length` would assign to it. The batches are bitwise the same as with EXCHANGE_BY=lengths,
but each sequence is read only once in the group, at the cost of one collective per step.

In each step every rank sends one array of 16-bit numbers with all its micro-batches:

    step number (4 numbers, low bits first); per micro-batch S, T, M (2 each), then
    lengths [S], masked tokens [S], first_lengths [S], next_sentence [S], tokens [T], masked_positions [M],
    masked_labels [M], sequences of each unit [P]

Unit numbers are not sent, because receivers can compute them.

Legend: P units, S sequences, T tokens, M masked tokens.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
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
Read = Callable[[int], list[MicroBatchRows]]  # step number -> this rank's micro-batches


class ExchangeGroup(Protocol):
    """The ranks, consecutive, that exchange their sequences."""

    @property
    def rank(self) -> int:
        """Rank of this process within the group."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    def all_gather(self, data: np.ndarray, given_up: Callable[[], bool]) -> list[np.ndarray]:
        """Return every rank's ``data`` (uint8 [n], any n) in rank order. A collective, called in the source's thread.
        Raises RuntimeError if a rank is lost, or soon after ``given_up`` returns True."""


class GatheredReading:
    """Reads steps partitioned as by `by_length`, but reads each sequence only once per group.

    Args:
        read: reads this rank's part of a step as assigned by `contiguous`.
        share: this rank's slice.
        group: consecutive ranks; its size must divide the world size.
        given_up: returns True once this rank's run has ended, so that it stops waiting for the others.
    """

    def __init__(self, read: Read, share: RankSlice, group: ExchangeGroup, given_up: Callable[[], bool]) -> None:
        assert share.world_size % group.size == 0, "groups must have equal sizes"
        assert share.rank % group.size == group.rank, "groups must be consecutive ranks"
        self._read, self._group, self._given_up = read, group, given_up
        first = share.rank - group.rank
        # For each rank of the group, the units of each micro-batch.
        self._held = [contiguous(replace(share, rank=rank)) for rank in range(first, first + group.size)]

    def __call__(self, step: int) -> list[MicroBatchRows]:
        """Return this rank's micro-batches of the step; all ranks of the group must call it together."""
        words = _to_words(step, self._read(step))
        gathered = self._group.all_gather(words.view(np.uint8), self._given_up)
        of_ranks = [_from_words(step, data.view(WORD), held) for data, held in zip(gathered, self._held, strict=True)]
        return [self._select(parts) for parts in zip(*of_ranks, strict=True)]

    def _select(self, parts: Sequence[MicroBatchRows]) -> MicroBatchRows:
        """Return this rank's units of one of the group's micro-batches."""
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
    """Encode micro-batches as uint16, in the layout of the module's docstring."""
    words = [np.asarray([step], "<u8").view(WORD)]
    for part in parts:
        rows = part.rows
        assert rows.labels is None, "task labels cannot be exchanged"
        words.append(np.asarray([len(rows), len(rows.tokens), len(rows.masked_labels)], "<u4").view(WORD))
        columns = [rows.lengths, np.diff(rows.masked_offsets), rows.first_lengths, rows.next_sentence]
        columns += [rows.tokens, rows.masked_positions, rows.masked_labels, part.sequences_per_unit]
        words += [column.astype(WORD) for column in columns]
    return np.concatenate(words)


def _from_words(step: int, words: np.ndarray, held: Sequence[np.ndarray]) -> list[MicroBatchRows]:
    """Decode one rank's micro-batches; ``held`` has the units of each."""
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
    assert at == len(words), "received more data than announced"
    return parts


PREFETCHED_STEPS = 4


class EvaluationBatches:
    """This rank's batches of an evaluation set, in the same order for every evaluation; `open` makes them."""

    _batches: list[HostBatch] | None = None

    def __iter__(self) -> Iterator[HostBatch]:
        """Iterate over this rank's batches."""
        assert self._batches is not None, "open() first"
        return iter(self._batches)


class StepSource:
    """Endless optimizer steps; the contents of step n depend only on the settings and n (`batches_of`).

    Args:
        name: of the data, for messages.
        identity: JSON-serializable settings that must be the same when a run is resumed.
    """

    def __init__(self, name: str | Path, identity: dict[str, Any]) -> None:
        self._name, self._identity = name, identity
        self._step = 0
        self._prefetcher: Prefetcher | None = None
        self._closing = threading.Event()
        # The copy to the device overlaps computation only from page-locked memory, which needs a CUDA driver.
        self._page_locked = torch.cuda.is_available()

    @property
    def is_preparing(self) -> bool:
        """True while an epoch is being prepared, when `next_step` may take minutes; read by another thread."""
        return False

    def open(self) -> None:
        """Open the data; nothing is read before."""

    def batches_of(self, step: int) -> list[HostBatch]:
        """Return this rank's micro-batches of optimizer step ``step`` (from 0), a pure function of the step."""
        raise NotImplementedError

    def next_step(self) -> list[HostBatch]:
        """Return this rank's micro-batches of the next optimizer step."""
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self.batches_of, self._step)
        batches = self._prefetcher.next()
        self._step += 1
        return batches

    def state_dict(self, back: int = 0) -> dict[str, Any]:
        """Return the position ``back`` steps ago: the number of steps taken by then, and the source's identity."""
        return {"step": self._step - back, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position. Raises UserError if it was saved with other data, another seed or another
        global batch."""
        for key, value in self._identity.items():
            if state.get(key) != value:
                reason = f"the saved position has {key} {state.get(key)}, this run has {value}"
                remedy = "Resume with the settings and data that the run started with"
                raise UserError("run.other-settings", self._name, reason, remedy)
        self.close()
        self._step = int(state["step"])

    def finish(self) -> None:
        """Wait for background checks of the data. Raises UserError if data was damaged, which invalidates the run."""

    def close(self) -> None:
        """Stop the background thread; `next_step` starts it again. With ``gather_over``, ranks may stop at different
        steps, so all of them must close and resume together."""
        if self._prefetcher is not None:
            self._closing.set()
            self._prefetcher.stop()
            self._prefetcher = None
            self._closing.clear()

    def _exchanged(self, read: Read, share: RankSlice, group: ExchangeGroup | None) -> Read:
        """Return ``read`` with exchange over the group, if there is one."""
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
        except BaseException as error:  # `next` raises it in the consumer's thread
            self._put(error)

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
