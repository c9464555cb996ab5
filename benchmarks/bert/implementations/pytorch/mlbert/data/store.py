"""What every stored data set looks like to the sources: sequences by index, in any order.

A `Store` may be our prepared set, TFRecords, or the HDF5 shards of other pipelines. `open_store` recognises the
kind by the folder's files. Looking at `StoreInfo` uses no sample, so it is allowed before ``run_start``: it takes a
manifest, or names, sizes and the head of the first file.

Legend: N sequences, S sequences asked for, P packs.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Protocol

import numpy as np

from mlbert.core.errors import UserError
from mlbert.data.manifest import MANIFEST, file_sha256, no_folder
from mlbert.data.ragged import Ragged

BINS = "bins.json"
ACCEPTED = (
    "a prepared set (manifest.json), bins (bins.json), TFRecord files, or HDF5 shards in NVIDIA's fixed-length, "
    "variable-length or packed form"
)


@dataclass(frozen=True)
class StoreInfo:
    """What is known of a set without reading a sample.

    Attributes:
        folder: where it lies.
        kind: "mlbert", "bins", "tfrecord", "nvidia-fixed", "nvidia-variable" or "nvidia-packed".
        identity: sha256 that names the data: of our manifest, or over the sorted file names and sizes of other kinds.
        max_seq_length, max_predictions: limits of one sequence, tokens.
        num_sequences: sequences in all; None when it takes reading to know.
        vocab_size, vocabulary_sha256: the vocabulary it was made with; None when the format does not say.
        max_pack_tokens: slots of a pack, when packs are stored; None for a set of single sequences.
    """

    folder: Path
    kind: str
    identity: str
    max_seq_length: int
    max_predictions: int
    num_sequences: int | None
    vocab_size: int | None
    vocabulary_sha256: str | None
    max_pack_tokens: int | None = None


class Store(Protocol):
    """An opened set. Reading is thread-safe and leaves no state."""

    info: StoreInfo

    def __len__(self) -> int:
        """Number of sequences (N)."""

    @property
    def lengths(self) -> np.ndarray:
        """int32 [N], tokens of every sequence."""

    def gather(self, indices: np.ndarray) -> Ragged:
        """The sequences ``indices`` (int64 [S]), in that order. Raises UserError naming file and record."""

    @property
    def num_packs(self) -> int:
        """Number of stored packs (P); 0 for a set of single sequences."""

    def gather_packs(self, indices: np.ndarray) -> tuple[Ragged, np.ndarray]:
        """The packs ``indices`` (int64): their sequences pack by pack, and int64 [packs] sequences of each."""


def describe(folder: Path | str) -> StoreInfo:
    """What is known of the set in ``folder`` without reading a sample (allowed before ``run_start``).

    Raises:
        UserError: no such folder, nothing in it that is a set, or a set that contradicts itself.
    """
    folder = Path(folder)
    if (folder / MANIFEST).exists():
        from mlbert.data.manifest import read_manifest
        from mlbert.data.shards import info_of

        return info_of(read_manifest(folder))
    if (folder / BINS).exists():
        from mlbert.data.bins import describe_bins

        return describe_bins(folder)
    return _foreign(folder).describe(folder)


def open_store(folder: Path | str, verify: bool | None = None) -> Store:
    """Open the set in ``folder``, whatever its kind.

    Args:
        folder: see `describe`.
        verify: re-read prepared sets and check every value; None: when they are small.

    Raises:
        UserError: as `describe`, and where a file is missing or damaged.
    """
    folder = Path(folder)
    if (folder / MANIFEST).exists():
        from mlbert.data.shards import ShardSet

        return ShardSet.open(folder, verify)
    if (folder / BINS).exists():
        from mlbert.data.bins import open_bins

        return open_bins(folder, verify)
    return _foreign(folder).open_folder(folder)


def _foreign(folder: Path) -> ModuleType:
    """The module that reads this folder's files; imported only now, each brings libraries of its own."""
    if not folder.is_dir():
        raise UserError(folder, no_folder(folder), f"Give {ACCEPTED}")
    if inside := sorted(path.parent.name for name in (MANIFEST, BINS) for path in folder.glob(f"*/{name}")):
        reason = f"is no data set, or not a finished one, but holds {', '.join(inside)}"
        raise UserError(folder, reason, "Give one of these folders")
    for name in ("tfrecord_store", "nvidia"):
        module = import_module(f"mlbert.data.{name}")
        if module.accepts(folder):
            return module
    raise UserError(folder, "holds no data set", f"Accepted: {ACCEPTED}")


def check_vocabulary(info: StoreInfo, vocab_file: Path) -> None:
    """Make sure that a set was made with this vocabulary file; a set that does not know its own passes.

    Raises:
        UserError: the file cannot be read, or it is another vocabulary.
    """
    found = file_sha256(vocab_file)
    if info.vocabulary_sha256 not in (None, found):
        reason = f"is not the vocabulary that {info.folder} was prepared with (sha256 {found[:12]}...)"
        raise UserError(vocab_file, reason, f"Use the one with sha256 {info.vocabulary_sha256[:12]}...")


def check_same_vocabulary(train: StoreInfo, evaluation: StoreInfo) -> None:
    """Make sure that two sets share one vocabulary, where both know theirs.

    Raises:
        UserError: they do not.
    """
    if None not in (known := {train.vocabulary_sha256, evaluation.vocabulary_sha256}) and len(known) > 1:
        reason = f"was prepared with another vocabulary than {train.folder}"
        raise UserError(evaluation.folder, reason, "Prepare both with the same vocab.txt")
