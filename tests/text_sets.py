"""Small MDS sets of texts, and the contents of host batches, for tests."""

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from mds_samples import write_samples
from mlbert.data.batches import HostBatch

WORDS = [
    "the",
    "of",
    "river",
    "Letter",
    "window,",
    "market",
    "forest-bridge",
    "unaffable",
    "naïve",
    "東京",
    "don't",
]
WORDS.append(".")


def random_texts(count: int, seed: int = 0, most_words: int = 60, empty: float = 0.1) -> list[str]:
    """Return random texts of at most ``most_words`` words; some are empty."""
    rng = random.Random(seed)
    return [
        "" if rng.random() < empty else " ".join(rng.choices(WORDS, k=rng.randint(1, most_words)))
        for _ in range(count)
    ]


def json_lines(texts: Iterable[str], **more: object) -> str:
    """Return a line of JSON for each text, each with ``more`` keys."""
    return "".join(json.dumps({"text": text, **more}) + "\n" for text in texts)


def write_texts(folder: Path, texts: Sequence[str], size_limit: int = 3000, **options) -> Path:
    """Write a set of texts in several shards."""
    return write_samples(
        folder,
        {"text": "str"},
        ({"text": text} for text in texts),
        size_limit=size_limit,
        **options,
    )


Row = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


def rows(batch: HostBatch) -> list[Row]:
    """Return each sequence's ids, masked positions, labels and first dropout row."""
    parts = {name: part.tolist() for name, part in batch.arrays().items()}
    found = []
    bounds = parts["cu_seqlens"]
    masked = list(zip(parts["masked_positions"], parts["masked_labels"], strict=True))
    for first, end, row in zip(bounds[:-1], bounds[1:], parts["first_rows"], strict=True):
        mine = [(place - first, label) for place, label in masked if first <= place < end]
        ids = tuple(parts["ids"][first:end])
        places = tuple(place for place, _ in mine)
        found.append((ids, places, tuple(label for _, label in mine), row))
    return found


def original(row: Row) -> tuple[int, ...]:
    """Return the ids before masking."""
    ids, places, labels, _ = row
    changed = dict(zip(places, labels, strict=True))
    return tuple(changed.get(place, number) for place, number in enumerate(ids))


def sample_order(sizes, shuffle, epoch, nodes, seed, block_size=None) -> np.ndarray:
    """Return an epoch's order as Streaming computes it, in arrays of the whole set."""
    block_size = block_size or max(4_000_000 // nodes, 1 << 18)
    order = plain_shuffle(sizes, shuffle, epoch, nodes, seed, block_size)
    parts = np.split(order, [node * len(order) // nodes for node in range(1, nodes)])
    longest = max(map(len, parts))
    return np.stack([np.pad(part, (0, longest - len(part)), "edge") for part in parts]).T.ravel()


def plain_shuffle(sizes, shuffle, epoch, nodes, seed, block_size) -> np.ndarray:
    fixed = np.random.default_rng(seed)
    generator = np.random.default_rng(seed + epoch)
    total = sum(sizes)
    if shuffle in (None, "naive"):
        return np.arange(total) if shuffle is None else generator.permutation(total)
    shards = np.split(np.arange(total), np.cumsum(sizes)[:-1])
    turn = np.arange(len(sizes))
    fixed.shuffle(turn)
    shards = [shards[number] for number in turn]
    if shuffle == "py2s":
        for shard in shards:
            fixed.shuffle(shard)
    edges = [node * total // nodes for node in range(nodes + 1)]
    borders = np.cumsum([len(shard) for shard in shards])
    pieces = np.split(np.concatenate(shards), sorted({*borders[:-1].tolist(), *edges[1:-1]}))
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    of_nodes = np.split(np.arange(len(pieces)), [ends.index(edge) + 1 for edge in edges[1:-1]])
    if shuffle != "py2s":  # there, pieces are shuffled before the next node's are ordered
        for numbers in of_nodes:
            generator.shuffle(numbers)
    shifts = (
        generator.integers(0, int(0.75 * block_size), nodes) if shuffle == "py1br" else [0] * nodes
    )
    made = []
    for numbers, shift in zip(of_nodes, shifts, strict=True):
        if shuffle == "py2s":
            generator.shuffle(numbers)
        made.append(
            _mixed(
                [pieces[number] for number in numbers], shuffle, int(shift), generator, block_size
            )
        )
    return np.concatenate(made)


def _mixed(pieces, shuffle, shift, generator, block_size) -> np.ndarray:
    """Return the samples of a canonical node."""
    if shuffle in ("py1s", "py2s", "py1e"):
        for piece in pieces:
            generator.shuffle(piece)
    mine = np.concatenate(pieces)
    least = int(0.75 * block_size)
    most = int(1.25 * block_size)
    if shuffle == "py1e":
        shifted = np.arange(len(mine)).astype(np.float64)
        first = 0
        for size in map(len, pieces):
            reach = max(0.0, (int(generator.integers(least, most)) - size) / 2)
            low = max(-reach, -first)
            high = min(reach, len(mine) - first - size)
            shifted[first : first + size] += generator.uniform(low, high, size)
            first += size
        return mine[np.argsort(shifted)]
    blocks = []
    done = 0
    while done < len(mine) and shuffle in ("py1b", "py1br"):
        size = block_size if shuffle == "py1b" else int(generator.integers(least, most))
        blocks.append(mine[max(0, done - shift) : done + size - shift])
        done += len(blocks[-1])
    for block in blocks:
        generator.shuffle(block)
    return mine
