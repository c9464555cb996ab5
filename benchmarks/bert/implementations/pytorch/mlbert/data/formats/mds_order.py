"""The order of an MDS set's samples: the elastically deterministic order of MosaicML Streaming.

An epoch's order depends only on the sizes of the shards, the seed, the epoch and the number of canonical nodes. It can
therefore continue on another number of ranks.

Formulas: the documentation of MosaicML Streaming ("Shuffling", "Elastic determinism") and the API reference of its
``streaming.base.shuffle`` and ``streaming.base.partition.orig``, version 0.13; ``py1b`` of version 0.7. The draws are
those of ``numpy.random.default_rng``, in the same order.

Legend: N samples, F shards, K canonical nodes, L places of an order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mlbert.data.formats.ragged import offsets_of, span_members
from mlbert.host.errors import UserError


def sample_order(
    shard_sizes: np.ndarray, *, shuffle: str | None, epoch: int, canonical_nodes: int, seed: int
) -> np.ndarray:
    """Return the samples of one epoch in the order in which all ranks together use them.

    A shuffled order (of places 0 to N - 1) is cut into K rows, which are read column by column. A row that is one short
    repeats its last place.

    Args:
        shard_sizes: int64 [F], samples of each shard, 1 or more.
        shuffle: a name in `SHUFFLES`, or None for the order of the set.
        canonical_nodes: K, which must stay the same when a run continues on another number of nodes.

    Returns:
        int64 [L] with L = K * ceil(N / K).

    Raises UserError if there are fewer samples than canonical nodes.
    """
    num_samples = int(shard_sizes.sum())
    if num_samples < canonical_nodes:
        reason = f"is more than the {num_samples} samples of the set"
        raise UserError("config.conflict", f"canonical_nodes {canonical_nodes}", reason, "Choose fewer")
    edges = np.arange(canonical_nodes + 1) * num_samples // canonical_nodes
    columns = np.arange(-(-num_samples // canonical_nodes))
    places = np.minimum(edges[:-1, None] + columns, edges[1:, None] - 1).T.ravel()
    if shuffle is None:
        return places
    block_size = max(4_000_000 // canonical_nodes, 1 << 18)  # Streaming's default
    return SHUFFLES[shuffle](shard_sizes, canonical_nodes, seed, epoch, block_size)[places]


@dataclass(frozen=True)
class _Spans:
    """Shards in a shuffled order, cut at the boundaries of canonical nodes into pieces of consecutive samples."""

    starts: np.ndarray  # int64 [pieces], first sample
    sizes: np.ndarray  # int64 [pieces], samples
    first: np.ndarray  # int64 [K+1], canonical node k has the pieces first[k] up to first[k+1], exclusive

    def node(self, node: int) -> slice:
        return slice(self.first[node], self.first[node + 1])

    def shuffled_in_nodes(self, generator: np.random.Generator) -> _Spans:
        """Return the pieces with those of each node in a random order."""
        order = np.arange(len(self.starts))
        for node in range(len(self.first) - 1):
            generator.shuffle(order[self.node(node)])
        return _Spans(self.starts[order], self.sizes[order], self.first)

    def samples(self) -> np.ndarray:
        """Return int64 [N], the samples piece by piece."""
        return span_members(self.starts, self.sizes)


def _spans(shard_sizes: np.ndarray, order: np.ndarray, canonical_nodes: int) -> _Spans:
    """Return the shards in this ``order`` (int64 [F]), cut at the boundaries of canonical nodes."""
    borders = offsets_of(shard_sizes[order])
    edges = np.arange(canonical_nodes + 1) * borders[-1] // canonical_nodes
    cuts = np.union1d(borders, edges)
    shard = np.searchsorted(borders, cuts[:-1], side="right") - 1
    starts = offsets_of(shard_sizes)[order[shard]] + cuts[:-1] - borders[shard]
    return _Spans(starts, np.diff(cuts), np.searchsorted(cuts, edges))


# (int64 [F] sizes of shards, K, seed, epoch, block size) -> int64 [N], the sample at every place.
Shuffle = Callable[[np.ndarray, int, int, int, int], np.ndarray]


def _of_spans(mix: Callable[[np.ndarray, _Spans, np.random.Generator, int], None]) -> Shuffle:
    """Return the shuffle that orders the pieces of an epoch and then mixes their samples in place with ``mix``. The
    assignment of pieces to nodes depends only on the seed, so that a node needs the same shards in every epoch."""

    def shuffle(shard_sizes: np.ndarray, canonical_nodes: int, seed: int, epoch: int, block_size: int) -> np.ndarray:
        order = np.arange(len(shard_sizes))
        np.random.default_rng(seed).shuffle(order)
        generator = np.random.default_rng(seed + epoch)
        spans = _spans(shard_sizes, order, canonical_nodes).shuffled_in_nodes(generator)
        samples = spans.samples()
        mix(samples, spans, generator, block_size)
        return samples

    return shuffle


def _naive(shard_sizes: np.ndarray, canonical_nodes: int, seed: int, epoch: int, block_size: int) -> np.ndarray:
    """Shuffle all samples."""
    return np.random.default_rng(seed + epoch).permutation(int(shard_sizes.sum()))


def _py1s(samples: np.ndarray, spans: _Spans, generator: np.random.Generator, block_size: int) -> None:
    """Shuffle samples within each piece."""
    _shuffle_each(samples, spans.sizes, generator)


def _py2s(shard_sizes: np.ndarray, canonical_nodes: int, seed: int, epoch: int, block_size: int) -> np.ndarray:
    """Shuffle samples within each shard, by the seed, before it is cut, and again within each piece."""
    order = np.arange(len(shard_sizes))
    fixed, generator = np.random.default_rng(seed), np.random.default_rng(seed + epoch)
    fixed.shuffle(order)
    scattered = _spans(shard_sizes, order, 1).samples()
    _shuffle_each(scattered, shard_sizes[order], fixed)
    # From here on, pieces index `scattered`.
    spans = _spans(shard_sizes[order], np.arange(len(order)), canonical_nodes)
    pieces = []
    for node in range(canonical_nodes):
        mine = np.arange(len(spans.starts))[spans.node(node)]
        generator.shuffle(mine)
        for piece in mine:
            samples = scattered[spans.starts[piece] : spans.starts[piece] + spans.sizes[piece]]
            generator.shuffle(samples)
            pieces.append(samples)
    return np.concatenate(pieces)


def _py1b(samples: np.ndarray, spans: _Spans, generator: np.random.Generator, block_size: int) -> None:
    """Shuffle samples within blocks of each canonical node."""
    for begin, end in _node_ranges(spans):
        for start in range(begin, end, block_size):
            generator.shuffle(samples[start : min(start + block_size, end)])


def _py1br(samples: np.ndarray, spans: _Spans, generator: np.random.Generator, block_size: int) -> None:
    """Shuffle as py1b, with blocks of 3/4 to 5/4 the size that start up to 3/4 of a block earlier, so that a node's
    second block may overlap its first."""
    least, most = _block_sizes(block_size)
    earlier = generator.integers(0, least, (len(spans.first) - 1,)).tolist()
    for (begin, end), shift in zip(_node_ranges(spans), earlier, strict=True):
        blocks, done = [], begin
        while done < end:
            size = int(generator.integers(least, most))
            block = slice(max(begin, done - shift), min(end, done + size - shift))
            blocks.append(block)
            done += block.stop - block.start
        for block in blocks:  # separate loop, because all sizes of a node are drawn before any shuffling
            generator.shuffle(samples[block])


def _py1e(samples: np.ndarray, spans: _Spans, generator: np.random.Generator, block_size: int) -> None:
    """Shuffle samples within each piece, then shift each by a uniform draw, so that a piece spreads over a block of 3/4
    to 5/4 the size within its node. A piece larger than its block is not spread."""
    for node, (begin, end) in enumerate(_node_ranges(spans)):
        sizes = spans.sizes[spans.node(node)]
        mine = samples[begin:end]
        _shuffle_each(mine, sizes, generator)
        places = np.arange(len(mine)).astype(np.float64)
        starts = offsets_of(sizes)[:-1]
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            reach = max(0.0, (int(generator.integers(*_block_sizes(block_size))) - size) / 2)
            low, high = max(-reach, -start), min(reach, len(mine) - start - size)
            places[start : start + size] += generator.uniform(low, high, size)
        mine[:] = mine[np.argsort(places)]


def _shuffle_each(samples: np.ndarray, sizes: np.ndarray, generator: np.random.Generator) -> None:
    """Shuffle, in place, the first ``sizes[0]`` samples, then the next ``sizes[1]``, and so on."""
    start = 0
    for size in sizes.tolist():
        generator.shuffle(samples[start : start + size])
        start += size


def _node_ranges(spans: _Spans) -> list[tuple[int, int]]:
    """Return the first and one past the last place of each canonical node."""
    edges = offsets_of(spans.sizes)[spans.first].tolist()
    return list(pairwise(edges))


def _block_sizes(block_size: int) -> tuple[int, int]:
    """Return the smallest size of a random block, and one more than the largest."""
    return int(0.75 * block_size), int(1.25 * block_size)


SHUFFLES: dict[str, Shuffle] = {
    "naive": _naive,
    "py1s": _of_spans(_py1s),
    "py2s": _py2s,
    "py1b": _of_spans(_py1b),
    "py1br": _of_spans(_py1br),
    "py1e": _of_spans(_py1e),
}
