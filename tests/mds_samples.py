"""MDS sets of masked samples, in the format of Streaming's converter for the benchmark's
Wikipedia.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mlbert.data.formats import padded as formats_padded
from mlbert.data.formats.mds import MdsWriter
from mlbert.data.formats.mds_samples import COLUMNS
from mlbert.data.formats.padded import Widths
from mlbert.data.formats.ragged import Ragged


def padded(rows: Ragged, tokens: int, predictions: int) -> dict[str, np.ndarray]:
    """Return all columns padded with zeros: int32 or float32, [N, tokens], [N, predictions]
    or [N, 1].
    """
    columns = {
        name: formats_padded.padded(rows, name, Widths(tokens, predictions)) for name in COLUMNS
    }
    return {
        name: values.astype("<f4" if "weights" in name else "<i4")
        for name, values in columns.items()
    }


def write_samples(
    folder: Path, columns: Mapping[str, str], samples: Iterable[Mapping[str, Any]], **options: Any
) -> Path:
    """Write any MDS set."""
    with MdsWriter(folder, columns, **options) as writer:
        for sample in samples:
            writer.write(sample)
    return folder


def write_columns(folder: Path, columns: Mapping[str, np.ndarray], **options: Any) -> Path:
    """Write the samples in shards of about 64 KiB."""
    samples = (
        {name: columns[name][index].tobytes() for name in COLUMNS}
        for index in range(len(columns["input_ids"]))
    )
    return write_samples(
        folder, dict.fromkeys(COLUMNS, "bytes"), samples, size_limit=1 << 16, **options
    )


def write_mds(
    folder: Path, rows: Ragged, tokens: int = 32, predictions: int = 5, **options: Any
) -> Path:
    """Write rows as such a set."""
    return write_columns(folder, padded(rows, tokens, predictions), **options)
