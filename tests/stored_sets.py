"""Small stored sets for tests of what reads and rewrites them."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import numpy as np

from mlbert.data.formats.prepared import ShardWriter
from mlbert.data.formats.ragged import Ragged, offsets_of

VOCAB_SIZE = 500
MAX_PREDICTIONS = 5


def make_rows(lengths: np.ndarray, seed: int = 0) -> Ragged:
    """Random sequences of these lengths (each 5 or more), valid in every respect and all different."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int64)
    offsets = offsets_of(lengths)
    tokens = rng.integers(5, VOCAB_SIZE, offsets[-1]).astype(np.uint16)
    masked = np.clip(lengths // 7, 1, MAX_PREDICTIONS)
    positions = [np.sort(rng.choice(np.arange(1, n), m, replace=False)) for n, m in zip(lengths, masked, strict=True)]
    return Ragged(
        tokens=tokens,
        offsets=offsets,
        masked_positions=np.concatenate([np.empty(0), *positions]).astype(np.uint16),
        masked_labels=rng.integers(5, VOCAB_SIZE, masked.sum()).astype(np.uint16),
        masked_offsets=offsets_of(masked),
        first_lengths=(lengths // 2 + 1).astype(np.uint16),
        next_sentence=rng.integers(0, 2, len(lengths)).astype(np.uint8),
    )


def random_lengths(count: int, longest: int = 32, seed: int = 0) -> np.ndarray:
    """Lengths from 5 up, a quarter of them ``longest``."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(count) < 0.25, longest, rng.integers(5, longest + 1, count))


def write_set(folder: Path, rows: Ragged, shards: int = 3, longest: int = 32, vocabulary: str = "a" * 64) -> Path:
    """A prepared set of plain sequences."""
    writer = ShardWriter(folder, shards, "test")
    for index, chosen in enumerate(np.array_split(np.arange(len(rows)), shards)):
        writer.write_shard(index, rows.take(chosen))
    writer.finish(
        vocabulary={"sha256": vocabulary, "size": VOCAB_SIZE},
        max_seq_length=longest,
        max_predictions=MAX_PREDICTIONS,
        provenance={"options": {}},
    )
    return folder


def flip(path: Path, place: float = 0.5) -> None:
    """Change a bit of one byte of a file, at a part of its length."""
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 8
    path.write_bytes(data)


def names(rows: Ragged) -> list[str]:
    """A digest of everything that belongs to a sequence, for each of them."""
    result = []
    for s in range(len(rows)):
        one = rows.slice(s, s + 1)
        parts = (one.tokens, one.masked_positions, one.masked_labels, one.first_lengths, one.next_sentence)
        result.append(hashlib.sha256(b"|".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest())
    return result


def same_sequences(one: Ragged, other: Ragged) -> bool:
    """Whether both hold the same sequences, each as often, in any order."""
    return Counter(names(one)) == Counter(names(other))


def tree(folder: Path) -> dict[str, str]:
    """Every file below ``folder`` and its digest."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
