"""Write small HDF5 shards in NVIDIA's three formats, row by row, without the package's code."""

import itertools
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mlbert.data.formats.ragged import Ragged, offsets_of

CLS = 2
SEP = 3
VOCAB_SIZE = 500
WIDTH = 40
PREDICTIONS = 6
ENTRIES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *(f"w{number}" for number in range(5, VOCAB_SIZE)),
]


def write_vocabulary(path: Path) -> Path:
    path.write_text("\n".join(ENTRIES) + "\n")
    return path


def bert_rows(count: int, seed: int = 0, max_length: int = WIDTH, min_length: int = 5) -> Ragged:
    """Return random sequences [CLS] A [SEP] B [SEP] with a unique token 1;
    some have no masked token.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        length = int(rng.integers(min_length, max_length + 1))
        first = int(rng.integers(3, length - 1))
        tokens = rng.integers(5, VOCAB_SIZE, length)
        tokens[[0, first - 1, length - 1]] = CLS, SEP, SEP
        tokens[1] = 5 + number % (VOCAB_SIZE - 5)
        masked = int(rng.integers(0, min(PREDICTIONS, length // 5) + 1))
        positions = sorted(rng.choice(np.arange(1, length), masked, replace=False).tolist())
        labels = rng.integers(0, VOCAB_SIZE, masked).tolist()
        rows.append((tokens.tolist(), first, bool(rng.integers(2)), positions, labels))
    return Ragged.from_rows(rows)


def pack_counts(count: int, seed: int = 0) -> np.ndarray:
    """Return random pack sizes from 1 to 3 that sum to ``count``."""
    rng = np.random.default_rng(seed)
    counts = []
    left = count
    while left:
        counts.append(int(rng.integers(1, min(3, left) + 1)))
        left -= counts[-1]
    return np.asarray(counts, np.int64)


def columns_of(rows: Ragged) -> dict[str, list[np.ndarray]]:
    """Return the columns of the variable-length format, one array per sequence."""
    cut = rows.offsets[1:-1]
    masked_cut = rows.masked_offsets[1:-1]
    return {
        "input_ids": np.split(rows.tokens.astype(np.int16), cut),
        "segment_ids": [
            (np.arange(n) >= f).astype(np.int8)
            for n, f in zip(rows.lengths, rows.first_lengths, strict=True)
        ],
        "masked_lm_positions": np.split(rows.masked_positions.astype(np.int16), masked_cut),
        "masked_lm_ids": np.split(rows.masked_labels.astype(np.int16), masked_cut),
    }


def write_fixed(
    path: Path, rows: Ragged, width: int = WIDTH, predictions: int = PREDICTIONS, **options: Any
) -> Path:
    with h5py.File(path, "w") as file:
        columns = columns_of(rows) | {"input_mask": [np.ones(n, np.int8) for n in rows.lengths]}
        for name, values in columns.items():
            table = np.zeros(
                (len(rows), predictions if name.startswith("masked") else width), values[0].dtype
            )
            for row, value in zip(table, values, strict=True):
                row[: len(value)] = value
            file.create_dataset(name, data=table, **options)
        file.create_dataset(
            "next_sentence_labels", data=rows.next_sentence.astype(np.int8), **options
        )
    return path


def write_variable(path: Path, rows: Ragged, **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        columns = columns_of(rows)
        for name, values in columns.items():
            file.create_dataset(name, (len(rows),), h5py.vlen_dtype(values[0].dtype), **options)
        file.create_dataset(
            "next_sentence_labels", data=rows.next_sentence.astype(np.int8), **options
        )
        for number in range(len(rows)):
            for name, values in columns.items():
                file[name][number] = values[number]
    return path


def write_kind(kind: str, path: Path, rows: Ragged, seed: int = 0, **options: Any) -> Path:
    """Write any of the formats; packs have random sizes."""
    if kind == "packed":
        return write_packed(path, rows, pack_counts(len(rows), seed), **options)
    return {"fixed": write_fixed, "variable": write_variable}[kind](path, rows, **options)


def write_packed(path: Path, rows: Ragged, counts: np.ndarray, **options: Any) -> Path:
    """Write the packed format; ``counts`` int64 [packs] are sequences per pack,
    positions are relative to the pack.
    """
    packs = []
    for start, end in itertools.pairwise(offsets_of(counts)):
        part = rows.slice(start, end)
        pack = {name: np.concatenate(values) for name, values in columns_of(part).items()}
        masked = np.diff(part.masked_offsets)
        pack["masked_lm_positions"] += np.repeat(part.offsets[:-1], masked).astype(np.int16)
        pack |= {
            "packed_input_len": part.lengths.astype(np.int16),
            "packed_masked_lm_len": masked.astype(np.int16),
        }
        packs.append(pack | {"next_sentence_labels": part.next_sentence.astype(np.int8)})
    with h5py.File(path, "w") as file:
        for name, value in packs[0].items():
            table = np.empty(len(counts), object)
            table[:] = [pack[name] for pack in packs]
            file.create_dataset(name, data=table, dtype=h5py.vlen_dtype(value.dtype), **options)
    return path
