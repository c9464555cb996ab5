"""TFRecords read by NVIDIA DALI's CPU pipeline (the ``nvidia-dali`` extra),
as a store and as a source of batches.

Returns the same sequences in the same order as `mlbert.data.formats.tfrecord_store.TFRecordStore`,
which finds and checks the records once. DALI then reads and decodes the requested records, with one
pipeline per request and an index of just these records. A request costs a few milliseconds, so
large requests pay off. Checksums are not checked again, but every value is validated. Use it only
to match an existing DALI setup; `TFRecordStore` is faster.

Legend: S requested sequences, W width of a list.
"""

from __future__ import annotations

import os
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from mlbert.data.formats.padded import column_problems, without_padding
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.tfrecord_plain import NAMES
from mlbert.data.formats.tfrecord_store import TFRecordStore
from mlbert.data.loading.packed import PackedSource
from mlbert.host.errors import UserError

_BATCH = 256  # records DALI decodes at a time
_THREADS = min(4, os.cpu_count() or 1)


def _import_dali() -> Any:
    try:
        for module in ("nvidia.dali.fn", "nvidia.dali.tfrecord"):
            import_module(module)
        return import_module("nvidia.dali")
    except ImportError as error:
        remedy = "Install it (pip install nvidia-dali-cuda120), or read the files without it"
        raise UserError(
            "package.missing", "nvidia-dali", f"cannot be imported ({error})", remedy
        ) from None


class DaliStore(TFRecordStore):
    """A `TFRecordStore` that reads records with DALI.

    Also raises UserError if DALI cannot be imported.
    """

    def __init__(self, folder: Path | str) -> None:
        self._dali = _import_dali()
        super().__init__(folder)

    def _gather(self, indices: np.ndarray) -> Ragged:
        wanted, place = np.unique(indices, return_inverse=True)
        rows = _without_padding(self._decode(wanted))
        if rows is None or (rows.lengths != self._index.lengths[wanted]).any():
            reason = "a record has changed since the index was made"
            raise UserError(
                "data.changed", self.info.folder, reason, "Restore the files and open them again"
            )
        return rows.take(place)

    def _decode(self, wanted: np.ndarray) -> dict[str, np.ndarray]:
        """Return each feature [S, W] by name for the records ``wanted`` (ascending)."""
        file = np.searchsorted(self._first, wanted, side="right") - 1
        with tempfile.TemporaryDirectory(prefix="mlbert-dali-") as folder:
            paths = []
            lists = []
            for number in np.unique(file).tolist():
                records = wanted[file == number]
                lines = zip(
                    self._index.starts[records].tolist(),
                    self._index.sizes[records].tolist(),
                    strict=True,
                )
                lists.append(f"{folder}/{number}")
                paths.append(str(self._paths[number]))
                Path(lists[-1]).write_text("".join(f"{start} {size}\n" for start, size in lines))
            return self._run(paths, lists, len(wanted))

    def _run(self, paths: list[str], lists: list[str], count: int) -> dict[str, np.ndarray]:
        batch = min(count, _BATCH)
        pipeline = self._dali.Pipeline(batch, _THREADS, device_id=None, prefetch_queue_depth=1)
        with pipeline:
            read = self._dali.fn.readers.tfrecord(
                path=paths, index_path=lists, features=self._features()
            )
            pipeline.set_outputs(*(read[name] for name in NAMES))
        try:
            pipeline.build()
            runs = [pipeline.run() for _ in range(-(-count // batch))]
        except RuntimeError as error:
            reason = (
                "DALI cannot read it: "
                f"{next(line for line in str(error).splitlines() if line.strip())}"
            )
            remedy = "Open the files again, or read them without DALI"
            raise UserError("data.damaged", self.info.folder, reason, remedy) from None
        columns = zip(NAMES, zip(*runs, strict=True), strict=True)
        return {
            name: np.concatenate([part.as_array() for part in parts])[:count]
            for name, parts in columns
        }

    def _features(self) -> dict[str, Any]:
        form = self._dali.tfrecord
        features = {}
        for name in NAMES:
            kind, absent = (form.float32, 0.0) if name == "masked_lm_weights" else (form.int64, 0)
            features[name] = form.FixedLenFeature([self._widths.of(name)], kind, absent)
        return features


class DaliSource(PackedSource):
    """A `PackedSource` that reads a folder of TFRecords with DALI: same batches, same arguments."""

    def _open_store(self) -> DaliStore:
        return DaliStore(self.info.folder)


def _without_padding(lists: dict[str, np.ndarray]) -> Ragged | None:
    """Return the sequences of padded lists [S, W], or None if a value is invalid."""
    if any(bad.any() for bad in column_problems(lists).values()):
        return None
    return without_padding(lists)
