"""Small stored sets for tests of their readers and converters."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mlbert.data.formats.prepared import ShardWriter
from mlbert.data.formats.ragged import DTYPES, Ragged, offsets_of

VOCAB_SIZE = 500
MAX_PREDICTIONS = 5


def make_rows(
    lengths: Sequence[int] | np.ndarray, seed: int = 0, vocab_size: int = VOCAB_SIZE
) -> Ragged:
    """Return random, valid and distinct sequences of these lengths (at least 5)."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int64)
    offsets = offsets_of(lengths)
    tokens = rng.integers(5, vocab_size, offsets[-1]).astype(np.uint16)
    masked = np.clip(lengths // 7, 1, MAX_PREDICTIONS)
    positions = [
        np.sort(rng.choice(np.arange(1, n), m, replace=False))
        for n, m in zip(lengths, masked, strict=True)
    ]
    return Ragged(
        tokens=tokens,
        offsets=offsets,
        masked_positions=np.concatenate([np.empty(0), *positions]).astype(np.uint16),
        masked_labels=rng.integers(5, vocab_size, masked.sum()).astype(np.uint16),
        masked_offsets=offsets_of(masked),
        first_lengths=(lengths // 2 + 1).astype(np.uint16),
        next_sentence=rng.integers(0, 2, len(lengths)).astype(np.uint8),
    )


def random_lengths(count: int, longest: int = 32, seed: int = 0) -> np.ndarray:
    """Return random lengths from 5; a quarter of them are ``longest``."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(count) < 0.25, longest, rng.integers(5, longest + 1, count))


def write_set(
    folder: Path,
    rows: Ragged,
    shards: int = 3,
    longest: int = 32,
    vocabulary="a" * 64,
    packs: list[int] | None = None,
) -> Path:
    """Write a prepared set; ``packs``: the offsets of packs of at most 64 tokens in the only
    shard.
    """
    writer = ShardWriter(folder, shards, "test")
    for index, chosen in enumerate(np.array_split(np.arange(len(rows)), shards)):
        writer.write_shard(index, rows.take(chosen), packs and np.asarray(packs))
    widths = {"max_seq_length": longest, "max_predictions": MAX_PREDICTIONS}
    limits = packs and {"max_tokens": 64, "max_sequences": 3}
    entries = {"sha256": vocabulary, "size": VOCAB_SIZE}
    writer.finish(vocabulary=entries, **widths, provenance={"options": {}}, packs=limits)
    return folder


def flip(path: Path, place: float = 0.5) -> None:
    """Flip a bit in a file, at a byte or (below 1) at a position relative to its length."""
    data = bytearray(path.read_bytes())
    data[int(place * len(data) if place < 1 else place)] ^= 8
    path.write_bytes(data)


def names(rows: Ragged) -> list[str]:
    """Return a digest of the full content of each sequence."""
    result = []
    for s in range(len(rows)):
        one = rows.slice(s, s + 1)
        parts = (
            one.tokens,
            one.masked_positions,
            one.masked_labels,
            one.first_lengths,
            one.next_sentence,
        )
        result.append(
            hashlib.sha256(
                b"|".join(np.ascontiguousarray(part).tobytes() for part in parts)
            ).hexdigest()
        )
    return result


def assert_same_rows(found: Ragged, expected: Ragged) -> None:
    """Assert that both contain the same sequences in the same order, as the same types."""
    for name, dtype in DTYPES.items():
        assert getattr(found, name).dtype == dtype, name
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)


def same_sequences(one: Ragged, other: Ragged) -> bool:
    """Return True if both contain the same sequences in any order."""
    return Counter(names(one)) == Counter(names(other))


def tree(folder: Path) -> dict[str, str]:
    """Return {file: digest} for every file in ``folder``."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
