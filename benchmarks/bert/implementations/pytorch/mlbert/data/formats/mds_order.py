"""The order of an MDS set's samples: the elastically deterministic order of MosaicML Streaming.

An epoch's order depends only on the sizes of the shards, the seed, the epoch and the number of canonical nodes. If the
number of nodes divides the canonical nodes, or is a multiple of them, every world takes the same samples in the same
global batch. It can therefore continue another world's epoch after any batch if the global batch size is the same.

Formulas: the documentation of MosaicML Streaming ("Shuffling", "Elastic determinism") and the API reference of its
``streaming.base.shuffle`` and ``streaming.base.partition.orig``, version 0.13; ``py1b`` of version 0.7. The draws are
those of ``numpy.random.default_rng``, in the same order.

Legend: N samples, F shards, K canonical nodes, P nodes, R ranks of a node, W workers of a rank, B samples of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mlbert.data.formats.ragged import offsets_of
from mlbert.host.errors import UserError

SEED = 9176  # Streaming's default
_PADDING = -1
_LEAST_BLOCK = 2  # samples: a shorter block has no sizes to draw from


@dataclass(frozen=True)
class StreamWorld:
    """The processes that share the samples."""

    nodes: int = 1
    ranks_per_node: int = 1
    workers_per_rank: int = 1
    batch_size: int = 1  # samples of a rank's batch, which a worker takes at a time


def sample_order(
    shard_sizes: np.ndarray,
    world: StreamWorld,
    *,
    shuffle: str | None,
    epoch: int = 0,
    first: int = 0,
    canonical_nodes: int = 1,
    seed: int = SEED,
    block_size: int | None = None,
) -> np.ndarray:
    """Return the samples of one epoch for every worker.

    Args:
        shard_sizes: int [F], samples of each shard, 1 or more.
        shuffle: a name in `SHUFFLES`, or None for the order of the set.
        first: samples of this epoch already used, over all ranks; rounded down to a multiple of P.
        canonical_nodes: K, which must stay the same when a run continues on another number of nodes.
        block_size: samples that py1b, py1br and py1e mix; by default Streaming's max(4,000,000 / K, 262,144).

    Returns:
        int64 [P, R, W, batches, B]. If N cannot be divided evenly, some samples occur twice. -1 is padding.

    Raises UserError if the shuffle is unknown, neither of K and P divides the other, there are fewer samples than
    canonical nodes, or ``first`` is not below N.
    """
    places = partition(int(np.sum(shard_sizes)), world, canonical_nodes, first)
    if shuffle is None:
        return places
    if shuffle not in SHUFFLES:
        raise UserError("config.choice", f"shuffle {shuffle!r}", "is not known", f"Choose {', '.join(SHUFFLES)}")
    if block_size is None:
        block_size = max(4_000_000 // canonical_nodes, 1 << 18)
    if block_size < _LEAST_BLOCK:
        raise UserError("config.range", f"block_size {block_size}", "is too small", f"Use {_LEAST_BLOCK} or more")
    shuffled = SHUFFLES[shuffle](np.asarray(shard_sizes, np.int64), canonical_nodes, seed, epoch, block_size)
    return np.where(places == _PADDING, _PADDING, shuffled[places])


def partition(num_samples: int, world: StreamWorld, canonical_nodes: int, first: int = 0) -> np.ndarray:
    """Return the places of an epoch's order (0 to N - 1) for every worker; result and errors as `sample_order`.

    The order is cut into K rows and read column by column. Places are assigned round-robin to the nodes, within a node
    to its ranks, and within a rank, in batches, to its workers. Rows and ranks that are short repeat samples.
    """
    nodes, ranks = world.nodes, world.ranks_per_node
    if nodes % canonical_nodes and canonical_nodes % nodes:
        reason = f"neither divides nor is divided by the {nodes} nodes"
        raise UserError(
            "config.conflict", f"canonical_nodes {canonical_nodes}", reason, "Choose a multiple of the nodes"
        )
    if num_samples < canonical_nodes:
        reason = f"is more than the {num_samples} samples of the set"
        raise UserError("config.conflict", f"canonical_nodes {canonical_nodes}", reason, "Choose fewer")
    if not 0 <= first < num_samples:
        raise UserError(
            "config.range", f"first sample {first}", f"is not in the set of {num_samples}", "Begin the next epoch"
        )
    in_turn = _rows(num_samples, canonical_nodes, nodes).T.ravel()
    by_node = in_turn[first - first % nodes :].reshape(-1, nodes).T
    by_rank = np.concatenate([by_node, _to_fill_ranks(by_node, ranks)], axis=1).reshape(nodes, -1, ranks)
    missing = -by_rank.shape[1] % (world.workers_per_rank * world.batch_size)
    padded = np.pad(by_rank, ((0, 0), (0, missing), (0, 0)), constant_values=_PADDING).transpose(0, 2, 1)
    batches = padded.reshape(nodes, ranks, -1, world.workers_per_rank, world.batch_size)
    return batches.transpose(0, 1, 3, 2, 4)


def _rows(num_samples: int, canonical_nodes: int, nodes: int) -> np.ndarray:
    """Return int64 [K, columns]; row k has the places from floor(N k / K) up to floor(N (k+1) / K), exclusive. A row
    that is one short repeats its last place. If P > K, columns are repeated until P / K divides their number."""
    edges = np.arange(canonical_nodes + 1) * num_samples // canonical_nodes
    columns = -(-num_samples // canonical_nodes)
    rows = np.minimum(edges[:-1, None] + np.arange(columns), edges[1:, None] - 1)
    share = max(1, nodes // canonical_nodes)
    if padding := -columns % share:
        end = columns + 1 - share  # the repeated columns end here
        if end < padding:
            reason = f"is too many for the {num_samples} samples of the set"
            raise UserError("config.conflict", f"{nodes} nodes", reason, "Use fewer nodes or more canonical ones")
        rows = np.concatenate([rows, rows[:, end - padding : end]], axis=1)
    return rows


def _to_fill_ranks(by_node: np.ndarray, ranks: int) -> np.ndarray:
    """Return the places (int64 [P, n]) to repeat so that all ranks of a node have equally many: those just before the
    last R - 1, or with very few samples, the first ones cyclically."""
    size = by_node.shape[1]
    missing = -size % ranks
    end = size + 1 - ranks
    if end >= missing:
        return by_node[:, end - missing : end]
    return by_node[:, np.arange(missing) % size]


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
        offsets = offsets_of(self.sizes)
        return np.arange(offsets[-1]) + np.repeat(self.starts - offsets[:-1], self.sizes)


def _spans(shard_sizes: np.ndarray, order: np.ndarray, canonical_nodes: int) -> _Spans:
    """Return the shards in this ``order`` (int64 [F]), cut at the boundaries of canonical nodes."""
    borders = offsets_of(shard_sizes[order])
    edges = np.arange(canonical_nodes + 1) * borders[-1] // canonical_nodes
    cuts = np.union1d(borders, edges)
    shard = np.searchsorted(borders, cuts[:-1], side="right") - 1
    starts = offsets_of(shard_sizes)[order[shard]] + cuts[:-1] - borders[shard]
    return _Spans(starts, np.diff(cuts), np.searchsorted(cuts, edges))


def _epoch_spans(
    shard_sizes: np.ndarray, canonical_nodes: int, seed: int, epoch: int
) -> tuple[_Spans, np.random.Generator]:
    """Return the pieces of one epoch and the generator that drew their order. The assignment to nodes depends only on
    the seed, so that a node needs the same shards in every epoch."""
    order = np.arange(len(shard_sizes))
    np.random.default_rng(seed).shuffle(order)
    generator = np.random.default_rng(seed + epoch)
    return _spans(shard_sizes, order, canonical_nodes).shuffled_in_nodes(generator), generator


def _naive(shard_sizes: np.ndarray, canonical_nodes: int, seed: int, epoch: int, block_size: int) -> np.ndarray:
    """Shuffle all samples."""
    return np.random.default_rng(seed + epoch).permutation(int(shard_sizes.sum()))


def _py1s(shard_sizes: np.ndarray, canonical_nodes: int, seed: int, epoch: int, block_size: int) -> np.ndarray:
    """Shuffle samples within each piece."""
    spans, generator = _epoch_spans(shard_sizes, canonical_nodes, seed, epoch)
    samples = spans.samples()
    _shuffle_each(samples, spans.sizes, generator)
    return samples


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


def _py1b(shard_sizes: np.ndarray, canonical_nodes: int, seed: int, epoch: int, block_size: int) -> np.ndarray:
    """Shuffle samples within blocks of each canonical node."""
    spans, generator = _epoch_spans(shard_sizes, canonical_nodes, seed, epoch)
    samples = spans.samples()
    for begin, end in _node_ranges(spans):
        for start in range(begin, end, block_size):
            generator.shuffle(samples[start : min(start + block_size, end)])
    return samples


def _py1br(shard_sizes: np.ndarray, canonical_nodes: int, seed: int, epoch: int, block_size: int) -> np.ndarray:
    """Shuffle as py1b, with blocks of 3/4 to 5/4 the size that start up to 3/4 of a block earlier, so that a node's
    second block may overlap its first."""
    spans, generator = _epoch_spans(shard_sizes, canonical_nodes, seed, epoch)
    samples = spans.samples()
    least, most = _block_sizes(block_size)
    earlier = generator.integers(0, least, (canonical_nodes,)).tolist()
    for (begin, end), shift in zip(_node_ranges(spans), earlier, strict=True):
        blocks, done = [], begin
        while done < end:
            size = int(generator.integers(least, most))
            block = slice(max(begin, done - shift), min(end, done + size - shift))
            blocks.append(block)
            done += block.stop - block.start
        for block in blocks:  # separate loop, because all sizes of a node are drawn before any shuffling
            generator.shuffle(samples[block])
    return samples


def _py1e(shard_sizes: np.ndarray, canonical_nodes: int, seed: int, epoch: int, block_size: int) -> np.ndarray:
    """Shuffle samples within each piece, then shift each by a uniform draw, so that a piece spreads over a block of 3/4
    to 5/4 the size within its node. A piece larger than its block is not spread."""
    spans, generator = _epoch_spans(shard_sizes, canonical_nodes, seed, epoch)
    samples = spans.samples()
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
    return samples


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


# (int64 [F] sizes of shards, K, seed, epoch, block size) -> int64 [N], the sample at every place.
Shuffle = Callable[[np.ndarray, int, int, int, int], np.ndarray]
SHUFFLES: dict[str, Shuffle] = {
    "naive": _naive,
    "py1s": _py1s,
    "py2s": _py2s,
    "py1b": _py1b,
    "py1br": _py1br,
    "py1e": _py1e,
}
