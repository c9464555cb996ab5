"""The shuffles of MosaicML Streaming: each fills an array with the sample at every place of an
epoch.

A shuffled order is made in place, in an array that may be a mapped file; apart from it, memory is
that of a block (py2s: of a canonical node).

Formulas: the API reference of Streaming's ``streaming.base.shuffle``, version 0.13; ``py1b`` of
version 0.7. The draws are those of ``numpy.random.default_rng``, in the same order.

Legend: N samples, F shards, K canonical nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mlbert.data.formats.ragged import offsets_of


@dataclass(frozen=True)
class _Spans:
    """Shards in a shuffled order, cut at the boundaries of canonical nodes into pieces of
    consecutive samples.
    """

    starts: np.ndarray  # int64 [pieces], first sample
    sizes: np.ndarray  # int64 [pieces], samples
    # int64 [K+1], canonical node k has the pieces first[k] up to first[k+1], exclusive.
    first: np.ndarray

    def node(self, node: int) -> slice:
        return slice(self.first[node], self.first[node + 1])

    def shuffled_in_nodes(self, generator: np.random.Generator) -> _Spans:
        """Return the pieces with those of each node in a random order."""
        order = np.arange(len(self.starts))
        for node in range(len(self.first) - 1):
            generator.shuffle(order[self.node(node)])
        return _Spans(self.starts[order], self.sizes[order], self.first)

    def fill(self, samples: np.ndarray) -> None:
        """Fill int [N] with the samples, piece by piece."""
        end = 0
        for start, size in zip(self.starts.tolist(), self.sizes.tolist(), strict=True):
            samples[end : end + size] = np.arange(start, start + size)
            end += size


def _spans(shard_sizes: np.ndarray, order: np.ndarray, canonical_nodes: int) -> _Spans:
    """Return the shards in this ``order`` (int64 [F]), cut at the boundaries of canonical nodes."""
    borders = offsets_of(shard_sizes[order])
    edges = np.arange(canonical_nodes + 1) * borders[-1] // canonical_nodes
    cuts = np.union1d(borders, edges)
    shard = np.searchsorted(borders, cuts[:-1], side="right") - 1
    starts = offsets_of(shard_sizes)[order[shard]] + cuts[:-1] - borders[shard]
    return _Spans(starts, np.diff(cuts), np.searchsorted(cuts, edges))


# Fills int [N] with the sample at every place, from int64 [F] sizes of shards, K, seed,
# epoch, block size.
Shuffle = Callable[[np.ndarray, np.ndarray, int, int, int, int], None]


def of_spans(mix: Callable[[np.ndarray, _Spans, np.random.Generator, int], None]) -> Shuffle:
    """Return the shuffle that orders the pieces of an epoch and then mixes their samples in place
    with ``mix``. The assignment of pieces to nodes depends only on the seed, so that a node needs
    the same shards in every epoch.
    """

    def shuffle(
        samples: np.ndarray, sizes: np.ndarray, nodes: int, seed: int, epoch: int, block_size: int
    ) -> None:
        order = np.arange(len(sizes))
        np.random.default_rng(seed).shuffle(order)
        generator = np.random.default_rng(seed + epoch)
        spans = _spans(sizes, order, nodes).shuffled_in_nodes(generator)
        spans.fill(samples)
        mix(samples, spans, generator, block_size)

    return shuffle


def naive(
    samples: np.ndarray, shard_sizes: np.ndarray, _: int, seed: int, epoch: int, __: int
) -> None:
    """Shuffle all samples."""
    samples[:] = np.arange(len(samples), dtype=samples.dtype)
    np.random.default_rng(seed + epoch).shuffle(samples)


def py1s(
    samples: np.ndarray, spans: _Spans, generator: np.random.Generator, block_size: int
) -> None:
    """Shuffle samples within each piece."""
    _shuffle_each(samples, spans.sizes, generator)


def py2s(
    samples: np.ndarray, shard_sizes: np.ndarray, nodes: int, seed: int, epoch: int, _: int
) -> None:
    """Shuffle samples within each shard, by the seed, before it is cut,
    and again within each piece.
    """
    order = np.arange(len(shard_sizes))
    fixed = np.random.default_rng(seed)
    generator = np.random.default_rng(seed + epoch)
    fixed.shuffle(order)
    _spans(shard_sizes, order, 1).fill(samples)
    _shuffle_each(samples, shard_sizes[order], fixed)
    # From here on, pieces are places of `samples`.
    spans = _spans(shard_sizes[order], np.arange(len(order)), nodes)
    for node, (begin, end) in enumerate(_node_ranges(spans)):
        mine = np.arange(len(spans.starts))[spans.node(node)]
        generator.shuffle(mine)
        before = samples[begin:end].copy()
        done = begin
        for start, size in zip(
            (spans.starts[mine] - begin).tolist(), spans.sizes[mine].tolist(), strict=True
        ):
            generator.shuffle(before[start : start + size])
            samples[done : done + size] = before[start : start + size]
            done += size


def py1b(
    samples: np.ndarray, spans: _Spans, generator: np.random.Generator, block_size: int
) -> None:
    """Shuffle samples within blocks of each canonical node."""
    for begin, end in _node_ranges(spans):
        for start in range(begin, end, block_size):
            generator.shuffle(samples[start : min(start + block_size, end)])


def py1br(
    samples: np.ndarray, spans: _Spans, generator: np.random.Generator, block_size: int
) -> None:
    """Shuffle as py1b, with blocks of 3/4 to 5/4 the size that start up to 3/4 of a block earlier,
    so that a node's second block may overlap its first.
    """
    least, most = _block_sizes(block_size)
    earlier = generator.integers(0, least, (len(spans.first) - 1,)).tolist()
    for (begin, end), shift in zip(_node_ranges(spans), earlier, strict=True):
        blocks = []
        done = begin
        while done < end:
            size = int(generator.integers(least, most))
            block = slice(max(begin, done - shift), min(end, done + size - shift))
            blocks.append(block)
            done += block.stop - block.start
        for (
            block
        ) in blocks:  # separate loop, because all sizes of a node are drawn before any shuffling
            generator.shuffle(samples[block])


def py1e(
    samples: np.ndarray, spans: _Spans, generator: np.random.Generator, block_size: int
) -> None:
    """Shuffle samples within each piece, then shift each by a uniform draw, so that a piece spreads
    over a block of 3/4 to 5/4 the size within its node. A piece larger than its block is not
    spread.
    """
    for node, (begin, end) in enumerate(_node_ranges(spans)):
        sizes = spans.sizes[spans.node(node)]
        _shuffle_each(samples[begin:end], sizes, generator)
        _spread(samples[begin:end], sizes, generator, block_size)


def _spread(
    mine: np.ndarray, sizes: np.ndarray, generator: np.random.Generator, block_size: int
) -> None:
    """Shift the samples of a node, int [n] with pieces of these ``sizes``, in place.

    A sample is put in its place once all samples that may precede it are shifted: those less than
    the largest reach behind it. Samples shifted to the same number keep their order, so that all
    processors make the same order.
    """
    least, most = _block_sizes(block_size)
    # of the samples that are not in their places yet
    places = [np.empty(0)]
    taken = [mine[:0]]
    start = done = 0
    for size in sizes.tolist():
        end = start + size
        reach = max(0.0, (int(generator.integers(least, most)) - size) / 2)
        low = max(-reach, -start)
        high = min(reach, len(mine) - end)
        places.append(np.arange(start, end, dtype=np.float64) + generator.uniform(low, high, size))
        taken.append(mine[start:end].copy())
        start = end
        if end < len(mine) and end - done < 2 * most:
            continue
        shifted, waiting = _in_order(places, taken)
        ready = len(waiting) if end == len(mine) else int(np.searchsorted(shifted, end - most / 2))
        mine[done : done + ready] = waiting[:ready]
        done += ready
        # views would keep all
        shifted = shifted[ready:].copy()
        waiting = waiting[ready:].copy()
        places = [shifted]
        taken = [waiting]


def _in_order(places: list[np.ndarray], samples: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Empty both lists, and return their numbers in the order of the places (float64)."""
    shifted = np.concatenate(places)
    waiting = np.concatenate(samples)
    places.clear()
    samples.clear()
    order = np.argsort(shifted)
    shifted = shifted[order]
    if (shifted[1:] == shifted[:-1]).any():
        order = order[np.lexsort((order, shifted))]
    return shifted, waiting[order]


def _shuffle_each(samples: np.ndarray, sizes: np.ndarray, generator: np.random.Generator) -> None:
    """Shuffle, in place, the first ``sizes[0]`` samples, then the next ``sizes[1]``, and so on."""
    start = 0
    for size in sizes.tolist():
        generator.shuffle(samples[start : start + size])
        start += size


def _node_ranges(spans: _Spans) -> list[tuple[int, int]]:
    """Return the first and one past the last place of each canonical node."""
    return list(pairwise(offsets_of(spans.sizes)[spans.first].tolist()))


def _block_sizes(block_size: int) -> tuple[int, int]:
    """Return the smallest size of a random block, and one more than the largest."""
    return int(0.75 * block_size), int(1.25 * block_size)
