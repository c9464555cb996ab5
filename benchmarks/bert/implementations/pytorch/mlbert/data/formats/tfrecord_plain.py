"""TFRecord framing and the benchmark's tf.train.Example in plain Python:
the specification of csrc/cpu/tfrecord_*.c.

A record is: uint64 length, uint32 masked CRC32C of these eight bytes, the data, uint32 masked
CRC32C of the data, all little-endian. The data is a tf.train.Example, which maps feature names to
lists:

====================  =======================  =====================================================
input_ids             int64 [max_seq_length]   token ids, then zeros
input_mask            int64 [max_seq_length]   1 for tokens, then 0
segment_ids           int64 [max_seq_length]   0 for [CLS] A [SEP], 1 for B [SEP], then 0
masked_lm_positions   int64 [max_predictions]  positions of masked tokens, then zeros
masked_lm_ids         int64 [max_predictions]  original ids there, then zeros
masked_lm_weights     float [max_predictions]  1.0 for masked tokens, then 0.0
next_sentence_labels  int64 [1]                1 if B is a random one
====================  =======================  =====================================================

A sequence has as many tokens as ``input_mask`` has ones. Masked tokens are those with weight 1, in
any slots. As in protocol buffers, lists may be packed or not, map entries may be in any order (the
last of a name counts), and unknown fields are ignored.

Legend: R records, S sequences.

The list ``instances.json`` of a folder of TFRecords made by `mlbert prepare`:
files, sizes, records, vocabulary.

A record's checksums detect damage within it; only the list detects missing or duplicate records.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from mlbert.data.formats.checksums import CHECKSUMS
from mlbert.data.formats.manifest import REMAKE, ListedFile, SetDescription
from mlbert.data.formats.padded import (
    MAX_ID,
    NAMES,
    Widths,
    column_problems,
    padded,
    without_padding,
)
from mlbert.data.formats.ragged import Ragged
from mlbert.host.errors import UserError
from mlbert.host.json_files import read_json
from mlbert.host.schema import parse_model

HEADER_BYTES = 12  # of a record: length and its checksum
FOOTER_BYTES = 4  # of a record: checksum of the data
# Field numbers of tf.train.Feature.
_BYTES = 1
_FLOAT = 2
_INT = 3
_KIND = {name: _FLOAT if name == "masked_lm_weights" else _INT for name in NAMES}
_KIND_NAMES = {_BYTES: "strings", _FLOAT: "floats", _INT: "integers"}
# Wire types of protocol buffers.
_VARINT = 0
_64_BITS = 1
_LENGTH = 2
_32_BITS = 5
_NO_EXAMPLE = "is not a tf.train.Example"
LIST = "instances.json"  # the file with the list of a folder's TFRecords


class BadExample(ValueError):
    """A record is not an example of the benchmark;
    the message is phrased to follow "record 7 (byte 1234)".
    """


@functools.cache
def _crc_table() -> list[int]:
    """Return the CRC32C of each byte."""
    table = list(range(256))
    for _ in range(8):
        table = [crc >> 1 ^ (0x82F63B78 if crc & 1 else 0) for crc in table]
    return table


def crc32c(data: bytes) -> int:
    """Return the CRC32C of some bytes (Castagnoli, reflected, 0x82F63B78)."""
    table = _crc_table()
    crc = 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> bytes:
    """Return the four bytes stored in a TFRecord: `crc32c`, rotated and offset."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def record_size(header: bytes) -> int | None:
    """Return the bytes of a record with this header, or None if the header's checksum is wrong."""
    if header[8:] != masked_crc32c(header[:8]):
        return None
    return HEADER_BYTES + int.from_bytes(header[:8], "little") + FOOTER_BYTES


def scan(data: np.ndarray, most: int) -> np.ndarray:
    """Find the complete records at the start of ``data`` (uint8 [B]), at most ``most``, by their
    lengths. Returns int64 [R+1], the first byte of each and the end of the last.
    """
    starts = [0]
    while len(starts) <= most:
        size = record_size(data[starts[-1] : starts[-1] + HEADER_BYTES].tobytes())
        if size is None or starts[-1] + size > len(data):
            break
        starts.append(starts[-1] + size)
    return np.array(starts, np.int64)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return an unsigned varint of up to 64 bits and the index after it."""
    result = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result & 0xFFFF_FFFF_FFFF_FFFF, at
    raise BadExample(_NO_EXAMPLE)


def _fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield (number, wire type, bytes of the value) of each field of a message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number = tag >> 3
        wire = tag & 7
        if tag >> 32 or number == 0 or wire not in (_VARINT, _64_BITS, _LENGTH, _32_BITS):
            raise BadExample(_NO_EXAMPLE)
        if wire == _VARINT:
            _, end = _varint(data, at)
        elif wire == _LENGTH:
            size, at = _varint(data, at)
            end = at + size
        else:
            end = at + (8 if wire == _64_BITS else 4)
        if end > len(data):
            raise BadExample(_NO_EXAMPLE)
        yield number, wire, data[at:end]
        at = end


def _messages(data: bytes, wanted: int) -> Iterator[bytes]:
    """Return the sub-messages of field ``wanted``."""
    return (value for number, wire, value in _fields(data) if number == wanted and wire == _LENGTH)


def _values(data: bytes, kind: int) -> list:
    """Return the values of a tf.train.Int64List or FloatList, packed or not."""
    values: list = []
    for number, wire, value in _fields(data):
        if number == 1 and kind == _INT and wire in (_VARINT, _LENGTH):
            at = 0
            while at < len(value):
                element, at = _varint(value, at)
                values.append(element - (1 << 64) if element >> 63 else element)
        elif number == 1 and kind == _FLOAT and wire in (_32_BITS, _LENGTH):
            if len(value) % 4:
                raise BadExample(_NO_EXAMPLE)
            values += struct.unpack(f"<{len(value) // 4}f", value)
    return values


def _read_lists(record: bytes) -> dict[str, tuple[int, list]]:
    """Return (kind of list, values) by name for the features that the benchmark uses."""
    found: dict[str, tuple[int, list]] = {}
    for features in _messages(record, 1):
        for entry in _messages(features, 1):
            name = (list(_messages(entry, 1)) or [b""])[-1].decode("utf-8", "replace")
            if name in NAMES:
                found[name] = _read_feature(entry)
    return found


def _read_feature(entry: bytes) -> tuple[int, list]:
    kind = 0
    values: list = []
    for feature in _messages(entry, 2):
        for number, wire, value in _fields(feature):
            if wire != _LENGTH or number > _INT:
                continue
            if (
                number != kind
            ):  # the kinds are a "oneof": a different kind replaces values, the same kind appends
                values = []
            kind = number
            values += [] if kind == _BYTES else _values(value, kind)
    return kind, values


def _check_lists(lists: dict[str, tuple[int, list]], widths: Widths | None) -> Widths:
    for name in NAMES:
        kind = lists.get(name, (0, []))[0]
        if kind == 0:
            raise BadExample(f"has no feature {name}")
        if kind != _KIND[name]:
            raise BadExample(f"has {_KIND_NAMES[kind]} in {name}, not {_KIND_NAMES[_KIND[name]]}")
    own = Widths(len(lists["input_ids"][1]), len(lists["masked_lm_ids"][1]))
    for name in NAMES:
        if len(lists[name][1]) != (expected := (widths or own).of(name)):
            raise BadExample(f"has {len(lists[name][1])} values in {name}, not {expected}")
    if own.max_seq_length > MAX_ID:
        raise BadExample(
            f"has {own.max_seq_length} values in input_ids, at most {MAX_ID} are possible"
        )
    return own


def parse_example(
    record: bytes, widths: Widths | None, vocab_size: int = MAX_ID + 1
) -> tuple[Ragged, Widths]:
    """Return the sequence in the data of a record, and its widths.

    They must equal ``widths`` if given, and ids must be below ``vocab_size``.
    Raises BadExample with the reason otherwise.
    """
    lists = _read_lists(record)
    own = _check_lists(lists, widths)
    columns = {
        name: np.array([values], np.float64 if kind == _FLOAT else np.int64)
        for name, (kind, values) in lists.items()
    }
    for problem, bad in column_problems(columns, vocab_size).items():
        if bad.any():
            raise BadExample(problem)
    return without_padding(columns), own


def parse_record(
    record: bytes, widths: Widths | None, vocab_size: int = MAX_ID + 1
) -> tuple[Ragged, Widths]:
    """Check the checksums of one record, and return its data as `parse_example` does."""
    content = record[HEADER_BYTES:-FOOTER_BYTES]
    if record != frame(content):
        raise BadExample("has damaged data: its checksum is wrong")
    return parse_example(content, widths, vocab_size)


def parse(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray, widths: Widths, vocab_size: int
) -> tuple[Ragged, np.ndarray]:
    """Parse records.

    Returns the sequences of the good ones, and bool [R], True for records that are good.

    Args:
        data: uint8 [B].
        starts, ends: int64 [R], record r is ``data[starts[r]:ends[r]]``.
        widths: required of every record.
        vocab_size: exclusive upper bound of ids.
    """
    rows = []
    good = np.ones(len(starts), bool)
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        try:
            rows.append(parse_record(data[start:end].tobytes(), widths, vocab_size)[0])
        except BadExample:
            good[index] = False
    return Ragged.concatenate(rows), good


def _put_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _put(number: int, content: bytes) -> bytes:
    return _put_varint(number << 3 | _LENGTH) + _put_varint(len(content)) + content


def encode_example(row: Ragged, widths: Widths) -> bytes:
    """Return one sequence as a tf.train.Example with the same bytes as the benchmark's
    generator.
    """
    entries = b""
    for name in NAMES:
        values = padded(row, name, widths)[0].tolist()
        kind = _KIND[name]
        packed = (
            struct.pack(f"<{len(values)}f", *values)
            if kind == _FLOAT
            else b"".join(map(_put_varint, values))
        )
        entries += _put(1, _put(1, name.encode()) + _put(2, _put(kind, _put(1, packed))))
    return _put(1, entries)


def frame(content: bytes) -> bytes:
    """Return one record: length, data and their checksums."""
    length = struct.pack("<Q", len(content))
    return length + masked_crc32c(length) + content + masked_crc32c(content)


def encode(rows: Ragged, widths: Widths) -> bytes:
    """Return all sequences as concatenated records. They must fit ``widths``."""
    return b"".join(
        frame(encode_example(rows.slice(row, row + 1), widths)) for row in range(len(rows))
    )


class RecordList(SetDescription):
    """The contents of the list."""

    files: Annotated[list[ListedFile], Field(min_length=1)]

    @cached_property
    def by_name(self) -> dict[str, ListedFile]:
        """Files by name."""
        return {file.file: file for file in self.files}

    def size_problem(self, path: Path) -> str | None:
        """Return how a file's size differs from the list, or None."""
        return self.by_name[path.name].size_problem(path, LIST)

    def count_problem(self, path: Path, records: int, tokens: int | None = None) -> str | None:
        """Return how a file's counts differ from the list, or None;
        without ``tokens``, only records are compared.
        """
        for name, found in (("num_sequences", records), ("num_tokens", tokens)):
            if found not in (None, expected := getattr(self.by_name[path.name], name)):
                what = "records" if name == "num_sequences" else "tokens"
                return (
                    f"has {found} {what}, but {LIST} says {expected}: "
                    "some are missing or duplicated"
                )
        return None

    def check_sizes(self, paths: Sequence[Path]) -> None:
        """Raise UserError naming the first file with a size that differs from the list."""
        for path in paths:
            if problem := self.size_problem(path):
                raise UserError("data.incomplete", path, problem, REMAKE)

    def check_counts(self, path: Path, records: int, tokens: int) -> None:
        """Raise UserError if a file's counts differ from the list."""
        if problem := self.count_problem(path, records, tokens):
            raise UserError("data.incomplete", path, problem, REMAKE)


def unlisted_note(folder: Path) -> str | None:
    """Return a note to log if neither a list nor checksums exist for a folder, otherwise None."""
    if (folder / LIST).exists() or (folder / CHECKSUMS).exists():
        return None
    what = "missing or duplicate records cannot be detected"
    return f"note: {folder}: neither {LIST} nor {CHECKSUMS} lists its records: {what}"


def read_list(folder: Path) -> RecordList | None:
    """Return the list of a folder, or of a file's folder, or None if there is none.

    Raises UserError if it is damaged or inconsistent.
    """
    path = (folder if folder.is_dir() else folder.parent) / LIST
    if not path.exists():
        return None
    found = parse_model(RecordList, {**read_json(path, REMAKE), "path": path}, path, REMAKE)
    found.check_files(found.files, REMAKE)
    return found
