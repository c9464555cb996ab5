"""Cut a rank's stream of sequences into optimizer steps and micro-batches.

A rank's lanes (`mlbert.data.loading.text_lanes`) give one sequence each in a round. The stream is
round 0 lane by lane, then round 1, and so on; a sequence's number counts them from 0.

    BySequences    a step takes as many sequences as its batch has; at full size that is one round
    ByTokens       a micro-batch takes the next sequences that fit its tokens: packing without packs

Legend: S sequences and T tokens of a micro-batch, U lanes of the rank.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple, Protocol

import numpy as np

from mlbert.config.batch_growth import BatchGrowth, Growth, TokenGrowth
from mlbert.data.loading.text_lanes import KnownPositions, Lanes, Pieces

_KEPT_ROUNDS = 4
_KEPT_STEPS = 64


class Bounds(NamedTuple):
    """The sequences of a micro-batch: numbers ``first`` to ``end`` - 1."""

    first: int
    end: int


class Cut(Protocol):
    """Which sequences each step takes."""

    def bounds(self, step: int) -> list[Bounds]:
        """Return the sequences of each micro-batch of a step, which follow one another."""

    def position(self, step: int) -> int:
        """Return the number of the first sequence of a step."""

    def tokens(self, step: int) -> int:
        """Return the tokens of this rank before a step; 0 if no size depends on them."""

    def go_to(self, step: int, position: int, tokens: int) -> None:
        """Continue with a step whose first sequence has this number, after so many tokens."""


class RankStream:
    """A rank's sequences by number.

    Args:
        lanes: of the rank.
        pieces: reads the sequences.
        mine: int64 [U], the numbers of the rank's lanes among all.
        all_lanes: lanes of all ranks.
    """

    def __init__(self, lanes: Lanes, pieces: Pieces, mine: np.ndarray, all_lanes: int) -> None:
        self._lanes = lanes
        self._pieces = pieces
        self._mine = mine
        self._all_lanes = all_lanes
        self._rounds: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self.round_length = len(mine)

    def read_round(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a round's tokens, uint16 or uint32 [T], and offsets, int64 [U+1]."""
        if number not in self._rounds:
            texts, pieces = self._lanes.take(number)
            self._rounds[number] = self._pieces.rows(texts, pieces)
            while len(self._rounds) > _KEPT_ROUNDS:
                self._rounds.popitem(last=False)
        return self._rounds[number]

    def read(self, bounds: Bounds, origin: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the tokens (uint16 or uint32 [T]), offsets (int64 [S+1]) and numbers (int64 [S])
        of sequences.

        The numbers tell the sequences of a step apart, over all ranks. They count from ``origin``,
        the first round of the step.
        """
        tokens = []
        lengths = []
        numbers = []
        first = bounds.first
        while first < bounds.end:
            number, place = divmod(first, self.round_length)
            stop = min(self.round_length, place + bounds.end - first)
            of_round, offsets = self.read_round(number)
            tokens.append(of_round[offsets[place] : offsets[stop]])
            lengths.append(np.diff(offsets[place : stop + 1]))
            numbers.append(self._mine[place:stop] + (number - origin) * self._all_lanes)
            first += stop - place
        ends = np.cumsum(np.concatenate(lengths))
        return (
            np.concatenate(tokens),
            np.concatenate([np.zeros(1, np.int64), ends]),
            np.concatenate(numbers),
        )


class BySequences:
    """Steps of as many sequences as their batch has.

    Args:
        growth: the rank's batches.
        micro_batch: most sequences of a micro-batch; the last one of a step may have fewer.
    """

    def __init__(self, growth: BatchGrowth, micro_batch: int) -> None:
        self._growth = growth
        self._micro_batch = micro_batch

    def bounds(self, step: int) -> list[Bounds]:
        """See `Cut.bounds`."""
        start = self._growth.before(step)
        stop = self._growth.before(step + 1)
        return [
            Bounds(first, min(first + self._micro_batch, stop))
            for first in range(start, stop, self._micro_batch)
        ]

    def position(self, step: int) -> int:
        """See `Cut.position`."""
        return self._growth.before(step)

    def tokens(self, step: int) -> int:
        """See `Cut.tokens`."""
        return 0

    def go_to(self, step: int, position: int, tokens: int) -> None:
        """See `Cut.go_to`: the position follows from the step."""


class _Before(NamedTuple):
    """What a rank has read before a step: sequences and their tokens."""

    sequences: int
    tokens: int


class ByTokens:
    """Steps of micro-batches that are filled up to a number of tokens.

    A micro-batch of r rows takes the next sequences of the stream while they have at most r times
    ``row_tokens`` tokens, and are at most r times ``row_sequences``. Each loses less than one
    sequence's space. There are no rows in memory: a batch is one stream of tokens.

    Args:
        stream: the rank's sequences, none longer than ``row_tokens``.
        growth: rows of each step, of this rank. If it grows with the tokens of all ranks, each rank
            counts its own: then it needs no message, and a rank whose rows are fuller has one row
            more a little earlier.
        world_size: ranks.
        micro_batch: most rows of a micro-batch.
        row_tokens: tokens of a row.
        row_sequences: sequences of a row on average, at most.
    """

    def __init__(
        self,
        stream: RankStream,
        growth: Growth,
        *,
        world_size: int,
        micro_batch: int,
        row_tokens: int,
        row_sequences: int,
    ) -> None:
        self._stream = stream
        self._growth = growth
        self._world_size = world_size
        self._micro_batch = micro_batch
        self._row_tokens = row_tokens
        self._row_sequences = row_sequences
        self._known = KnownPositions(_Before(0, 0), _KEPT_STEPS)
        self._lock = threading.Lock()  # batches are made in another thread

    def bounds(self, step: int) -> list[Bounds]:
        """See `Cut.bounds`."""
        with self._lock:
            found, _ = self._cut(step, self._before(step))
            return found

    def position(self, step: int) -> int:
        """See `Cut.position`."""
        with self._lock:
            return self._before(step).sequences

    def tokens(self, step: int) -> int:
        """See `Cut.tokens`."""
        with self._lock:
            return self._before(step).tokens

    def go_to(self, step: int, position: int, tokens: int) -> None:
        """See `Cut.go_to`."""
        with self._lock:
            self._known.restart(step, _Before(position, tokens))

    def _before(self, step: int) -> _Before:
        """Return what was read before a step, from the latest known step before it."""
        known, before = self._known.latest(step)
        for number in range(known, step):
            _, before = self._cut(number, before)
        return before

    def _rows(self, step: int, before: _Before) -> int:
        """Return the rows of a step."""
        if isinstance(self._growth, TokenGrowth):
            return self._growth.size(before.tokens * self._world_size)
        return self._growth.size(step)

    def _cut(self, step: int, before: _Before) -> tuple[list[Bounds], _Before]:
        """Return the sequences of each micro-batch of a step, and what was read after it."""
        found = []
        rows_left = self._rows(step, before)
        first = before.sequences
        tokens = before.tokens
        while rows_left:
            rows = min(rows_left, self._micro_batch)
            most_tokens = rows * self._row_tokens
            end, left = self._filled(first, most_tokens, rows * self._row_sequences)
            found.append(Bounds(first, end))
            first = end
            tokens += most_tokens - left
            rows_left -= rows
        after = _Before(first, tokens)
        self._known.remember(step + 1, after)
        return found, after

    def _filled(self, first: int, tokens: int, most: int) -> tuple[int, int]:
        """Return the end of the sequences from ``first`` on that fit these tokens and this
        number, and the tokens that are left.
        """
        end = first
        while end - first < most:
            number, place = divmod(end, self._stream.round_length)
            _, offsets = self._stream.read_round(number)
            fitting = int(np.searchsorted(offsets, offsets[place] + tokens, side="right")) - 1
            stop = min(fitting, place + most - (end - first))
            tokens -= int(offsets[stop] - offsets[place])
            end += stop - place
            if stop < self._stream.round_length:
                break
        return end, tokens
