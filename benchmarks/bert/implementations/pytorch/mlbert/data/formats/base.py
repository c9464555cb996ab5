"""The common interface of all stored data sets: sequences by index, in any order.

A `Store` may be a prepared set, TFRecords, an MDS set, or HDF5 shards from other pipelines;
`mlbert.data.formats.open` detects the format. Building a `StoreInfo` uses no samples, only a
manifest, or names, sizes and the head of the first file, so it is allowed before ``run_start``.

Legend: N sequences, S requested sequences, P packs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from mlbert.data.formats.file_map import FileMap
from mlbert.data.formats.ragged import Ragged


@dataclass(frozen=True)
class BinInfo:
    """One length bin of a set."""

    name: str  # of its folder or files
    num_sequences: int | None  # None if unknown before reading


@dataclass(frozen=True)
class StoreInfo:
    """Facts about a set that are known without reading a sample."""

    folder: Path
    # "mlbert", "bins", "mds", "tfrecord", "nvidia-fixed", "nvidia-variable" or "nvidia-packed"
    kind: str
    identity: str  # sha256 of the manifest or index, or of the sorted names and sizes of the files
    max_seq_length: int  # maximum tokens of a sequence
    max_predictions: int  # maximum masked tokens of a sequence
    num_sequences: int | None = None  # None if unknown before reading
    # Size of the set's vocabulary; None if the format does not record it.
    vocab_size: int | None = None
    vocabulary_sha256: str | None = None  # likewise
    lower_case: bool | None = None  # whether the texts were lowercased; likewise
    max_pack_tokens: int | None = None  # slots of a pack; None for a set of single sequences
    num_packs: int | None = None  # of a set that stores packs; None if unknown before reading
    bins: tuple[
        BinInfo, ...
    ] = ()  # shortest sequences first; empty if the set is not split by length
    # True if `identity` covers the contents; False if it covers only names and sizes.
    is_listed: bool = True
    # Sha256 of the contents if they were hashed, see `mlbert.data.formats.index_cache`.
    content: str | None = None

    @property
    def known_as(self) -> str:
        """The data's name in logs."""
        if self.is_listed:
            return f"sha256:{self.identity}"
        return named_by_files(self.identity, self.content)

    def sequences_per_pack(self, max_sequences: int) -> float | None:
        """Return the mean number of sequences per pack with at most ``max_sequences`` in a pack, or
        None if it is unknown before packing.
        """
        if max_sequences == 1:
            return 1.0
        return (
            round(self.num_sequences / self.num_packs, 4)
            if self.num_packs and self.num_sequences
            else None
        )


def named_by_files(names_and_sizes: str, content: str | None) -> str:
    """Return the log name of files without a manifest; uses the contents if they were hashed.

    Arguments are sha256.
    """
    return f"content:sha256:{content}" if content else f"names-and-sizes:sha256:{names_and_sizes}"


def by_part(first: np.ndarray, indices: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield number p of each part with some of ``indices``, their places in ``indices``, and their
    numbers in the part; part p has the indices ``first[p]`` up to ``first[p + 1]``, exclusive.
    """
    part_of = np.searchsorted(first, indices, side="right") - 1
    order = np.argsort(part_of, kind="stable")
    parts, starts = np.unique(part_of[order], return_index=True)
    # Without indices there is one empty piece and no part.
    for part, places in zip(parts.tolist(), np.split(order, starts[1:]), strict=False):
        yield part, places, indices[places] - first[part]


def gather_parts(
    first: np.ndarray, indices: np.ndarray, gather: Callable[[int, np.ndarray], Ragged]
) -> Ragged:
    """Return the sequences ``indices``, in that order, with one call of ``gather`` (part, numbers
    in it) for each part; see `by_part`.
    """
    order = [np.empty(0, np.int64)]
    parts = []
    for part, places, within in by_part(first, indices):
        order.append(places)
        parts.append(gather(part, within))
    if len(parts) == 1:
        return parts[0]
    return Ragged.concatenate(parts).take(np.argsort(np.concatenate(order)))


class Store(Protocol):
    """An opened set. Reading is thread-safe and stateless."""

    info: StoreInfo
    num_packs: int  # stored packs (P); 0 for a set of single sequences

    def __len__(self) -> int:
        """Return the number of sequences (N)."""

    @property
    def lengths(self) -> np.ndarray:
        """int32 [N], tokens of every sequence."""

    def lengths_of(self, indices: np.ndarray) -> np.ndarray:
        """Return int64 [S], tokens of the sequences ``indices`` (int64 [S]);
        avoids reading all lengths if possible.
        """

    def gather(self, indices: np.ndarray) -> Ragged:
        """Return the sequences ``indices`` (int64 [S]), in that order.

        Raises UserError naming file and record.
        """

    def gather_packs(self, indices: np.ndarray) -> tuple[Ragged, np.ndarray]:
        """Return the sequences of the packs ``indices`` (int64), pack by pack,
        and the number in each (int64 [packs]).
        """
        raise AssertionError("a set of single sequences")

    def pack_lengths(self, indices: np.ndarray) -> np.ndarray:
        """Return int64 [packs], tokens of the packs ``indices`` (int64),
        without reading their sequences.
        """
        raise AssertionError("a set of single sequences")

    def expect_random_reads(self) -> None:
        """Turn off the kernel's read-ahead: from now on, a few sequences are read at a time,
        in random order.
        """
        return


class IndexedStore(Store):
    """A store that knows the length of every sequence when it is opened."""

    num_packs = 0
    gathered: int  # sequences read at a time
    _lengths: np.ndarray  # of integers [N]
    _map: FileMap

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> np.ndarray:
        """int32 [N], tokens of every sequence."""
        return self._lengths.astype(np.int32)

    def lengths_of(self, indices: np.ndarray) -> np.ndarray:
        """Return int64 [S], tokens of the sequences ``indices`` (int64 [S])."""
        return self._lengths[indices].astype(np.int64)

    def gather(self, indices: np.ndarray) -> Ragged:
        """See `Store.gather`."""
        indices = np.asarray(indices, np.int64)
        starts = range(0, len(indices), self.gathered)
        pieces = [self._gather(indices[first : first + self.gathered]) for first in starts]
        return pieces[0] if len(pieces) == 1 else Ragged.concatenate(pieces)

    def _gather(self, indices: np.ndarray) -> Ragged:
        """Return one or more sequences ``indices`` (int64 [S]), in that order."""
        raise NotImplementedError

    def expect_random_reads(self) -> None:
        """See `Store.expect_random_reads`."""
        self._map.expect_random_reads()
