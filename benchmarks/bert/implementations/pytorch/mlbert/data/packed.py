"""Training batches from a prepared set: packed, globally shuffled, split over ranks, resumable at any step.

The set's sequences are packed once (by the seed). Every epoch shuffles all packs by (seed, epoch) and cuts them
into optimizer steps of ``world_size * packs_per_step`` packs; the incomplete last step is left out. Within a step,
pack g belongs to rank ``g // packs_per_step``, so the union over ranks does not depend on how many there are.

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
from mlbert.core.packing import Packs, pack_lengths
from mlbert.data.batch import Batch
from mlbert.data.ragged import Ragged
from mlbert.data.shards import ShardSet, read_manifest

IN_MEMORY_BYTES = 4 << 30  # smaller sets are held in memory as one piece
PREFETCHED_STEPS = 4


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


def gather_batch(rows: ShardSet, packs: Packs, chosen: np.ndarray, first_pack: int, max_tokens: int) -> Batch:
    """The batch of the packs ``chosen`` (int64 [P], into ``packs``); see `make_batch`."""
    starts, counts = packs.offsets[chosen], packs.offsets[chosen + 1] - packs.offsets[chosen]
    shift = np.repeat(starts - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
    sequences = packs.order[np.arange(counts.sum()) + shift]
    return make_batch(rows.gather(sequences), counts, first_pack, max_tokens)


class Prefetcher:
    """Calls ``make(step)`` for step, step + 1, ... in a background thread, a few steps ahead."""

    def __init__(self, make: Callable[[int], list[Batch]], first_step: int, ahead: int = PREFETCHED_STEPS) -> None:
        self._make = make
        self._queue: queue.Queue[list[Batch] | BaseException] = queue.Queue(ahead)
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

    def _put(self, item: list[Batch] | BaseException) -> None:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def next(self) -> list[Batch]:
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
    """Endless optimizer steps over a prepared set.

    Args:
        data_dir: folder with a manifest; only the manifest is read before `open`.
        packs_per_step, accumulation, rank, world_size: see `StepShape`.
        max_sequences_per_pack: most sequences of one pack.
        seed: packing and order.
        max_tokens: slots of a pack; None: the set's max_seq_length.

    Attributes:
        num_samples: sequences of the set.
        vocab_size: entries of its vocabulary.
        manifest, manifest_sha256: its manifest.
        max_tokens: slots of a pack.
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
    ) -> None:
        self.shape = StepShape(packs_per_step, accumulation, rank, world_size)
        self.data_dir = Path(data_dir)
        self.manifest = read_manifest(self.data_dir)
        self.max_tokens = max_tokens or self.manifest.max_seq_length
        if self.max_tokens < self.manifest.max_seq_length:
            reason = f"packs of {self.max_tokens} tokens are shorter than max_seq_length {self.manifest.max_seq_length}"
            raise UserError(self.data_dir, reason, "Use longer packs or data with shorter sequences")
        self._seed = seed
        self._max_sequences = max_sequences_per_pack
        self._step = 0
        self._rows: ShardSet | None = None
        self._packs: Packs | None = None
        self._prefetcher: Prefetcher | None = None
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def num_samples(self) -> int:
        """Sequences of the set."""
        return self.manifest.num_sequences

    @property
    def vocab_size(self) -> int:
        """Entries of the set's vocabulary."""
        return self.manifest.vocab_size

    @property
    def manifest_sha256(self) -> str:
        """sha256 of the manifest file; names the data in logs."""
        return self.manifest.sha256

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch; known after `open`."""
        assert self._packs is not None, "open() first"
        return self._packs.num_packs // self.shape.global_packs

    def open(self) -> None:
        """Open and check the shards and pack them: the first touch of training data.

        Raises:
            UserError: a shard is missing or damaged, or the set is too small for one step.
        """
        rows = ShardSet.open(self.data_dir)
        size = sum(int(shard["bytes"]) for shard in self.manifest.shards)
        self._rows = rows.load() if size <= IN_MEMORY_BYTES else rows
        self._packs = pack_lengths(self._rows.lengths, self.max_tokens, self._max_sequences, self._seed)
        if self.steps_per_epoch == 0:
            reason = f"its {self._packs.num_packs} packs are fewer than one step's {self.shape.global_packs}"
            raise UserError(self.data_dir, reason, "Lower BATCHSIZE or prepare more data")

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches of the next optimizer step."""
        assert self._rows is not None, "open() first"
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self.batches_of, self._step)
        batches = self._prefetcher.next()
        self._step += 1
        return batches

    def batches_of(self, step: int) -> list[Batch]:
        """This rank's micro-batches of optimizer step ``step`` (from 0), a pure function of the step."""
        assert self._rows is not None, "open() first"
        assert self._packs is not None
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        first_of_step = step_in_epoch * self.shape.global_packs
        order = self._epoch_order(epoch)
        return [
            gather_batch(
                self._rows, self._packs, order[first_of_step + first : first_of_step + end], first, self.max_tokens
            )
            for first, end in self.shape.micro_batches()
        ]

    def _epoch_order(self, epoch: int) -> np.ndarray:
        assert self._packs is not None
        if self._order is None or self._order[0] != epoch:
            seeds = np.random.SeedSequence([self._seed, epoch])
            order = np.random.Generator(np.random.PCG64(seeds)).permutation(self._packs.num_packs)
            self._order = (epoch, order)
        return self._order[1]

    def state_dict(self) -> dict[str, Any]:
        """Position, JSON-able: the number of steps taken, and what it must be resumed with."""
        return {
            "step": self._step,
            "seed": self._seed,
            "global_packs": self.shape.global_packs,
            "max_tokens": self.max_tokens,
            "max_sequences_per_pack": self._max_sequences,
            "manifest_sha256": self.manifest_sha256,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; the next step is the one after it.

        Raises:
            UserError: the position belongs to other data, another seed or another global batch.
        """
        for key, value in self.state_dict().items():
            if key != "step" and state.get(key) != value:
                reason = f"the saved position has {key} {state.get(key)}, this run has {value}"
                raise UserError(self.data_dir, reason, "Resume with the settings and data that the run started with")
        self.close()
        self._step = int(state["step"])

    def close(self) -> None:
        """Stop the background thread; `next_step` starts it again."""
        if self._prefetcher is not None:
            self._prefetcher.stop()
            self._prefetcher = None
