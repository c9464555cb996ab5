"""The sequences of each step and their order; NumPy only,
so that every program reads a set in the same way.

A unit is a pack of sequences, or one sequence. Packs are stored in the set, or made (by the seed)
when it is opened. An epoch is a random order (by seed and epoch) of all units, cut into optimizer
steps; an incomplete last step is dropped. Units of a step are numbered from 0, and a `Partition`
assigns them to ranks, so that the step's contents do not depend on the number of ranks:

    contiguous    each rank gets a contiguous range of the step, regardless of lengths
    by_length     within a group of ranks, the units of each micro-batch are assigned longest first
                  in alternating directions, so that ranks get about equally many tokens

`by_length` needs no communication: lengths are known in advance, and every rank computes the same
assignment for its group. The method is "exchange padding" of NVIDIA's and Samsung's submissions to
MLPerf Training (public READMEs), which gather the sequences themselves.

Legend: S sequences, P units, B bins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from mlbert.data.formats.base import Store, by_part
from mlbert.data.formats.bins import BinnedStore
from mlbert.data.formats.index_cache import IndexCache
from mlbert.data.formats.packing import PACKING_VERSION, Packing, pack_lengths
from mlbert.data.formats.permutation import Permutation, even_spread
from mlbert.data.formats.ragged import Ragged, offsets_of, span_members
from mlbert.host.errors import UserError

_SHARED_SEQUENCES = 1 << 20  # sequences from which the processes of a machine share one packing
_KEPT_PACKINGS = 4  # stored packings of a set, for example with different seeds


@dataclass(frozen=True)
class RankSlice:
    """One rank's slice of an optimizer step."""

    units: int  # per rank and optimizer step, including all micro-batches
    accumulation: int  # micro-batches per step; divides ``units``
    rank: int  # of this process
    world_size: int  # number of processes

    def __post_init__(self) -> None:
        if self.units < 1 or self.accumulation < 1 or self.units % self.accumulation:
            reason = (
                f"{self.units} packs cannot be split into {self.accumulation} equal micro-batches"
            )
            raise UserError(
                "config.conflict", "GRADIENT_STEPS", reason, "Choose a divisor of BATCHSIZE"
            )
        assert 0 <= self.rank < self.world_size

    @property
    def global_units(self) -> int:
        """Units per optimizer step over all ranks."""
        return self.units * self.world_size


# Numbers of units within the step (int64 [P]) -> the tokens of each (int64 [P]).
Lengths = Callable[[np.ndarray], np.ndarray]
# (a rank's slice, a function that reads lengths if needed) -> the rank's unit numbers for each
# micro-batch. Pure: every rank computes its own part, and together they take each unit once.
Partition = Callable[[RankSlice, Lengths], list[np.ndarray]]


@dataclass(frozen=True)
class Packs:
    """The units of a set: packs, or single sequences."""

    count: int  # number of units (P)
    # Unit numbers (int64 [P']) -> their sequences, unit by unit,
    # and the number in each (int64 [P']).
    gather: Callable[[np.ndarray], tuple[Ragged, np.ndarray]]
    # Unit numbers (int64 [P']) -> tokens of each (int64 [P']).
    lengths: Callable[[np.ndarray], np.ndarray]


def make_units(
    store: Store, num_sequences: int, max_tokens: int, max_sequences: int, seed: int
) -> Packs:
    """Return the units of a store's first ``num_sequences`` sequences: single sequences if
    ``max_sequences`` is 1, the stored packs if these are all sequences, otherwise new packs with at
    most ``max_tokens`` and ``max_sequences``.
    """
    if max_sequences == 1:

        def gather_single(chosen: np.ndarray) -> tuple[Ragged, np.ndarray]:
            return store.gather(chosen), np.ones(len(chosen), np.int64)

        return Packs(num_sequences, gather_single, store.lengths_of)
    if store.num_packs and num_sequences == len(store):
        return Packs(store.num_packs, store.gather_packs, store.pack_lengths)
    packs = _packing(store, num_sequences, max_tokens, max_sequences, seed)

    def members(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sequences of the packs, pack by pack, and the number in each."""
        counts = packs.offsets[chosen + 1] - packs.offsets[chosen]
        return packs.order[span_members(packs.offsets[chosen], counts)], counts

    def gather(chosen: np.ndarray) -> tuple[Ragged, np.ndarray]:
        sequences, counts = members(chosen)
        return store.gather(sequences), counts

    def lengths(chosen: np.ndarray) -> np.ndarray:
        sequences, counts = members(chosen)
        return np.diff(offsets_of(store.lengths_of(sequences))[offsets_of(counts)])

    return Packs(packs.num_packs, gather, lengths)


def _packing(
    store: Store, num_sequences: int, max_tokens: int, max_sequences: int, seed: int
) -> Packing:
    """Pack a store's first ``num_sequences`` sequences;
    if they are many, once for all processes of the machine.
    """

    def pack() -> Packing:
        return pack_lengths(store.lengths[:num_sequences], max_tokens, max_sequences, seed)

    if num_sequences < _SHARED_SEQUENCES:
        return pack()
    if store.info.is_listed:
        data = store.info.identity
    else:
        data = xxhash.xxh3_128_hexdigest(store.lengths.data)
    made_from = [PACKING_VERSION, data, num_sequences, max_tokens, max_sequences, seed]
    cache = IndexCache("packs", [store.info.folder], made_from, _KEPT_PACKINGS)
    return cache.once(Packing, ["order", "offsets"], lambda: vars(pack()))


def first_slots(
    rows: Ragged, sequences_per_unit: np.ndarray, units: np.ndarray, max_tokens: int
) -> np.ndarray:
    """Return int64 [S], the start of each sequence if every unit of the step had ``max_tokens``
    consecutive slots; arguments as in `MicroBatchRows`.
    """
    # May be S, for an empty last unit: a valid index of offsets.
    first_of_unit = offsets_of(sequences_per_unit)[:-1]
    return rows.offsets[:-1] + np.repeat(
        units * max_tokens - rows.offsets[first_of_unit], sequences_per_unit
    )


class EpochOrder:
    """The order of an epoch's units, computed on the fly without memory.

    Without bins the order is random by seed and epoch. With bins, every part of the order takes
    units from all bins in proportion, and only the order within a bin is random.

    Args:
        first: int64 [bins+1], first unit of each bin and the number of all units;
            [0, P] without bins.
        seed: the same seed gives the same orders.
    """

    def __init__(self, first: np.ndarray, seed: int) -> None:
        self._first = first
        self._seed = seed
        self.length = int(first[-1])  # positions of an epoch

    def __call__(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the units (int64 [n]) at these positions (int64 [n]) of an epoch."""
        if len(self._first) == 2:
            return Permutation(int(self._first[1]), (self._seed, epoch))(positions)
        # Slot s of the spread belongs to the bin whose range holds s;
        # the bin's permutation chooses the unit.
        return self._of_bins(epoch, even_spread(int(self._first[-1]), positions))

    def _of_bins(self, epoch: int, slots: np.ndarray) -> np.ndarray:
        """Return the units in these slots of the orders of all bins, bin after bin."""
        units = np.empty(len(slots), np.int64)
        for number, places, within in by_part(self._first, slots):
            start, end = self._first[number : number + 2].tolist()
            units[places] = start + Permutation(end - start, (self._seed, epoch, number))(within)
        return units


class ComposedOrder(EpochOrder):
    """An order in which each block of sum(counts) positions has exactly ``counts`` units of each
    bin, evenly mixed.

    The epoch ends when the first bin has too few units for another block. The rest of the other
    bins is dropped; the next epoch draws from all units again. Only the ratio of the counts
    matters: (12, 6) is treated as (2, 1), in blocks of 3. The contents of a step therefore do not
    depend on the number of ranks if the step's total counts are the same.

    Args:
        first, seed: see `EpochOrder`.
        counts: int64 [B], units of each bin, 1 or more.
    """

    def __init__(self, first: np.ndarray, counts: Sequence[int], seed: int) -> None:
        super().__init__(first, seed)
        ratio = np.asarray(counts, np.int64) // np.gcd.reduce(np.asarray(counts, np.int64))
        self._ratio = ratio
        self._bins, self._places = even_mix(ratio)
        self.length = int((np.diff(first) // ratio).min()) * len(self._bins)

    def __call__(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """See `EpochOrder`."""
        block, slot = np.divmod(positions, len(self._bins))
        bin_of = self._bins[slot]
        return self._of_bins(
            epoch, self._first[bin_of] + block * self._ratio[bin_of] + self._places[slot]
        )


def even_mix(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mix ``counts`` (int64 [B]) units of the bins evenly:
    unit k of n is placed at fraction (k + 1/2) / n.

    Any contiguous part has each bin's share to within B + 1 units. Returns int64 [sum of counts],
    the bin of each slot, and int64, its number k in the bin.
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
    """Reads this rank's part of any step, as a pure function of the step number,
    so that a run can resume anywhere.

    Args:
        store: must not be empty.
        max_tokens: slots of a pack.
        max_sequences: maximum sequences per pack. With 1, units are single sequences, taken from
            all bins in proportion if the store has bins. Otherwise stored packs are used unchanged,
            if there are any.
        bin_counts: number of single sequences from each bin in every rank's share;
            by default in proportion.
        seed: of packing and order.
        partition: assigns units to ranks.
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
    ) -> None:
        self._share = share
        self._partition = partition
        self.units = make_units(store, len(store), max_tokens, max_sequences, seed)
        first = np.asarray([0, self.units.count])
        if isinstance(store, BinnedStore) and max_sequences == 1:
            first = store.first
        self._order = (
            EpochOrder(first, seed)
            if bin_counts is None
            else ComposedOrder(first, bin_counts, seed)
        )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch; 0 if the set is too small for one."""
        return self._order.length // self._share.global_units

    def __call__(self, step: int) -> list[MicroBatchRows]:
        """Return this rank's micro-batches of optimizer step ``step`` (from 0)."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        # Position of the step's unit 0 in the epoch.
        start = step_in_epoch * self._share.global_units

        def at(units: np.ndarray) -> np.ndarray:
            return self._order(epoch, start + units)

        parts = self._partition(self._share, lambda units: self.units.lengths(at(units)))
        return [MicroBatchRows(*self.units.gather(at(units)), units) for units in parts]


def even_parts(count: int, rank: int, world_size: int, most: int) -> list[np.ndarray]:
    """Return this rank's share of ``count`` units in as few parts of at most ``most`` as possible;
    sizes differ by at most one.
    """
    first, end = (count * part // world_size for part in (rank, rank + 1))
    num_parts = -(-(end - first) // most)
    return np.array_split(np.arange(first, end), num_parts) if num_parts else []


def contiguous(share: RankSlice, lengths: Lengths | None = None) -> list[np.ndarray]:
    """Assign unit u to rank u // units, in order, regardless of lengths (a `Partition`)."""
    first = share.rank * share.units
    return np.split(np.arange(first, first + share.units), share.accumulation)


def by_length(group_size: int) -> Partition:
    """Return the `Partition` over groups of ``group_size`` consecutive ranks,
    which must divide the world size.

    Each micro-batch of a group has the same units as with `contiguous`, assigned to its ranks by
    `snake`. A rank's units are sorted longest first.
    """

    def partition(share: RankSlice, lengths: Lengths) -> list[np.ndarray]:
        assert share.world_size % group_size == 0, "groups must have equal sizes"
        place = share.rank % group_size
        first = (share.rank - place) * share.units
        held = np.arange(first, first + group_size * share.units).reshape(
            group_size, share.accumulation, -1
        )
        units = held.swapaxes(0, 1).reshape(share.accumulation, -1)  # of the group, by micro-batch
        tokens = lengths(units.reshape(-1)).reshape(units.shape)
        return [
            part[snake(sizes, group_size, place)] for part, sizes in zip(units, tokens, strict=True)
        ]

    return partition


def snake(lengths: np.ndarray, parts: int, part: int) -> np.ndarray:
    """Return the units of ``part`` of ``parts`` as int64 indices into ``lengths`` (tokens of each
    unit, int [n]).

    Units, stably sorted longest first, are assigned to parts 0, 1, ... parts-1, parts-1, ...
    1, 0, 0, 1, ...
    """
    longest_first = np.argsort(-lengths, kind="stable")
    round_trip = 2 * parts
    at = np.arange(len(lengths)) % round_trip
    return longest_first[(at == part) | (at == round_trip - 1 - part)]
