"""Small MDS sets of texts, and the contents of host batches, for tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from mlbert.data.formats.mds import MdsWriter
from mlbert.data.loading.batches import HostBatch

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
    ".",
]


def random_texts(count: int, seed: int = 0, most_words: int = 60, empty: float = 0.1) -> list[str]:
    """Return random texts of at most ``most_words`` words; some are empty."""
    rng = random.Random(seed)
    return [
        "" if rng.random() < empty else " ".join(rng.choices(WORDS, k=rng.randint(1, most_words))) for _ in range(count)
    ]


def write_texts(folder: Path, texts: Sequence[str], size_limit: int = 3000, **options) -> Path:
    """Write a set of texts in several shards."""
    with MdsWriter(folder, {"text": "str"}, size_limit=size_limit, **options) as writer:
        for text in texts:
            writer.write({"text": text})
    return folder


Row = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


def rows(batch: HostBatch) -> list[Row]:
    """Return each sequence's ids, masked positions, labels and first dropout row."""
    parts = {name: part.tolist() for name, part in batch.arrays().items()}
    found = []
    bounds = parts["cu_seqlens"]
    masked = list(zip(parts["masked_positions"], parts["masked_labels"], strict=True))
    for first, end, row in zip(bounds[:-1], bounds[1:], parts["first_rows"], strict=True):
        mine = [(place - first, label) for place, label in masked if first <= place < end]
        ids, places = tuple(parts["ids"][first:end]), tuple(place for place, _ in mine)
        found.append((ids, places, tuple(label for _, label in mine), row))
    return found


def original(row: Row) -> tuple[int, ...]:
    """Return the ids before masking."""
    ids, places, labels, _ = row
    changed = dict(zip(places, labels, strict=True))
    return tuple(changed.get(place, number) for place, number in enumerate(ids))
