"""MDS sets of masked samples, in the format of Streaming's converter for the benchmark's Wikipedia."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mlbert.data.formats.mds import MdsWriter
from mlbert.data.formats.mds_samples import COLUMNS
from mlbert.data.formats.ragged import Ragged


def padded(rows: Ragged, tokens: int, predictions: int) -> dict[str, np.ndarray]:
    """Return all columns padded with zeros: int32 or float32, [N, tokens], [N, predictions] or [N, 1]."""
    kinds = dict.fromkeys(("input_ids", "input_mask", "segment_ids"), (tokens, "<i4"))
    kinds |= dict.fromkeys(("masked_lm_positions", "masked_lm_ids"), (predictions, "<i4"))
    kinds |= {"masked_lm_weights": (predictions, "<f4"), "next_sentence_labels": (1, "<i4")}
    columns = {name: np.zeros((len(rows), width), dtype) for name, (width, dtype) in kinds.items()}
    for index in range(len(rows)):
        one = rows.slice(index, index + 1)
        length, masked = len(one.tokens), len(one.masked_positions)
        columns["input_ids"][index, :length] = one.tokens
        columns["input_mask"][index, :length] = 1
        columns["segment_ids"][index, one.first_lengths[0] : length] = 1
        columns["masked_lm_positions"][index, :masked] = one.masked_positions
        columns["masked_lm_ids"][index, :masked] = one.masked_labels
        columns["masked_lm_weights"][index, :masked] = 1
    columns["next_sentence_labels"][:, 0] = rows.next_sentence
    return columns


def write_samples(
    folder: Path, columns: Mapping[str, str], samples: Iterable[Mapping[str, Any]], **options: Any
) -> Path:
    """Write any MDS set."""
    with MdsWriter(folder, columns, **options) as writer:
        for sample in samples:
            writer.write(sample)
    return folder


def write_columns(folder: Path, columns: Mapping[str, np.ndarray], compression: str | None = None) -> Path:
    """Write the samples in shards of about 64 KiB."""
    samples = ({name: columns[name][index].tobytes() for name in COLUMNS} for index in range(len(columns["input_ids"])))
    return write_samples(folder, dict.fromkeys(COLUMNS, "bytes"), samples, size_limit=1 << 16, compression=compression)


def write_mds(
    folder: Path, rows: Ragged, tokens: int = 32, predictions: int = 5, compression: str | None = None
) -> Path:
    """Write rows as such a set."""
    return write_columns(folder, padded(rows, tokens, predictions), compression)
