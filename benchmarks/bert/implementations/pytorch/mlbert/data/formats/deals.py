"""Which rank gets which of a step's units: the deals that `mlbert.data.formats.order` asks for.

contiguous    each rank its stretch of the step, whatever the lengths
by_length     the units of a group of ranks, micro-batch by micro-batch, longest first and to and fro, so that its ranks
              get about equally many tokens

The second needs no communication: lengths are known beforehand and every rank computes the same deal, of its own group
alone. Source of the method: "exchange padding" of NVIDIA's and Samsung's submissions to MLPerf Training (public
READMEs), which gather the sequences themselves; `mlbert.data.loading.exchange` does it their way.
"""

from __future__ import annotations

import numpy as np

from mlbert.data.formats.order import Deal, Lengths, StepShare


def contiguous(share: StepShare, lengths: Lengths | None = None) -> list[np.ndarray]:
    """The `Deal` that gives unit u to rank u // units, in order, whatever their lengths."""
    first = share.rank * share.units
    return np.split(np.arange(first, first + share.units), share.accumulation)


def by_length(group_size: int) -> Deal:
    """The `Deal` over groups of ``group_size`` ranks in a row, which divides the number of ranks: each micro-batch of a
    group holds what `contiguous` gives to it, dealt by `snake`. A rank's units come longest first."""

    def deal(share: StepShare, lengths: Lengths) -> list[np.ndarray]:
        assert share.world_size % group_size == 0, "groups are equally large"
        place = share.rank % group_size
        first = (share.rank - place) * share.units
        held = np.arange(first, first + group_size * share.units).reshape(group_size, share.accumulation, -1)
        units = held.swapaxes(0, 1).reshape(share.accumulation, -1)  # of the group, by micro-batch
        tokens = lengths(units.reshape(-1)).reshape(units.shape)
        return [part[snake(sizes, group_size, place)] for part, sizes in zip(units, tokens, strict=True)]

    return deal


def snake(lengths: np.ndarray, parts: int, part: int) -> np.ndarray:
    """Which of some units go to ``part`` of ``parts``: int64, indices into ``lengths`` (tokens of each unit, int [n]).

    Sorted by length, longest first and equal ones in order, units go to 0, 1, ... parts-1, parts-1, ... 1, 0, 0, 1, ...
    """
    longest_first = np.argsort(-lengths, kind="stable")
    round_trip = 2 * parts
    at = np.arange(len(lengths)) % round_trip
    return longest_first[(at == part) | (at == round_trip - 1 - part)]
