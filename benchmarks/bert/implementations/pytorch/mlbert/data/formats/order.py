"""Which sequences make a step, and in which order: numpy only, so that every program reads a set alike.

A unit is a pack of sequences, or one sequence. Packs are those that the set holds, or its sequences are packed once
when it is opened (by the seed). Every epoch takes all units in an order that is random by (seed, epoch) and cuts them
into optimizer steps; the incomplete last step is left out. Within a step units have numbers from 0, and a `Partition`
says which of them are whose (`mlbert.data.formats.order`), so the union over ranks does not depend on how many there
are.

Legend: S sequences, P units, B bins.

Which rank gets which of a step's units: the deals that `mlbert.data.formats.order` asks for.

contiguous    each rank its stretch of the step, whatever the lengths
by_length     the units of a group of ranks, micro-batch by micro-batch, longest first and to and fro, so that its ranks
              get about equally many tokens

The second needs no communication: lengths are known beforehand and every rank computes the same deal, of its own group
alone. Source of the method: "exchange padding" of NVIDIA's and Samsung's submissions to MLPerf Training (public
READMEs), which gather the sequences themselves; `mlbert.data.loading.source` does it their way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mlbert.data.formats.base import Store
from mlbert.data.formats.bins import BinnedStore
from mlbert.data.formats.packing import pack_lengths
from mlbert.data.formats.permutation import EvenSpread, Permutation
from mlbert.data.formats.ragged import Ragged, offsets_of
from mlbert.host.errors import UserError

ORDER_BLOCK = 1024  # positions of an epoch whose units are computed together
MOST_BLOCKS = 2  # positions that lie in more blocks are computed by themselves


@dataclass(frozen=True)
class RankSlice:
    """How an optimizer step is cut, and this rank's place."""

    units: int  # of one rank in one optimizer step, all micro-batches together
    accumulation: int  # micro-batches of one step; divides ``units``
    rank: int  # of this process
    world_size: int  # processes

    def __post_init__(self) -> None:
        if self.units < 1 or self.accumulation < 1 or self.units % self.accumulation:
            reason = f"{self.units} packs cannot be split into {self.accumulation} equal micro-batches"
            raise UserError("config.conflict", "GRADIENT_STEPS", reason, "Choose a divisor of BATCHSIZE")
        assert 0 <= self.rank < self.world_size

    @property
    def global_units(self) -> int:
        """Units of one optimizer step over all ranks."""
        return self.units * self.world_size


# From numbers of units within the step (int64 [P]) to the tokens of each (int64 [P]).
Lengths = Callable[[np.ndarray], np.ndarray]
# From a rank's share of a step, and a function that reads lengths (a deal that does not care never calls it), to the
# rank's units for each micro-batch, by their numbers in the step. Pure: every rank computes its own part, and together
# they take each unit once.
Partition = Callable[[RankSlice, Lengths], list[np.ndarray]]

# From sequences as they are stored, the epoch, and int64 [S] numbers that name each sequence within the epoch, to the
# same sequences with masks drawn anew. Pure, and by these numbers alone, so that the split over ranks changes no mask.
Mask = Callable[[Ragged, int, np.ndarray], Ragged]


@dataclass(frozen=True)
class Packs:
    """What steps are made of: packs, or single sequences."""

    count: int  # how many there are (P)
    # From int64 [P'] to their sequences, unit by unit, and int64 [P'] sequences of each.
    gather: Callable[[np.ndarray], tuple[Ragged, np.ndarray]]
    lengths: Callable[[np.ndarray], np.ndarray]  # from int64 [P'] to int64 [P'], tokens of each


def make_units(store: Store, num_sequences: int, max_tokens: int, max_sequences: int, seed: int) -> Packs:
    """The packs of a store's first ``num_sequences``: its own when these are all, else packed now, at most
    ``max_tokens`` and ``max_sequences`` each; single sequences when only one fits a pack."""
    if max_sequences == 1:

        def gather_single(chosen: np.ndarray) -> tuple[Ragged, np.ndarray]:
            return store.gather(chosen), np.ones(len(chosen), np.int64)

        return Packs(num_sequences, gather_single, store.lengths_of)
    if store.num_packs and num_sequences == len(store):

        def stored_lengths(chosen: np.ndarray) -> np.ndarray:  # reads the packs: a store knows lengths of sequences
            rows, counts = store.gather_packs(chosen)
            return np.diff(rows.offsets[offsets_of(counts)])

        return Packs(store.num_packs, store.gather_packs, stored_lengths)
    packs = pack_lengths(store.lengths[:num_sequences], max_tokens, max_sequences, seed)

    def members(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sequences of the packs, pack by pack, and how many each has."""
        starts, counts = packs.offsets[chosen], packs.offsets[chosen + 1] - packs.offsets[chosen]
        # Member k of all that are asked for lies in its pack at k less the members of the packs before.
        shift = np.repeat(starts - offsets_of(counts)[:-1], counts)
        return packs.order[np.arange(len(shift)) + shift], counts

    def gather(chosen: np.ndarray) -> tuple[Ragged, np.ndarray]:
        sequences, counts = members(chosen)
        return store.gather(sequences), counts

    def lengths(chosen: np.ndarray) -> np.ndarray:
        sequences, counts = members(chosen)
        return np.diff(offsets_of(store.lengths_of(sequences))[offsets_of(counts)])

    return Packs(packs.num_packs, gather, lengths)


def first_slots(rows: Ragged, sequences_per_unit: np.ndarray, units: np.ndarray, max_tokens: int) -> np.ndarray:
    """int64 [S]: where each sequence begins if every unit of the step had ``max_tokens`` slots, one behind the other;
    arguments as in `MicroBatchRows`."""
    first_of_unit = offsets_of(sequences_per_unit)[:-1]  # S for an empty unit at the end: offsets has that entry, too
    return rows.offsets[:-1] + np.repeat(units * max_tokens - rows.offsets[first_of_unit], sequences_per_unit)


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
        self.length = int(first[-1])  # positions of an epoch
        self._latest: tuple[int, int, np.ndarray] | None = None

    def __call__(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Units (int64 [n]) at these positions (int64 [n]) of an epoch."""
        block, within = np.divmod(positions, ORDER_BLOCK)
        blocks = np.unique(block).tolist()
        if len(blocks) > MOST_BLOCKS:
            return self._compute(epoch, positions)
        units = np.empty(len(positions), np.int64)
        for number in blocks:
            mine = block == number
            units[mine] = self._block(epoch, number)[within[mine]]
        return units

    def _block(self, epoch: int, block: int) -> np.ndarray:
        """`ORDER_BLOCK` positions at once: computing a few takes as long."""
        if self._latest is None or self._latest[:2] != (epoch, block):
            positions = np.arange(block * ORDER_BLOCK, min((block + 1) * ORDER_BLOCK, self.length))
            self._latest = (epoch, block, self._compute(epoch, positions))
        return self._latest[2]

    def _compute(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        if len(self._first) == 2:
            return Permutation(int(self._first[1]), (self._seed, epoch))(positions)
        # Slot s of the spread belongs to the bin whose range holds s; which unit of the bin, its own permutation says.
        slots = EvenSpread(int(self._first[-1]))(positions)
        bin_of = np.searchsorted(self._first, slots, side="right") - 1
        return self._of_bins(epoch, bin_of, slots - self._first[bin_of])

    def _of_bins(self, epoch: int, bin_of: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Units at ``places`` of the orders of their bins."""
        units = np.empty(len(bin_of), np.int64)
        for number in np.unique(bin_of).tolist():
            mine, start = bin_of == number, self._first[number]
            order = Permutation(int(self._first[number + 1] - start), (self._seed, epoch, number))
            units[mine] = start + order(places[mine])
        return units


class ComposedOrder(EpochOrder):
    """An epoch in which every stretch of sum(counts) positions, from the first on, holds exactly so many units of each
    bin, evenly mixed. It ends when the first bin has too few for another such stretch; the rest of the other bins is
    left out, and another epoch draws anew from all.

    Only the ratio of the counts matters: (12, 6) is (2, 1), in stretches of 3. So what a step holds does not depend on
    how many ranks share it, as long as the whole step's counts are the same.

    Args:
        first, seed: as of `EpochOrder`.
        counts: int64 [B], 1 or more of each bin.
    """

    def __init__(self, first: np.ndarray, counts: Sequence[int], seed: int) -> None:
        super().__init__(first, seed)
        ratio = np.asarray(counts, np.int64) // np.gcd.reduce(np.asarray(counts, np.int64))
        self._ratio = ratio
        self._bins, self._places = even_mix(ratio)
        self.length = int((np.diff(first) // ratio).min()) * len(self._bins)

    def _compute(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        stretch, slot = np.divmod(positions, len(self._bins))
        bin_of = self._bins[slot]
        return self._of_bins(epoch, bin_of, stretch * self._ratio[bin_of] + self._places[slot])


def even_mix(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An order of so many units of each bin (int64 [B]) in which unit k of n stands at (k + 1/2) / n of the whole.

    A stretch of it has of every bin its share, give or take B + 1 units. Returns int64 [sum of counts], the bin of each
    slot, and int64, its number k among those of its bin.
    """
    bins = np.repeat(np.arange(len(counts)), counts)
    numbers = np.arange(len(bins)) - np.repeat(offsets_of(counts)[:-1], counts)
    order = np.argsort((numbers + 0.5) / counts[bins], kind="stable")
    return bins[order], numbers[order]


@dataclass(frozen=True)
class MicroBatchRows:
    """The sequences of one micro-batch of one rank."""

    rows: Ragged  # unit by unit
    sequences_per_unit: np.ndarray  # int64 [P], sums to S
    units: np.ndarray  # int64 [P], numbers of the units within the step


class StepReader:
    """Reads this rank's part of any step: a pure function of the step's number, so a run resumes anywhere.

    Args:
        store: not empty.
        max_tokens: slots of a pack.
        max_sequences: most sequences of one pack; 1: single sequences, from all bins in proportion where the store has
            bins. Where packs are stored, they are taken as they are, unless this is 1.
        bin_counts: single sequences of each bin in every rank's share, which they sum to; None: in proportion.
        seed: of packing and order.
        partition: which units are whose.
        mask: draws masks anew; None: as stored.
    """

    def __init__(
        self,
        store: Store,
        share: RankSlice,
        *,
        max_tokens: int,
        max_sequences: int,
        bin_counts: Sequence[int] | None = None,
        seed: int,
        partition: Partition,
        mask: Mask | None,
    ) -> None:
        self._share, self._max_tokens, self._deal, self._mask = share, max_tokens, partition, mask
        self.units = make_units(store, len(store), max_tokens, max_sequences, seed)
        first = np.asarray([0, self.units.count])
        if isinstance(store, BinnedStore) and max_sequences == 1:
            first = store.first
        self._order = EpochOrder(first, seed) if bin_counts is None else ComposedOrder(first, bin_counts, seed)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch; 0 where the set is too small for one."""
        return self._order.length // self._share.global_units

    def __call__(self, step: int) -> list[MicroBatchRows]:
        """This rank's micro-batches of optimizer step ``step`` (from 0)."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        start = step_in_epoch * self._share.global_units  # position of the step's unit 0 in the epoch

        def lengths(units: np.ndarray) -> np.ndarray:
            return self.units.lengths(self._order(epoch, start + units))

        return [self._portion(epoch, start, units) for units in self._deal(self._share, lengths)]

    def _portion(self, epoch: int, start: int, units: np.ndarray) -> MicroBatchRows:
        rows, counts = self.units.gather(self._order(epoch, start + units))
        if self._mask is not None:
            rows = self._mask(rows, epoch, first_slots(rows, counts, start + units, self._max_tokens))
        return MicroBatchRows(rows, counts, units)


def even_parts(count: int, rank: int, world_size: int, most: int) -> list[np.ndarray]:
    """This rank's of ``count`` units, in as few parts of at most ``most`` as can be, none more than one unit larger."""
    first, end = (count * part // world_size for part in (rank, rank + 1))
    num_parts = -(-(end - first) // most)
    return np.array_split(np.arange(first, end), num_parts) if num_parts else []


def contiguous(share: RankSlice, lengths: Lengths | None = None) -> list[np.ndarray]:
    """The `Partition` that gives unit u to rank u // units, in order, whatever their lengths."""
    first = share.rank * share.units
    return np.split(np.arange(first, first + share.units), share.accumulation)


def by_length(group_size: int) -> Partition:
    """The `Partition` over groups of ``group_size`` ranks in a row, which divides the number of ranks: each micro-batch
    of a group holds what `contiguous` gives to it, dealt by `snake`. A rank's units come longest first."""

    def partition(share: RankSlice, lengths: Lengths) -> list[np.ndarray]:
        assert share.world_size % group_size == 0, "groups are equally large"
        place = share.rank % group_size
        first = (share.rank - place) * share.units
        held = np.arange(first, first + group_size * share.units).reshape(group_size, share.accumulation, -1)
        units = held.swapaxes(0, 1).reshape(share.accumulation, -1)  # of the group, by micro-batch
        tokens = lengths(units.reshape(-1)).reshape(units.shape)
        return [part[snake(sizes, group_size, place)] for part, sizes in zip(units, tokens, strict=True)]

    return partition


def snake(lengths: np.ndarray, parts: int, part: int) -> np.ndarray:
    """Which of some units go to ``part`` of ``parts``: int64, indices into ``lengths`` (tokens of each unit, int [n]).

    Sorted by length, longest first and equal ones in order, units go to 0, 1, ... parts-1, parts-1, ... 1, 0, 0, 1, ...
    """
    longest_first = np.argsort(-lengths, kind="stable")
    round_trip = 2 * parts
    at = np.arange(len(lengths)) % round_trip
    return longest_first[(at == part) | (at == round_trip - 1 - part)]
