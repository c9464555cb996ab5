"""Training batches from stored data: packed, globally shuffled, split over ranks, resumable at any step.

Packs are those that the set holds, or its sequences are packed once when it is opened (by the seed). Every epoch takes
all packs in an order that is random by (seed, epoch) and cuts them into optimizer steps of ``world_size *
packs_per_step`` packs; the incomplete last step is left out. Within a step, pack g belongs to rank
``g // packs_per_step``, so the union over ranks does not depend on how many there are. A pack may be one sequence.

Legend: S sequences, T tokens, M masked tokens, P packs.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlbert.core.errors import UserError
from mlbert.core.packing import pack_lengths
from mlbert.core.permutation import EvenSpread, Permutation
from mlbert.feed.batch import Batch
from mlbert.feed.compact import CompactBatch
from mlbert.store.base import Store, StoreInfo
from mlbert.store.bins import BinnedStore
from mlbert.store.open import describe, open_store
from mlbert.store.prepared import ShardSet
from mlbert.store.ragged import Ragged, offsets_of

IN_MEMORY_BYTES = 4 << 30  # smaller sets are held in memory as one piece
PREFETCHED_STEPS = 4
HostBatches = list[Batch] | list[CompactBatch]  # the latter for a CUDA device
ORDER_BLOCK = 1024  # positions of an epoch whose packs are computed together


def make_batch(rows: Ragged, sequences_per_pack: np.ndarray, first_pack: int, max_tokens: int) -> Batch:
    """Turn packed sequences into a batch.

    Args:
        rows: the sequences, pack by pack.
        sequences_per_pack: int [P], sums to S.
        first_pack: number of the first of these packs within the optimizer step.
        max_tokens: slots of a pack; names the dropout rows.
    """
    lengths, starts = rows.lengths, rows.offsets[:-1]
    position_ids = np.arange(len(rows.tokens)) - np.repeat(starts, lengths)
    segment_ids = position_ids >= np.repeat(rows.first_lengths, lengths)
    pack_of = np.repeat(np.arange(len(sequences_per_pack)), sequences_per_pack)
    pack_starts = starts[np.concatenate([[0], np.cumsum(sequences_per_pack)[:-1]])] if len(rows) else starts
    row_of_start = (first_pack + pack_of) * max_tokens - pack_starts[pack_of]
    dropout_rows = np.arange(len(rows.tokens)) + np.repeat(row_of_start, lengths)
    masked_positions = rows.masked_positions + np.repeat(starts, np.diff(rows.masked_offsets))
    return Batch(
        input_ids=torch.from_numpy(rows.tokens.astype(np.int64)),
        segment_ids=torch.from_numpy(segment_ids.astype(np.int64)),
        position_ids=torch.from_numpy(position_ids),
        cu_seqlens=torch.from_numpy(rows.offsets.astype(np.int32)),
        max_seqlen=int(lengths.max()) if len(rows) else 0,
        masked_positions=torch.from_numpy(masked_positions.astype(np.int64)),
        masked_labels=torch.from_numpy(rows.masked_labels.astype(np.int64)),
        next_sentence_labels=torch.from_numpy(rows.next_sentence.astype(np.int64)),
        dropout_rows=torch.from_numpy(dropout_rows.astype(np.int32)),
    )


@dataclass(frozen=True)
class Units:
    """What steps are made of: packs, or single sequences.

    Attributes:
        count: how many there are (P).
        gather: from int64 [P'] to their sequences, unit by unit, and int64 [P'] sequences of each.
    """

    count: int
    gather: Callable[[np.ndarray], tuple[Ragged, np.ndarray]]


def make_units(store: Store, num_sequences: int, max_tokens: int, max_sequences: int, seed: int) -> Units:
    """The packs of a store: its own, else packed now; single sequences when only one fits a pack.

    Args:
        store: where sequences come from.
        num_sequences: only its first so many; packs that are stored are used when that is all of them.
        max_tokens: slots of a pack.
        max_sequences: most sequences of one pack.
        seed: of packing.
    """
    if max_sequences == 1:
        return Units(num_sequences, lambda chosen: (store.gather(chosen), np.ones(len(chosen), np.int64)))
    if store.num_packs and num_sequences == len(store):
        return Units(store.num_packs, store.gather_packs)
    packs = pack_lengths(store.lengths[:num_sequences], max_tokens, max_sequences, seed)

    def gather(chosen: np.ndarray) -> tuple[Ragged, np.ndarray]:
        starts, counts = packs.offsets[chosen], packs.offsets[chosen + 1] - packs.offsets[chosen]
        shift = np.repeat(starts - offsets_of(counts)[:-1], counts)
        return store.gather(packs.order[np.arange(len(shift)) + shift]), counts

    return Units(packs.num_packs, gather)


class EpochOrder:
    """In which order an epoch takes the units; computed, so that it takes no memory.

    Units of bins are taken from all bins in proportion within every stretch of the order, those of a bin in an order
    that is random by seed and epoch. Without bins the whole order is random.

    Args:
        first: int64 [bins+1], first unit of each bin and the number of all units; [0, P] without bins.
        seed: same seed, same orders.
    """

    def __init__(self, first: np.ndarray, seed: int) -> None:
        self._first, self._seed = first, seed
        self._latest: tuple[int, int, np.ndarray] | None = None

    def __call__(self, epoch: int, first: int, end: int) -> np.ndarray:
        """Units (int64 [end-first]) at the positions from ``first`` to before ``end`` of an epoch."""
        parts = [np.empty(0, np.int64)]
        while first < end:
            block, within = divmod(first, ORDER_BLOCK)
            parts.append(self._block(epoch, block)[within : within + end - first])
            first += len(parts[-1])
        return np.concatenate(parts)

    def _block(self, epoch: int, block: int) -> np.ndarray:
        """`ORDER_BLOCK` positions at once: computing a few takes as long."""
        if self._latest is None or self._latest[:2] != (epoch, block):
            positions = np.arange(block * ORDER_BLOCK, min((block + 1) * ORDER_BLOCK, int(self._first[-1])))
            self._latest = (epoch, block, self._compute(epoch, positions))
        return self._latest[2]

    def _compute(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        if len(self._first) == 2:
            return Permutation(int(self._first[1]), (self._seed, epoch))(positions)
        slots = EvenSpread(int(self._first[-1]))(positions)
        bin_of = np.searchsorted(self._first, slots, side="right") - 1
        units = np.empty(len(slots), np.int64)
        for number in np.unique(bin_of).tolist():
            mine, start = bin_of == number, self._first[number]
            order = Permutation(int(self._first[number + 1] - start), (self._seed, epoch, number))
            units[mine] = start + order(slots[mine] - start)
        return units


def check_tokens(rows: Ragged, info: StoreInfo, vocab_size: int) -> None:
    """For data that does not tell its vocabulary: every id must be below the model's ``vocab_size``.

    Raises:
        UserError: one is not.
    """
    largest = max(int(array.max(initial=0)) for array in (rows.tokens, rows.masked_labels))
    if largest >= vocab_size:
        reason = f"holds token id {largest}, the model's vocabulary has {vocab_size} entries"
        raise UserError(info.folder, reason, "Set BERT_CONFIG to a configuration of the data's vocabulary")


def in_memory(store: Store) -> Store:
    """The same store held in memory where it is a prepared one and small: faster to gather from."""
    parts = store.bins if isinstance(store, BinnedStore) else [store]
    sizes = [part.manifest.num_bytes if isinstance(part, ShardSet) else IN_MEMORY_BYTES + 1 for part in parts]
    if sum(sizes) > IN_MEMORY_BYTES:
        return store
    loaded = [part.load() for part in parts if isinstance(part, ShardSet)]
    return BinnedStore(store.info, loaded) if isinstance(store, BinnedStore) else loaded[0]


class Prefetcher:
    """Calls ``make(step)`` for step, step + 1, ... in a background thread, a few steps ahead; where there is a CUDA
    device, as `CompactBatch` in page-locked memory, so that the copy to it is short and runs beside the computation."""

    def __init__(self, make: Callable[[int], list[Batch]], first_step: int, ahead: int = PREFETCHED_STEPS) -> None:
        self._make = make
        self._queue: queue.Queue[HostBatches | BaseException] = queue.Queue(ahead)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(first_step,), name="prefetch", daemon=True)
        self._thread.start()

    def _run(self, step: int) -> None:
        on_gpu = torch.cuda.is_available()
        try:
            while not self._stopped.is_set():
                batches = self._make(step)
                self._put([CompactBatch.of(batch, page_locked=True) for batch in batches] if on_gpu else batches)
                step += 1
        except BaseException as error:  # handed to the consumer, who raises it
            self._put(error)

    def _put(self, item: HostBatches | BaseException) -> None:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def next(self) -> HostBatches:
        """The next step's batches; raises what the thread raised."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()


@dataclass(frozen=True)
class StepShape:
    """How an optimizer step is cut: packs of one rank, micro-batches, this rank's place.

    Attributes:
        packs_per_step: packs of one rank in one optimizer step, all micro-batches together.
        accumulation: micro-batches of one step; divides ``packs_per_step``.
        rank, world_size: this process among all.
    """

    packs_per_step: int
    accumulation: int = 1
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.packs_per_step < 1 or self.accumulation < 1 or self.packs_per_step % self.accumulation:
            reason = f"{self.packs_per_step} packs cannot be split into {self.accumulation} equal micro-batches"
            raise UserError("GRADIENT_STEPS", reason, "Choose a divisor of BATCHSIZE")
        assert 0 <= self.rank < self.world_size

    @property
    def global_packs(self) -> int:
        """Packs of one optimizer step over all ranks."""
        return self.packs_per_step * self.world_size

    def micro_batches(self) -> list[tuple[int, int]]:
        """[first, end) of each of this rank's micro-batches among the packs of the step."""
        size = self.packs_per_step // self.accumulation
        start = self.rank * self.packs_per_step
        return [(start + i * size, start + (i + 1) * size) for i in range(self.accumulation)]


class PackedSource:
    """Endless optimizer steps over a stored data set of any kind.

    Args:
        data_dir: see `mlbert.store.open.describe`; no sample is read before `open`.
        packs_per_step, accumulation, rank, world_size: see `StepShape`.
        max_sequences_per_pack: most sequences of one pack; 1: single sequences, from all bins in proportion where the
            set has bins. Where packs are stored, they are taken as they are, unless this is 1.
        seed: packing and order.
        max_tokens: slots of a pack; None: those of the stored packs, or the set's max_seq_length.
        vocab_size: entries of the model's vocabulary, compared with every token id of a set that does not know its own.

    Attributes:
        info: what is known of the set.
        max_tokens: slots of a pack.
        vocab_size: entries of the vocabulary: the set's, or the one given.
    """

    def __init__(
        self,
        data_dir: Path | str,
        *,
        packs_per_step: int,
        accumulation: int = 1,
        max_sequences_per_pack: int = 3,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        max_tokens: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.shape = StepShape(packs_per_step, accumulation, rank, world_size)
        self.info = describe(data_dir)
        stored = self.info.max_pack_tokens if max_sequences_per_pack > 1 else None
        least = stored or self.info.max_seq_length
        self.max_tokens = max_tokens or least
        if self.max_tokens < least:
            reason = f"packs of {self.max_tokens} tokens are shorter than the data's {least}"
            raise UserError(self.info.folder, reason, "Use longer packs or data with shorter sequences")
        self.vocab_size = vocab_size if self.info.vocab_size is None else self.info.vocab_size
        self._seed = seed
        self._max_sequences = max_sequences_per_pack
        self._step = 0
        self._units: Units | None = None
        self._order: EpochOrder | None = None
        self._prefetcher: Prefetcher | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch; known after `open`."""
        assert self._units is not None, "open() first"
        return self._units.count // self.shape.global_packs

    def open(self) -> None:
        """Open and check the set, and pack it unless packs are stored: the first touch of training data.

        Raises:
            UserError: a file is missing or damaged, or the set is too small for one step.
        """
        store = self._open_store()
        self._units = make_units(store, len(store), self.max_tokens, self._max_sequences, self._seed)
        first = np.asarray([0, self._units.count])
        if isinstance(store, BinnedStore) and self._max_sequences == 1:
            first = store.first
        self._order = EpochOrder(first, self._seed)
        if self.steps_per_epoch == 0:
            reason = f"its {self._units.count} packs are fewer than one step's {self.shape.global_packs}"
            raise UserError(self.info.folder, reason, "Lower BATCHSIZE or prepare more data")

    def _open_store(self) -> Store:
        return in_memory(open_store(self.info.folder))

    def next_step(self) -> HostBatches:
        """This rank's micro-batches of the next optimizer step."""
        assert self._units is not None, "open() first"
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self.batches_of, self._step)
        batches = self._prefetcher.next()
        self._step += 1
        return batches

    def batches_of(self, step: int) -> list[Batch]:
        """This rank's micro-batches of optimizer step ``step`` (from 0), a pure function of the step."""
        assert self._units is not None, "open() first"
        assert self._order is not None
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        batches = []
        for first, end in self.shape.micro_batches():
            start = step_in_epoch * self.shape.global_packs
            chosen = self._order(epoch, start + first, start + end)
            rows, counts = self._units.gather(chosen)
            if self.info.vocab_size is None and self.vocab_size is not None:
                check_tokens(rows, self.info, self.vocab_size)
            batches.append(make_batch(rows, counts, first, self.max_tokens))
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Position, JSON-able: the number of steps taken, and what it must be resumed with."""
        return {
            "step": self._step,
            "seed": self._seed,
            "global_packs": self.shape.global_packs,
            "max_tokens": self.max_tokens,
            "max_sequences_per_pack": self._max_sequences,
            "data": self.info.identity,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; the next step is the one after it.

        Raises:
            UserError: the position belongs to other data, another seed or another global batch.
        """
        for key, value in self.state_dict().items():
            if key != "step" and state.get(key) != value:
                reason = f"the saved position has {key} {state.get(key)}, this run has {value}"
                raise UserError(self.info.folder, reason, "Resume with the settings and data that the run started with")
        self.close()
        self._step = int(state["step"])

    def close(self) -> None:
        """Stop the background thread; `next_step` starts it again."""
        if self._prefetcher is not None:
            self._prefetcher.stop()
            self._prefetcher = None
