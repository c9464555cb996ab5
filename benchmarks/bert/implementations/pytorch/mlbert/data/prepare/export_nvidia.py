"""Export a stored set to HDF5 shards for NVIDIA's trainers: fixed, variable or packed
(`mlbert.data.formats.nvidia_shard`).

Legend: S sequences, R rows (sequences, or packs in the packed layout).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from mlbert.data.formats.manifest import json_sha256, make_folder
from mlbert.data.formats.nvidia_shard import RecordedLimits, item_dtype
from mlbert.data.formats.open import describe, open_store
from mlbert.data.formats.padded import NAMES, Widths, padded
from mlbert.data.formats.ragged import Ragged, offsets_of
from mlbert.data.formats.shard_file import write_hdf5
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.finished_output import keep_apart
from mlbert.data.prepare.import_store import gather_rows, opened
from mlbert.host.errors import UserError

LAYOUTS = ("fixed", "variable", "packed")
ROWS_A_FILE = 36_280  # as in the pipeline's 4,320 shards of the full set
MAX_ID = 32_767  # ids are stored as signed 16-bit numbers
_ATTRIBUTE = "mlbert_fingerprint"


@dataclass(frozen=True)
class NvidiaExportFile:
    """One file of an export: the rows ``first`` to ``end`` (exclusive) of the source
    that have the wanted lengths.
    """

    name: str  # below the output folder
    first: int
    end: int
    num_rows: int
    fingerprint: tuple[object, ...]  # everything that determines its bytes, JSON-serializable
    longest: int | None = None  # tokens, and the width of a fixed shard; None: that of the source
    shortest: int = 1


@dataclass(frozen=True)
class NvidiaExportJob:
    """Writes files of ``folder`` (any stored set) to ``out``; picklable."""

    folder: Path
    out: Path
    layout: str

    def is_written(self, wanted: NvidiaExportFile) -> bool:
        """Return whether an earlier run wrote the file with the same fingerprint."""
        try:
            with h5py.File(self.out / wanted.name, "r") as file:
                return bool(file.attrs[_ATTRIBUTE] == self._digest(wanted))
        except (OSError, KeyError):
            return False

    def make_file(self, wanted: NvidiaExportFile) -> None:
        """Write one file unless an earlier run has done so.

        Raises UserError: the source is damaged, or the layout cannot store it.
        """
        if self.is_written(wanted):
            return
        store = opened(self.folder)
        chosen = np.arange(wanted.first, wanted.end)
        longest = wanted.longest or store.info.max_seq_length
        if wanted.longest:
            lengths = store.lengths_of(chosen)
            chosen = chosen[(lengths >= wanted.shortest) & (lengths <= longest)]
        rows, counts = gather_rows(store, chosen, self.layout == "packed")
        self._refuse(rows)
        attributes: dict[str, object] = {_ATTRIBUTE: self._digest(wanted)}
        if self.layout == "fixed":
            columns = fixed_columns(rows, Widths(longest, store.info.max_predictions))
        else:
            columns = variable_columns(rows, counts, self.layout == "packed")
            row_tokens = store.info.max_pack_tokens if self.layout == "packed" else None
            limits = RecordedLimits(longest, store.info.max_predictions, row_tokens or longest)
            attributes |= limits.attributes()
        write_hdf5(self.out / wanted.name, attributes, columns)

    def run(self, files: Sequence[NvidiaExportFile], name: str, executor: Executor) -> None:
        """Write the files; ``name`` is for the progress bar."""
        unit = "packs" if self.layout == "packed" else "sequences"
        sizes = [file.num_rows for file in files]
        executor.run(self.make_file, files, name=name, where=self.out, sizes=sizes, unit=unit)

    def _digest(self, wanted: NvidiaExportFile) -> str:
        """Return the digest of everything that determines a file's bytes."""
        form = () if self.layout == "fixed" else ("records its limits",)
        return json_sha256((*wanted.fingerprint, *form))

    def _refuse(self, rows: Ragged) -> None:
        largest = max(int(rows.tokens.max(initial=0)), int(rows.masked_labels.max(initial=0)))
        if largest > MAX_ID:
            reason = f"has token id {largest}, but these shards store at most {MAX_ID}"
            raise UserError("data.unsupported", self.folder, reason, "Use it in its current format")
        if self.layout == "fixed" and (rows.masked_positions == 0).any():
            reason = "has a masked first token, which a fixed shard cannot store"
            raise UserError("data.unsupported", self.folder, reason, "Use --layout variable")


def shard_name(index: int, num_files: int) -> str:
    """Return a file name like those of NVIDIA's pipeline."""
    return f"part_{index:05d}_of_{num_files:05d}.hdf5"


def check_layout(layout: str, known: Sequence[str]) -> None:
    """Raise UserError if ``layout`` is not one of ``known``."""
    if layout not in known:
        raise UserError(
            "config.choice", "--layout", f"{layout} is not known", "Use a valid one", known
        )


def fixed_columns(rows: Ragged, widths: Widths) -> dict[str, np.ndarray]:
    """Return columns padded with zeros, int16 or int8 [S, max_seq_length]
    or [S, max_predictions]; labels are [S].
    """
    names = (name for name in NAMES if name != "masked_lm_weights")
    columns = {name: padded(rows, name, widths).astype(item_dtype(name)) for name in names}
    return {**columns, "next_sentence_labels": columns["next_sentence_labels"][:, 0]}


def variable_columns(rows: Ragged, counts: np.ndarray, packed: bool) -> dict[str, np.ndarray]:
    """Return columns with rows of varying length, as object arrays [R] of int16 or int8 arrays; row
    r has counts[r] sequences (int64 [R]).
    """
    first = offsets_of(counts)
    starts = rows.offsets[first]
    masked_starts = rows.masked_offsets[first]
    sequence = np.arange(len(rows.tokens)) - np.repeat(rows.offsets[:-1], rows.lengths)
    segments = sequence >= np.repeat(rows.first_lengths, rows.lengths)
    in_row = rows.offsets[:-1] - np.repeat(starts[:-1], counts)
    masked_counts = np.diff(rows.masked_offsets)
    positions = rows.masked_positions + np.repeat(in_row, masked_counts)
    columns = {
        "input_ids": _cut(rows.tokens, starts, "input_ids"),
        "segment_ids": _cut(segments, starts, "segment_ids"),
        "masked_lm_positions": _cut(positions, masked_starts, "masked_lm_positions"),
        "masked_lm_ids": _cut(rows.masked_labels, masked_starts, "masked_lm_ids"),
        "next_sentence_labels": rows.next_sentence.astype(np.int8),
    }
    if packed:
        columns["next_sentence_labels"] = _cut(rows.next_sentence, first, "next_sentence_labels")
        columns["packed_input_len"] = _cut(rows.lengths, first, "packed_input_len")
        columns["packed_masked_lm_len"] = _cut(masked_counts, first, "packed_masked_lm_len")
    return columns


def _cut(flat: np.ndarray, offsets: np.ndarray, name: str) -> np.ndarray:
    items = flat.astype(item_dtype(name))
    result = np.empty(len(offsets) - 1, h5py.vlen_dtype(items.dtype))
    for number, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        result[number] = items[start:end]
    return result


def export_nvidia(
    folder: Path, out: Path, layout: str, *, num_files: int = 0, executor: Executor = Executor()
) -> list[Path]:
    """Write any stored set as NVIDIA's HDF5 shards, in one of `LAYOUTS` ("packed" needs a set that
    stores packs) and in ``num_files`` files (0: one per 36,280 rows). Files of an interrupted run
    are kept. Raises UserError: the layout cannot store the set, or ``out`` cannot be written.
    """
    check_layout(layout, LAYOUTS)
    keep_apart(out, [folder])
    store = open_store(folder)
    if layout == "packed" and not store.num_packs:
        raise UserError(
            "data.format",
            folder,
            "contains single sequences",
            "Pack it first with `mlbert prepare pack`",
        )
    num_rows = store.num_packs if layout == "packed" else len(store)
    if num_files < 0 or num_files > num_rows:
        raise UserError(
            "config.range", "--files", f"{num_files} is out of range", f"Use 1 to {num_rows}"
        )
    num_files = num_files or max(1, round(num_rows / ROWS_A_FILE))
    job = NvidiaExportJob(folder, out, layout)
    identity = describe(folder).identity
    borders = [num_rows * index // num_files for index in range(num_files + 1)]
    files = [
        NvidiaExportFile(
            shard_name(index, num_files),
            first,
            end,
            end - first,
            (identity, layout, index, num_files),
        )
        for index, (first, end) in enumerate(itertools.pairwise(borders))
    ]
    wanted = [out / file.name for file in files]
    make_folder(out)
    for path in sorted(path for path in out.glob("part_*") if path not in wanted):
        if not path.name.endswith(".tmp"):
            reason = "belongs to a different export"
            raise UserError(
                "prepare.other-options", path, reason, "Choose another --out, or remove it"
            )
        path.unlink()
    job.run(files, "export", executor)
    return wanted
