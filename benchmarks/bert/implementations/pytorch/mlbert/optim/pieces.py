"""Where parameters lie in a shard of the flat buffers, and the blocks that kernels walk over.

Legend: G parameters ("segments"); P pieces; B blocks, each within one piece; n elements of the shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlbert.optim.flat import Segment


@dataclass(frozen=True)
class Piece:
    """What a shard holds of one parameter, or a part of that.

    Attributes:
        start, stop: elements of the shard.
        owner: index of the parameter.
        decay: as in `Segment`.
    """

    start: int
    stop: int
    owner: int
    decay: bool


def pieces_of(parts: Sequence[tuple[int, int]], segments: Sequence[Segment]) -> list[Piece]:
    """Cuts a shard, made of the buffer's `parts` (ascending), at the borders of segments; padding is in no piece."""
    pieces, before, index = [], 0, 0
    for start, stop in parts:
        # The segment in which the last part ended may go on in this one.
        while index and segments[index].offset > start:
            index -= 1
        while index < len(segments) and segments[index].offset < stop:
            segment = segments[index]
            first, last = max(start, segment.offset), min(stop, segment.offset + segment.numel)
            if first < last:
                pieces.append(Piece(before + first - start, before + last - start, index, segment.decay))
            index += 1
        index = max(index - 1, 0)
        before += stop - start
    return pieces


@dataclass(frozen=True)
class Blocks:
    """Pieces cut into blocks: sums are made a block at a time, and the blocks of a parameter added in order.

    Attributes:
        offsets, lengths: int64 [B], elements of the shard.
        owners: int64 [B], ascending.
        decays: int64 [B], 1 where weight decay applies.
        first: int64 [G + 1], each parameter's first block; equal neighbours where the shard holds nothing of it.
    """

    offsets: np.ndarray
    lengths: np.ndarray
    owners: np.ndarray
    decays: np.ndarray
    first: np.ndarray

    @classmethod
    def of(cls, pieces: Sequence[Piece], num_owners: int, block: int) -> Blocks:
        """Blocks of at most `block` elements."""
        columns = [(p.start, p.stop, p.owner, p.decay) for p in pieces]
        starts, stops, owners, decays = np.array(columns, dtype=np.int64).reshape(-1, 4).T
        counts = -(-(stops - starts) // block)
        piece = np.repeat(np.arange(len(counts)), counts)
        # A block's number within its piece: its number less that of the piece's first one.
        within = (np.arange(len(piece)) - (np.cumsum(counts) - counts)[piece]) * block
        return cls(
            offsets=starts[piece] + within,
            lengths=np.minimum((stops - starts)[piece] - within, block),
            owners=owners[piece],
            decays=decays[piece],
            first=np.searchsorted(owners[piece], np.arange(num_owners + 1)),
        )
