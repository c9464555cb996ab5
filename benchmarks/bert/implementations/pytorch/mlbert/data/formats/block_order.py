"""An order of an epoch that is a formula: no table, no file, the same time for any set.

The samples, rotated by a number that is drawn for the epoch, are cut into blocks of `BLOCK`
neighbors. The blocks are permuted, and the samples of each block
(`mlbert.data.formats.permutation`). So ranks that read neighboring places read few shards, and
each place takes a few microseconds.

The last N mod `BLOCK` places have the samples that are left, whose block stays last.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mlbert.data.formats.permutation import Permutation

BLOCKS = "blocks"  # the name of this order among Streaming's
BLOCK = 1 << 18  # samples: the least block of Streaming's py1e
_KEPT_BLOCKS = 1024  # permutations; as many parts of a set may be read in parallel
# What a key permutes.
_OFFSET = 0
_ORDER = 1
_WITHIN = 2


class BlockOrder:
    """The order of one epoch.

    Args:
        num_samples: N.
        seed, epoch: select the order.
        block: samples of a block.
    """

    def __init__(self, num_samples: int, seed: int, epoch: int, block: int = BLOCK) -> None:
        self._num_samples = num_samples
        self._block = block
        self._key = (seed, epoch)
        self._blocks = num_samples // block  # full ones
        self._order = Permutation(self._blocks, (*self._key, _ORDER))
        draw = Permutation(num_samples, (*self._key, _OFFSET))
        self._offset = int(draw(np.zeros(1, np.int64))[0])
        self._within = lru_cache(_KEPT_BLOCKS)(self._permutation)

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Return the sample (int64 [n], 0 to N - 1) at each of these places (int64 [n], 0 to N -
        1).
        """
        blocks, within = np.divmod(places, self._block)
        found = np.empty(len(places), np.int64)
        for block in np.unique(blocks).tolist():
            mine = blocks == block
            first = block
            if block < self._blocks:
                first = int(self._order(np.array([block]))[0])
            found[mine] = first * self._block + self._within(block)(within[mine])
        return (found + self._offset) % self._num_samples

    def _permutation(self, block: int) -> Permutation:
        size = min(self._block, self._num_samples - block * self._block)
        return Permutation(size, (*self._key, _WITHIN, block))
