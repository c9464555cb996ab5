"""Exchange of padding by communication: ranks read their own sequences, gather their group's, and deal them out.

The twin of reading what `mlbert.data.formats.deals.by_length` deals to a rank: the same sequences, read once in the
whole group instead of by whoever gets them, at the price of a collective a step. Both give the same batches, bit for
bit.

Per step every rank sends one array of 16-bit numbers, all its micro-batches one after the other:

    step number (4 numbers, low bits first); per micro-batch S, T, M (2 each), then
    lengths [S], masked tokens [S], first_lengths [S], next_sentence [S], tokens [T], masked_positions [M],
    masked_labels [M], sequences of each unit [P]

Which units they are needs no telling. Legend: P units, S sequences, T tokens, M masked tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from mlbert.data.formats.deals import contiguous, snake
from mlbert.data.formats.order import Portion, StepShare
from mlbert.data.formats.ragged import Ragged, offsets_of

WORD = np.dtype("<u2")
Read = Callable[[int], list[Portion]]  # from a step's number to this rank's micro-batches


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

    def __init__(self, read: Read, share: StepShare, group: ExchangeGroup, given_up: Callable[[], bool]) -> None:
        assert share.world_size % group.size == 0, "groups are equally large"
        assert share.rank % group.size == group.rank, "groups are ranks in a row"
        self._read, self._group, self._given_up = read, group, given_up
        first = share.rank - group.rank
        # units of each micro-batch of each of the group's ranks
        self._held = [contiguous(replace(share, rank=rank)) for rank in range(first, first + group.size)]

    def __call__(self, step: int) -> list[Portion]:
        """This rank's micro-batches of the step, all ranks of the group together."""
        words = _to_words(step, self._read(step))
        gathered = self._group.all_gather(words.view(np.uint8), self._given_up)
        of_ranks = [_from_words(step, data.view(WORD), held) for data, held in zip(gathered, self._held, strict=True)]
        return [self._dealt(parts) for parts in zip(*of_ranks, strict=True)]

    def _dealt(self, parts: Sequence[Portion]) -> Portion:
        """This rank's units of one micro-batch of the whole group."""
        rows, counts = (
            Ragged.concatenate([p.rows for p in parts]),
            np.concatenate([p.sequences_per_unit for p in parts]),
        )
        first = offsets_of(counts)
        chosen = snake(np.diff(rows.offsets[first]), self._group.size, self._group.rank)
        sizes = counts[chosen]
        sequences = np.arange(sizes.sum()) + np.repeat(first[chosen] - offsets_of(sizes)[:-1], sizes)
        return Portion(rows.take(sequences), sizes, np.concatenate([part.units for part in parts])[chosen])


def _to_words(step: int, parts: Sequence[Portion]) -> np.ndarray:
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


def _from_words(step: int, words: np.ndarray, held: Sequence[np.ndarray]) -> list[Portion]:
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
        parts.append(Portion(rows, columns[7].astype(np.int64), units))
    assert at == len(words), "more was sent than said"
    return parts
