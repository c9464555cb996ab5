"""What every stored data set looks like to its readers: sequences by index, in any order.

A `Store` may be our prepared set, TFRecords, MDS sets, or the HDF5 shards of other pipelines;
`mlbert.data.formats.open` recognises which. Looking at `StoreInfo` uses no sample, so it is allowed before
``run_start``: it takes a manifest, or names, sizes and the head of the first file.

Legend: N sequences, S sequences asked for, P packs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from mlbert.data.formats.ragged import Ragged


@dataclass(frozen=True)
class BinInfo:
    """One length bin of a set."""

    name: str  # of its folder or files
    num_sequences: int | None  # None when it takes reading to know


@dataclass(frozen=True)
class StoreInfo:
    """What is known of a set without reading a sample."""

    folder: Path  # where it lies
    kind: str  # "mlbert", "bins", "mds", "tfrecord", "nvidia-fixed", "nvidia-variable" or "nvidia-packed"
    identity: str  # sha256 that names the data: of our manifest or index, or over the sorted names and sizes of files
    max_seq_length: int  # of one sequence, at most, tokens
    max_predictions: int  # masked tokens of one sequence, at most
    num_sequences: int | None  # sequences in all; None when it takes reading to know
    vocab_size: int | None  # of the vocabulary it was made with; None when the format does not say
    vocabulary_sha256: str | None  # likewise
    max_pack_tokens: int | None = None  # slots of a pack, when packs are stored; None for a set of single sequences
    num_packs: int | None = None  # of a set that stores packs; None where it takes reading to know
    bins: tuple[BinInfo, ...] = ()  # shortest sequences first; none where the set is not cut by length
    is_listed: bool = True  # `identity` stands for the contents; False: for names and sizes alone
    content: str | None = (
        None  # sha256 of such files' contents, see `mlbert.data.formats.index_cache`; None: nobody hashed them
    )

    @property
    def known_as(self) -> str:
        """What names the data in a log."""
        if self.is_listed:
            return f"sha256:{self.identity}"
        return named_by_files(self.identity, self.content)

    def sequences_per_pack(self, max_sequences: int) -> float | None:
        """Of what steps take of the set where at most ``max_sequences`` share a pack; None: only packing tells."""
        if max_sequences == 1:
            return 1.0
        return round(self.num_sequences / self.num_packs, 4) if self.num_packs and self.num_sequences else None


def named_by_files(names_and_sizes: str, content: str | None) -> str:
    """What names files without a manifest in a log: their contents where these were hashed (sha256 both)."""
    return f"content:sha256:{content}" if content else f"names-and-sizes:sha256:{names_and_sizes}"


class Store(Protocol):
    """An opened set. Reading is thread-safe and leaves no state."""

    info: StoreInfo

    def __len__(self) -> int:
        """Number of sequences (N)."""

    @property
    def lengths(self) -> np.ndarray:
        """int32 [N], tokens of every sequence."""

    def lengths_of(self, indices: np.ndarray) -> np.ndarray:
        """int64 [S], tokens of the sequences ``indices`` (int64 [S]), without reading all lengths where that can be."""

    def gather(self, indices: np.ndarray) -> Ragged:
        """The sequences ``indices`` (int64 [S]), in that order. Raises UserError naming file and record."""

    @property
    def num_packs(self) -> int:
        """Number of stored packs (P); 0 for a set of single sequences."""

    def gather_packs(self, indices: np.ndarray) -> tuple[Ragged, np.ndarray]:
        """The packs ``indices`` (int64): their sequences pack by pack, and int64 [packs] sequences of each."""
