"""MDS sets of samples that are already tokenized and masked, as a `mlbert.data.formats.base.Store`.

MosaicML Streaming's converter for the benchmark's Wikipedia writes these seven columns, all
``bytes`` with the same width throughout the set, with L slots for tokens and P for predictions:

====================  ============  ==========================================================
input_ids             int32 [L]     token ids after masking, then zeros
input_mask            int32 [L]     1 for each token, then 0
segment_ids           int32 [L]     0 in sentence A, 1 in sentence B, then 0
masked_lm_positions   int32 [P]     of the predictions, then 0
masked_lm_ids         int32 [P]     their original ids, then 0
masked_lm_weights     float32 [P]   1 for each prediction, then 0
next_sentence_labels  int32 [1]     1 if sentence B is a random one
====================  ============  ==========================================================

Only slots with weight 1 are predictions. Streaming's reader uses all P slots, which adds a
prediction of [PAD] in place of [CLS] to each sample with fewer predictions.

Compressed shards are decompressed to the user's cache folder. Opening a folder for the first time
verifies the checksums of all shards and caches the lengths (`mlbert.data.formats.index_cache`).
Samples are checked whenever they are read.

Legend: N samples, F shards, S requested samples, L slots for tokens, P slots for predictions,
B bytes of a sample.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from mlbert.data.formats import mds_files
from mlbert.data.formats.base import IndexedStore, StoreInfo
from mlbert.data.formats.file_map import FileMap
from mlbert.data.formats.index_cache import IndexCache
from mlbert.data.formats.manifest import reading
from mlbert.data.formats.mds import UINT32
from mlbert.data.formats.mds_files import BYTES, INDEX, RESTORE, ShardInfo
from mlbert.data.formats.mds_index import MdsIndex, ShardTable, open_index
from mlbert.data.formats.padded import MAX_ID, NAMES, Widths, column_problems, without_padding
from mlbert.data.formats.ragged import Ragged, offsets_of
from mlbert.host.errors import UserError
from mlbert.host.files import open_plain

COLUMNS = tuple(sorted(NAMES))  # in the order in a sample
_ITEM = 4  # bytes of every value
_HEAD = UINT32.itemsize * len(COLUMNS)  # sizes of the columns, in front of each sample
_THREADS = min(16, os.cpu_count() or 1)
_VERSION = 1


def _sizes_of(widths: Widths) -> np.ndarray:
    """Return uint32 [7], bytes of each column."""
    return np.array([widths.of(name) for name in COLUMNS], UINT32) * _ITEM


def accepts(folder: Path) -> bool:
    """Return True if the folder has the index of an MDS set, with any columns."""
    return (folder / INDEX).is_file()


def describe(folder: Path, most: Widths | None = None) -> StoreInfo:
    """Describe a folder from its index and the head of the first shard; with ``most``, the limits
    of a sample, no shard is read. Raises UserError if the index is damaged or has other columns, or
    if the first shard is missing.
    """
    return _described(folder, read_index(folder), most)


def _described(folder: Path, index: MdsIndex, most: Widths | None = None) -> StoreInfo:
    widths = most or _widths(folder, index.shards[0])
    return StoreInfo(
        folder=Path(folder),
        kind="mds",
        identity=index.identity,
        max_seq_length=widths.max_seq_length,
        max_predictions=widths.max_predictions,
        num_sequences=int(index.num_samples.sum()),
    )


class MdsSamples(IndexedStore):
    """A set opened for random access.

    The lengths are kept in the user's cache folder. Raises UserError if a shard is missing or
    damaged, or has samples of another width than the first one.
    """

    gathered = 1024

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        index = read_index(folder)
        self.info = _described(folder, index)
        self._sizes = _sizes_of(Widths(self.info.max_seq_length, self.info.max_predictions))
        self._num_bytes = _HEAD + int(self._sizes.sum())  # of a sample (B)
        shards = index.shards
        with ThreadPoolExecutor(_THREADS) as pool:
            self._paths = list(
                pool.map(lambda shard: _unpacked(folder, shard, self.info.identity), shards)
            )
        self._map = FileMap(self._paths)
        self._first = offsets_of(index.num_samples)
        self._rows = self._map.view(np.dtype((np.void, self._num_bytes)))
        # The samples are at the end of a shard, after offsets and JSON of varying length.
        self._places = self._map.ends - np.diff(self._first) * self._num_bytes
        self._cache = IndexCache("mds", self._paths, [_VERSION, self.info.identity])
        self._lengths = self._load_lengths(shards)

    def _gather(self, indices: np.ndarray) -> Ragged:
        """See `IndexedStore._gather`.

        Raises UserError naming shard and sample if one is invalid.
        """
        columns = self._columns(indices)
        for problem, bad in column_problems(columns).items():
            if bad.any():
                shard, place = self._place(int(indices[np.flatnonzero(bad)[0]]))
                raise UserError(
                    "data.damaged", self._paths[shard], f"sample {place} {problem}", RESTORE
                )
        order = np.argsort(columns["masked_lm_positions"], axis=1, kind="stable")
        sorted_columns = {
            name: np.take_along_axis(columns[name], order, 1)
            for name in COLUMNS
            if "masked" in name
        }
        return without_padding(columns | sorted_columns)

    def _columns(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return every column of the samples ``indices``: [S, L], [S, P] or [S, 1].

        Raises UserError if widths differ.
        """
        shard = np.searchsorted(self._first, indices, side="right") - 1
        starts = self._places[shard] + (indices - self._first[shard]) * self._num_bytes
        rows = self._rows[starts].view(np.uint8).reshape(len(indices), self._num_bytes)
        found = np.ascontiguousarray(rows[:, :_HEAD]).view(UINT32)
        if bad := np.flatnonzero((found != self._sizes).any(axis=1)).tolist():
            number, place = self._place(int(indices[bad[0]]))
            reason = f"sample {place} has columns of other sizes than the first sample of the set"
            raise UserError(
                "data.mixed", self._paths[number], reason, "Keep samples of one width in a set"
            )
        columns = {}
        start = _HEAD
        for name, size in zip(COLUMNS, self._sizes.tolist(), strict=True):
            values = np.ascontiguousarray(rows[:, start : start + size])
            columns[name] = values.view("<f4" if name == "masked_lm_weights" else "<i4")
            start += size
        return columns

    def _place(self, index: int) -> tuple[int, int]:
        """Return the shard of a sample and its number in the shard."""
        shard = int(np.searchsorted(self._first, index, side="right")) - 1
        return shard, index - int(self._first[shard])

    def _load_lengths(self, shards: ShardTable) -> np.ndarray:
        """Return uint16 [N] from the cache, or compute it in several threads while verifying the
        shards.
        """

        def checked(lengths: np.ndarray) -> np.ndarray:
            if len(lengths) != self._first[-1]:
                raise ValueError("lengths of another set")
            return lengths

        def make() -> dict[str, np.ndarray]:
            with ThreadPoolExecutor(_THREADS) as pool:
                return {
                    "lengths": np.concatenate(
                        list(pool.map(self._lengths_of_shard, range(len(shards)), shards))
                    )
                }

        return self._cache.once(checked, ["lengths"], make)

    def _lengths_of_shard(self, number: int, shard: ShardInfo) -> np.ndarray:
        path = self._paths[number]
        mds_files.check_file(path, shard.raw)
        inside = self._map.bytes[self._map.starts[number] : self._map.ends[number]]
        edges = (
            inside[UINT32.itemsize : UINT32.itemsize * (shard.num_samples + 2)]
            .view(UINT32)
            .astype(np.int64)
        )
        if (np.diff(edges) != self._num_bytes).any() or edges[-1] != len(inside):
            reason = "has samples of a different width than the first one"
            raise UserError("data.mixed", path, reason, "Keep samples of one width in a set")
        first = int(self._first[number])
        end = int(self._first[number + 1])
        pieces = [
            np.arange(low, min(low + self.gathered, end))
            for low in range(first, end, self.gathered)
        ]
        return np.concatenate(
            [self._columns(piece)["input_mask"].sum(axis=1) for piece in pieces]
        ).astype(np.uint16)


open_folder = MdsSamples  # as in the other formats


def read_index(folder: Path) -> MdsIndex:
    """Return the index of a folder. Raises UserError if it is damaged or has other columns."""
    path = Path(folder) / INDEX
    index = open_index(path)
    if {(column.name, column.encoding, column.size) for column in index.columns} != {
        (c, BYTES, None) for c in COLUMNS
    }:
        found = ", ".join(f"{column.name} ({column.encoding})" for column in index.columns)
        reason = f"has the columns {found}, but no masked samples"
        remedy = f"Samples have {', '.join(COLUMNS)}, all as bytes; text needs another recipe"
        raise UserError("data.columns", path, reason, remedy)
    return index


def _widths(folder: Path, shard: ShardInfo) -> Widths:
    """Return the widths of a shard's first sample."""
    path = folder / shard.raw.name
    # The number of samples, and where the first one starts.
    # A start that is wrong leads to sizes that do not fit.
    start = int.from_bytes(
        _head(folder, shard, 2 * UINT32.itemsize)[UINT32.itemsize :].tobytes(), "little"
    )
    sizes = _head(folder, shard, start + _HEAD)[start:]
    if len(sizes) != _HEAD:
        raise UserError("data.damaged", path, "is too short for its samples", RESTORE)
    slots = (sizes.view(UINT32) // _ITEM).tolist()
    widths = Widths(slots[0], slots[2])
    if (_sizes_of(widths) != sizes.view(UINT32)).any() or not 0 < slots[2] <= slots[0] <= MAX_ID:
        raise UserError(
            "data.damaged", path, "has columns with sizes that contradict each other", RESTORE
        )
    return widths


def _head(folder: Path, shard: ShardInfo, num_bytes: int) -> np.ndarray:
    """Return at most ``num_bytes`` first bytes (uint8) of a shard's uncompressed form."""
    stored = shard.stored_in(folder)
    path = folder / stored.name
    with reading(path), open_plain(path) as file:
        head = (
            file.read(num_bytes)
            if stored is shard.raw
            else mds_files.decompressed(file, path, num_bytes)
        )
    return np.frombuffer(head, np.uint8)


def _unpacked(folder: Path, shard: ShardInfo, identity: str) -> Path:
    """Return the shard's uncompressed file, creating it in the cache
    if only the compressed one exists.
    """
    if shard.stored_in(folder) is shard.raw:
        return folder / shard.raw.name
    return mds_files.cached_shard(str(folder), mds_files.cache_of(identity), shard)
