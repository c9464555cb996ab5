"""One HDF5 shard of NVIDIA's data pipeline: its datasets,
and the locations of their rows in the file.

=========  =========================================================================================
fixed      ``input_ids`` i2 [N, S], ``input_mask`` i1 [N, S], ``segment_ids`` i1 [N, S],
           ``masked_lm_positions`` i2 [N, P], ``masked_lm_ids`` i2 [N, P], ``next_sentence_labels``
           i1 [N]; zeros pad
variable   the same without ``input_mask``, with rows of HDF5's variable-length type
packed     as variable, a row is a pack: also ``packed_input_len`` i2 and ``packed_masked_lm_len``
           i2 (lengths of its sequences), ``masked_lm_positions`` count from the start of the pack,
           ``next_sentence_labels`` is variable
=========  =========================================================================================

HDF5 keeps the items of a variable-length row in a "global heap" (the layout is in the "HDF5 File
Format Specification", III.E). The dataset is a table of references (length, address of a heap
collection, number of the object in it), and a collection is a chain of numbered objects.
`heap_places` follows all chains of a file at once. Afterwards any row is found by two look-ups,
without the HDF5 library and its global lock. Shards in another form (compressed, chunked,
big-endian, with a user block) are read through h5py.

Rows of varying length do not say how long they may be. Shards that `mlbert prepare` exports record
it in attributes (`RecordedLimits`), which other programs do not read.

Legend: N rows, S positions, P predictions, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from mlbert.data.formats.file_map import at_every_byte
from mlbert.data.formats.padded import Widths
from mlbert.data.formats.ragged import offsets_of
from mlbert.host.errors import UserError
from mlbert.host.files import plain_size, reading

REMAKE = "Restore the file or make it again"
KINDS = ("fixed", "variable", "packed")
COLUMNS = (
    "input_ids",
    "segment_ids",
    "masked_lm_positions",
    "masked_lm_ids",
    "next_sentence_labels",
)
_PACK_COLUMNS = ("packed_input_len", "packed_masked_lm_len")
_ITEM_SIZE = {
    "input_ids": 2,
    "masked_lm_positions": 2,
    "masked_lm_ids": 2,
    **dict.fromkeys(_PACK_COLUMNS, 2),
}

REFERENCE = np.dtype([("length", "<u4"), ("address", "<u8"), ("index", "<u4")])
HEAP_OBJECT = np.dtype(
    [("index", "<u2"), ("references", "<u2"), ("reserved", "<u4"), ("size", "<u8")]
)
_COLLECTION = np.dtype(
    [("signature", "S4"), ("version", "u1"), ("reserved", "u1", 3), ("size", "<u8")]
)
HEADER_BYTES = 16  # of a collection and of an object in it
_BLOCK_ROWS = 4096
_RECORDED = "mlbert_"


def item_dtype(column: str) -> np.dtype:
    """Return the dtype of a column's items: int16 or int8."""
    return np.dtype(f"<i{_ITEM_SIZE.get(column, 1)}")


class RecordedLimits(NamedTuple):
    """The limits of variable and packed shards: attributes of the file,
    each with `_RECORDED` before its name.
    """

    max_seq_length: int  # tokens of a sequence
    max_predictions: int  # masked tokens of a sequence
    max_row_tokens: int  # tokens of a row: of a sequence, or the slots of a pack

    def attributes(self) -> dict[str, int]:
        """Return the attributes of a file by name."""
        return {f"{_RECORDED}{name}": value for name, value in self._asdict().items()}


@dataclass(frozen=True)
class NvidiaShard:
    """The head of a shard."""

    path: Path
    kind: str  # "fixed", "variable" or "packed"
    rows: int  # samples, or packs
    # Of ``input_ids`` and ``masked_lm_ids`` of a fixed shard.
    widths: Widths = field(default=Widths(0, 0))
    # Byte offset in the file of each dataset's rows or references;
    # empty if they are not plain bytes.
    offsets: dict[str, int] = field(default_factory=dict)
    recorded: RecordedLimits | None = None  # None: another program wrote the shard, or it is fixed

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all datasets."""
        extra = {"fixed": ("input_mask",), "variable": (), "packed": _PACK_COLUMNS}
        return COLUMNS + extra[self.kind]

    def is_variable(self, column: str) -> bool:
        """Return True if the column's rows vary in length."""
        return self.kind == "packed" or (
            self.kind == "variable" and column != "next_sentence_labels"
        )


def open_shard(path: Path) -> h5py.File:
    """Open a shard. Raises UserError if it is unreadable, truncated, lengthened, or not HDF5."""
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        reason = (
            "is empty"
            if path.exists() and not path.stat().st_size
            else f"is damaged or not HDF5 ({error})"
        )
        raise UserError("data.damaged", path, reason.splitlines()[0], REMAKE) from None
    if (size := plain_size(path)) > (end := _recorded_end(path, file) or size):
        file.close()
        raise UserError(
            "data.damaged", path, f"has {size} bytes, but its HDF5 header says {end}", REMAKE
        )
    return file


def _recorded_end(path: Path, file: h5py.File) -> int:
    """Return the end of the file in its superblock ("HDF5 File Format Specification", II.A); 0 if
    addresses do not have 8 bytes. The library compares it with shorter files only.
    """
    if file.id.get_create_plist().get_sizes()[0] != 8:
        return 0
    with reading(path), path.open("rb") as content:
        content.seek(file.userblock_size)
        head = content.read(52)
    first = {0: 24, 1: 28}.get(head[8], 12)  # of the addresses, by the superblock's version
    return int.from_bytes(head[first + 16 : first + 24], "little")


def inspect(path: Path) -> NvidiaShard:
    """Read and check the head of a shard: keys, types, row counts.

    Raises UserError if it is damaged, or not of one of the three kinds.
    """
    with open_shard(path) as file:
        try:
            return _inspect(path, file)
        except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                "data.damaged", path, f"is damaged ({str(error).splitlines()[0]})", REMAKE
            ) from None


def _inspect(path: Path, file: h5py.File) -> NvidiaShard:
    names = set(file)
    kind = (
        "packed"
        if "packed_input_len" in names
        else "fixed"
        if "input_mask" in names
        else "variable"
    )
    needed = NvidiaShard(path, kind, 0).columns
    for name in needed:
        if name not in names or not isinstance(file[name], h5py.Dataset):
            reason = f"has no dataset {name} (it looks like a {kind} shard)"
            raise UserError("data.format", path, reason, "Give NVIDIA's HDF5 shards")
    rows = file["input_ids"].shape[0] if file["input_ids"].shape else 0
    shard = NvidiaShard(path, kind, rows)
    widths = {name: _check_dataset(shard, name, file[name]) for name in needed}
    pairs = (
        ("input_ids", "segment_ids"),
        ("input_ids", "input_mask"),
        ("masked_lm_positions", "masked_lm_ids"),
    )
    for one, other in pairs:
        if widths[one] != widths.get(other, 0):  # variable-length rows have width 0
            raise UserError(
                "data.damaged", path, f"{one} and {other} have different widths", REMAKE
            )
    offsets = {name: _byte_offset(path, file, file[name]) for name in needed}
    plain = any(offset < 0 for offset in offsets.values())
    of_rows = Widths(widths["input_ids"], widths["masked_lm_ids"])
    recorded = None if kind == "fixed" else _recorded_limits(path, file)
    return NvidiaShard(path, kind, rows, of_rows, {} if plain else offsets, recorded)


def _recorded_limits(path: Path, file: h5py.File) -> RecordedLimits | None:
    """Return the limits in a file's attributes, or None if there are none.

    Raises UserError if they are damaged.
    """
    names = [f"{_RECORDED}{name}" for name in RecordedLimits._fields]
    if not all(name in file.attrs for name in names):
        return None
    limits = RecordedLimits(*(int(file.attrs[name]) for name in names))
    if not 1 <= limits.max_seq_length <= limits.max_row_tokens or limits.max_predictions < 0:
        raise UserError("data.damaged", path, "has limits that contradict each other", REMAKE)
    return limits


def _check_dataset(shard: NvidiaShard, name: str, dataset: h5py.Dataset) -> int:
    """Check shape and type; return the width of a fixed column (0 for others)."""
    wanted = item_dtype(name)
    variable = shard.is_variable(name)
    dimensions = 2 if shard.kind == "fixed" and name != "next_sentence_labels" else 1
    found = h5py.check_vlen_dtype(dataset.dtype)
    items = found if variable else dataset.dtype
    fits = isinstance(items, np.dtype) and items.kind in "iu" and items.itemsize == wanted.itemsize
    if not fits or (found is not None) != variable:
        form = f"variable-length {found}" if found is not None else str(dataset.dtype)
        expected = f"variable-length {wanted}" if variable else str(wanted)
        raise UserError(
            "data.format",
            shard.path,
            f"{name} is {form}, not {expected}",
            "Give NVIDIA's HDF5 shards",
        )
    # The pipeline writes the labels of fixed and variable shards as [N]; [N, 1] is equivalent.
    column = name == "next_sentence_labels" and dataset.ndim == 2 and dataset.shape[1] == 1
    if dataset.ndim != dimensions and not column:
        raise UserError(
            "data.damaged",
            shard.path,
            f"{name} has {dataset.ndim} dimensions, not {dimensions}",
            REMAKE,
        )
    if dataset.shape[0] != shard.rows:
        reason = f"{name} has {dataset.shape[0]} rows, input_ids has {shard.rows}"
        raise UserError("data.damaged", shard.path, reason, REMAKE)
    return int(dataset.shape[1]) if dimensions == 2 else 0


def _byte_offset(path: Path, file: h5py.File, dataset: h5py.Dataset) -> int:
    """Return the byte offset of a dataset's rows (or references),
    or -1 if they are not plain bytes.
    """
    if dataset.shape[0] == 0:
        return 0
    start = dataset.id.get_offset()
    items = h5py.check_vlen_dtype(dataset.dtype) or dataset.dtype
    usual = items.newbyteorder("<") == items and file.userblock_size == 0
    if start is None or not usual or file.id.get_create_plist().get_sizes() != (8, 8):
        return -1
    row_bytes = (
        REFERENCE.itemsize if h5py.check_vlen_dtype(dataset.dtype) else dataset.dtype.itemsize
    )
    if start + dataset.size * row_bytes > path.stat().st_size:
        raise UserError(
            "data.damaged",
            path,
            f"is truncated: {dataset.name} ends after the end of the file",
            REMAKE,
        )
    return int(start)


def heap_places(
    content: np.ndarray, shard: NvidiaShard
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]] | None:
    """Follow the heap chains of a shard with variable-length columns;
    ``content`` is the file's bytes, uint8.

    Returns:
        references: column -> `REFERENCE` [N];
        places: column -> uint16 [N], offset of the row's object in its collection in units of 8
            bytes; 0 if the row has
        no items, or if its object is missing or too short.
        None instead of both if a collection is too large for 16-bit places.
    """
    names = [name for name in shard.columns if shard.is_variable(name)]
    none = np.empty(0, REFERENCE)
    references = {
        name: np.frombuffer(content, REFERENCE, shard.rows, shard.offsets[name])
        if shard.rows
        else none
        for name in names
    }
    addresses = np.unique(
        np.concatenate([table["address"][table["length"] > 0] for table in references.values()])
    )
    keys, places, rooms = _walk(content, _collections(content, addresses))
    if len(places) and int(places.max()) > 0xFFFF:
        return None
    result = {}
    for name, table in references.items():
        collection = np.searchsorted(addresses, table["address"])
        wanted = (collection.astype(np.int64) << 16) + table["index"]
        result[name] = np.zeros(len(table), np.uint16)
        if len(keys):
            at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            known = (table["length"] > 0) & (table["index"] <= 0xFFFF) & (keys[at] == wanted)
            known &= table["length"].astype(np.int64) * item_dtype(name).itemsize <= rooms[at]
            result[name][known] = places[at][known]
    return references, result


def _collections(content: np.ndarray, addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and end (int64) of each collection;
    they are equal if there is none at the address.
    """
    last = len(content) - HEADER_BYTES
    starts = np.where(addresses <= max(last, 0), addresses, 0).astype(np.int64)
    heads = at_every_byte(content, _COLLECTION)[starts] if len(starts) else np.empty(0, _COLLECTION)
    sizes = np.minimum(heads["size"], len(content)).astype(np.int64)
    good = (
        (heads["signature"] == b"GCOL") & (heads["version"] == 1) & (starts + sizes <= len(content))
    )
    return starts, np.where(good, starts + sizes, starts)


def _walk(
    content: np.ndarray, collections: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all objects within their collections, as int64 arrays: (collection << 16) + object
    number, ascending; place of each object in units of 8 bytes; bytes of its items.
    """
    starts, ends = collections
    objects = at_every_byte(content, HEAP_OBJECT)
    current = np.arange(len(starts))
    at = starts + HEADER_BYTES
    steps = [np.empty((3, 0), np.int64)]
    while True:
        inside = at + HEADER_BYTES <= ends[current]
        current = current[inside]
        at = at[inside]
        if not len(at):
            break
        found = objects[at]
        room = np.minimum(found["size"], len(content)).astype(np.int64)
        # Object 0 is the free room at the end.
        used = (found["index"] > 0) & (at + HEADER_BYTES + room <= ends[current])
        current = current[used]
        at = at[used]
        room = room[used]
        steps.append(
            np.stack([(current << 16) + found["index"][used], (at - starts[current]) >> 3, room])
        )
        at = at + HEADER_BYTES + ((room + 7) & ~7)
    table = np.concatenate(steps, axis=1)
    keys, places, rooms = table[:, np.argsort(table[0], kind="stable")]
    return keys, places, rooms


class Items(NamedTuple):
    """Locations of the items (int8 or int16) of some rows of a column."""

    source: np.ndarray  # [B]; if it is a file's bytes, with an item at every byte
    starts: np.ndarray  # int64 [R], index of each row's first item
    counts: np.ndarray  # int64 [R], items of each row
    step: int  # distance between a row's items in ``source``

    @classmethod
    def of_rows(cls, rows: Sequence[np.ndarray], column: str) -> Items:
        """Return all items of these rows of a column."""
        flat = np.concatenate([np.empty(0, item_dtype(column)), *rows]).astype(item_dtype(column))
        counts = np.array([len(row) for row in rows], np.int64)
        return cls(flat, offsets_of(counts)[:-1], counts, 1)

    def of(self, rows: np.ndarray) -> Items:
        """Return the items of some rows."""
        return self._replace(starts=self.starts[rows], counts=self.counts[rows])

    def gather(self) -> np.ndarray:
        """Return the items, concatenated."""
        ends = np.cumsum(self.counts)
        index = np.arange(int(ends[-1]) if len(ends) else 0) * self.step
        return self.source[
            index + np.repeat(self.starts - (ends - self.counts) * self.step, self.counts)
        ]


def read_column(file: h5py.File, column: str, rows: np.ndarray) -> list[np.ndarray]:
    """Read some rows (int64 [R], any order) through h5py, the reference for mapped reading. Raises
    UserError if the file is damaged there."""
    dataset: Any = file[column]
    ordered, back = np.unique(rows, return_inverse=True)
    try:
        pieces = [
            _read_rows(dataset, part)
            for part in np.array_split(ordered, -(-len(ordered) // _BLOCK_ROWS))
        ]
    except (OSError, RuntimeError, ValueError) as error:
        where = f"{column} of rows {ordered[0]} to {ordered[-1]}"
        reason = f"{where} cannot be read ({str(error).splitlines()[0]})"
        raise UserError("data.damaged", file.filename, reason, REMAKE) from None
    read = [row for piece in pieces for row in piece]
    return [np.atleast_1d(read[index]) for index in back]


def _read_rows(dataset: Any, rows: np.ndarray) -> np.ndarray:
    """Read ascending ``rows``, as one range if they are dense,
    because HDF5 reads ranges much faster than points.
    """
    if not len(rows):
        return np.empty(0, dataset.dtype)
    first = int(rows[0])
    end = int(rows[-1]) + 1
    if end - first <= 4 * len(rows):
        return dataset[first:end][rows - first]
    return dataset[rows]
