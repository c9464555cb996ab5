"""TFRecord framing and the benchmark's tf.train.Example in plain Python: the specification of csrc/cpu/tfrecord_*.c.

A record is: uint64 length, uint32 masked CRC32C of these eight bytes, the data, uint32 masked CRC32C of the data, all
little-endian. The data is a tf.train.Example, a map from feature names to lists:

====================  =======================  ==============================================================
input_ids             int64 [max_seq_length]   token ids, then zeros
input_mask            int64 [max_seq_length]   1 for tokens, then 0
segment_ids           int64 [max_seq_length]   0 for [CLS] A [SEP], 1 for B [SEP], then 0
masked_lm_positions   int64 [max_predictions]  positions of masked tokens, then zeros
masked_lm_ids         int64 [max_predictions]  original ids there, then zeros
masked_lm_weights     float [max_predictions]  1.0 for masked tokens, then 0.0
next_sentence_labels  int64 [1]                1 when B is a random one
====================  =======================  ==============================================================

A sequence has as many tokens as ``input_mask`` has ones; masked tokens are those of weight 1, wherever they stand.
Lists may be packed or not, map entries stand in any order (of two with one name the later counts), and what is
unknown is passed over, as protocol buffers define it.

Legend: R records, S sequences.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mlbert.store.ragged import Ragged

NAMES = (  # in the order in which the benchmark's files hold them
    "input_ids",
    "masked_lm_positions",
    "input_mask",
    "segment_ids",
    "masked_lm_weights",
    "masked_lm_ids",
    "next_sentence_labels",
)
HEADER_BYTES, FOOTER_BYTES = 12, 4
INCOMPLETE, BAD_LENGTH, FULL = range(3)  # why a scan ended
MAX_ID = 65_535
_BYTES, _FLOAT, _INT = 1, 2, 3  # field numbers of tf.train.Feature
_KIND = {name: _FLOAT if name == "masked_lm_weights" else _INT for name in NAMES}
_KIND_NAMES = {_BYTES: "strings", _FLOAT: "floats", _INT: "integers"}
_VARINT, _64_BITS, _LENGTH, _32_BITS = 0, 1, 2, 5  # wire types


class Widths(NamedTuple):
    """Sizes of an example's lists: tokens and predictions."""

    max_seq_length: int
    max_predictions: int


class BadExample(ValueError):
    """A record that is not an example of the benchmark; the text says why, to follow "record 7 (byte 1234)"."""


class Scan(NamedTuple):
    """The whole records at the start of some bytes.

    Attributes:
        starts: int64 [R+1], first byte of each record, and of what follows the last.
        intact: bool [R], whether the data's checksum is right.
        stopped: INCOMPLETE (the bytes end within the next record, or with the last one), BAD_LENGTH (the next
            record's length has a wrong checksum) or FULL (as many records as were asked for).
    """

    starts: np.ndarray
    intact: np.ndarray
    stopped: int


def _crc_table() -> np.ndarray:
    table: np.ndarray = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> 1) ^ np.where(table & 1, np.uint32(0x82F63B78), np.uint32(0))
    return table


_CRC_TABLE = _crc_table()


def crc32c(data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """CRC32C (Castagnoli, reflected, 0x82F63B78) of each ``data[starts[r]:ends[r]]``: uint32 [R]; data uint8."""
    lengths = np.asarray(ends) - starts
    order = np.argsort(-lengths, kind="stable")
    crc = np.full(len(order), 0xFFFFFFFF, np.uint32)
    ordered_starts, ordered_lengths = np.asarray(starts)[order], lengths[order]
    for i in range(int(ordered_lengths[0]) if len(order) else 0):
        longer = np.searchsorted(-ordered_lengths, -i)  # the first ones are longer than i
        byte = data[ordered_starts[:longer] + i]
        crc[:longer] = (crc[:longer] >> 8) ^ _CRC_TABLE[(crc[:longer] ^ byte) & 255]
    result = np.empty_like(crc)
    result[order] = ~crc
    return result


def masked_crc32c(data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """`crc32c` rotated and shifted as TFRecords store it."""
    crc = crc32c(data, starts, ends)
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)


def _stored_crcs(data: np.ndarray, at: np.ndarray) -> np.ndarray:
    return data[at[:, None] + np.arange(4)].copy().view("<u4")[:, 0]


def scan(data: np.ndarray, most: int) -> Scan:
    """Find the whole records at the start of ``data`` (uint8 [B]), at most ``most``."""
    size = len(data)
    starts, stopped = [0], FULL
    while len(starts) <= most:
        at = starts[-1]
        stopped = INCOMPLETE
        if size - at < HEADER_BYTES:
            break
        where = np.array([at])
        if masked_crc32c(data, where, where + 8)[0] != _stored_crcs(data, where + 8)[0]:
            stopped = BAD_LENGTH
            break
        end = at + HEADER_BYTES + int(data[at : at + 8].view("<u8")[0]) + FOOTER_BYTES
        if end > size:
            break
        starts.append(end)
        stopped = FULL
    borders = np.array(starts, np.int64)
    return Scan(borders, _data_intact(data, borders[:-1], borders[1:]), stopped)


def _data_intact(data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    ends = ends - FOOTER_BYTES
    return masked_crc32c(data, starts + HEADER_BYTES, ends) == _stored_crcs(data, ends)


def check(data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """bool [R]: whether a whole record with right checksums lies at ``data[starts[r]:ends[r]]``, 16 bytes or more."""
    fine = masked_crc32c(data, starts, starts + 8) == _stored_crcs(data, starts + 8)
    sizes = data[starts[:, None] + np.arange(8)].copy().view("<u8")[:, 0]
    fine &= sizes == (ends - starts - HEADER_BYTES - FOOTER_BYTES).astype(np.uint64)
    return fine & _data_intact(data, starts, ends)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """An unsigned varint of up to 64 bits and the place after it."""
    result = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result & 0xFFFF_FFFF_FFFF_FFFF, at
    raise BadExample("is not a tf.train.Example")


def _fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """(number, wire type, value) of each field of a message; bytes for what is not a varint."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if tag >> 32 or number == 0 or wire not in (_VARINT, _64_BITS, _LENGTH, _32_BITS):
            raise BadExample("is not a tf.train.Example")
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, wire, value
            continue
        size = {_64_BITS: 8, _32_BITS: 4}.get(wire, 0)
        if wire == _LENGTH:
            size, at = _varint(data, at)
        if at + size > len(data):
            raise BadExample("is not a tf.train.Example")
        yield number, wire, data[at : at + size]
        at += size


def _messages(data: bytes, wanted: int) -> Iterator[bytes]:
    """The sub-messages of field ``wanted``."""
    for number, wire, value in _fields(data):
        if number == wanted and wire == _LENGTH:
            assert isinstance(value, bytes)
            yield value


def _read_values(data: bytes, kind: int) -> list[int] | list[float]:
    """The values of a tf.train.Int64List or FloatList."""
    values: list = []
    for number, wire, value in _fields(data):
        if number != 1:
            continue
        if isinstance(value, int):
            values += [value] if kind == _INT else []
        elif wire == _LENGTH and kind == _INT:
            at = 0
            while at < len(value):
                element, at = _varint(value, at)
                values.append(element)
        elif wire in (_LENGTH, _32_BITS) and kind == _FLOAT:
            if len(value) % 4:
                raise BadExample("is not a tf.train.Example")
            values += struct.unpack(f"<{len(value) // 4}f", value)
    return [value - (1 << 64) if isinstance(value, int) and value >> 63 else value for value in values]


def read_lists(record: bytes) -> dict[str, tuple[int, list]]:
    """Name -> (kind of list, values) of the features that the benchmark uses."""
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
            assert isinstance(value, bytes)
            if number != kind:
                values = []
            kind = number
            values += [] if kind == _BYTES else _read_values(value, kind)
    return kind, values


def _check_lists(lists: dict[str, tuple[int, list]], widths: Widths | None) -> Widths:
    for name in NAMES:
        if name not in lists or lists[name][0] == 0:
            raise BadExample(f"has no feature {name}")
        kind = lists[name][0]
        if kind != _KIND[name]:
            raise BadExample(f"has {_KIND_NAMES[kind]} in {name}, not {_KIND_NAMES[_KIND[name]]}")
    own = Widths(len(lists["input_ids"][1]), len(lists["masked_lm_ids"][1]))
    expected, predictions = widths or own
    wanted = {
        "input_ids": expected,
        "input_mask": expected,
        "segment_ids": expected,
        "masked_lm_ids": predictions,
        "masked_lm_positions": predictions,
        "masked_lm_weights": predictions,
        "next_sentence_labels": 1,
    }
    for name, count in wanted.items():
        if len(lists[name][1]) != count:
            raise BadExample(f"has {len(lists[name][1])} values in {name}, {count} expected")
    if expected > MAX_ID:
        raise BadExample(f"has {expected} values in input_ids, at most {MAX_ID} are possible")
    return own


def _check_ids(name: str, values: list[int], vocab_size: int) -> None:
    for value in values:
        if not 0 <= value < vocab_size:
            limit = "0..65535" if vocab_size > MAX_ID else f"the vocabulary of {vocab_size} entries"
            raise BadExample(f"has {value} in {name}, outside {limit}")


def _length(mask: list[int], segments: list[int]) -> tuple[int, int]:
    """Tokens of the sequence and of its first segment."""
    length = mask.index(0) if 0 in mask else len(mask)
    if length == 0 or mask != [1] * length + [0] * (len(mask) - length):
        raise BadExample("has an input_mask that is not ones followed by zeros")
    first = sum(segment == 0 for segment in segments[:length])
    if segments[:length] != [0] * first + [1] * (length - first):
        raise BadExample("has segment_ids that are not zeros followed by ones")
    return length, first


Row = tuple[list[int], int, bool, list[int], list[int]]


def parse_example(record: bytes, widths: Widths | None, vocab_size: int = MAX_ID + 1) -> tuple[Row, Widths]:
    """One tf.train.Example as a row for `Ragged.from_rows`, and its widths.

    Args:
        record: the record's data.
        widths: what they must be; None: any that fit each other.
        vocab_size: ids must be smaller.

    Raises:
        BadExample: says what is wrong.
    """
    lists = read_lists(record)
    own = _check_lists(lists, widths)
    values = {name: content for name, (_, content) in lists.items()}
    length, first = _length(values["input_mask"], values["segment_ids"])
    tokens = values["input_ids"][:length]
    _check_ids("input_ids", tokens, vocab_size)
    weights = values["masked_lm_weights"]
    for weight in weights:
        if weight not in (0.0, 1.0):
            raise BadExample(f"has {weight:g} in masked_lm_weights, 0 or 1 expected")
    positions = [at for at, weight in zip(values["masked_lm_positions"], weights, strict=True) if weight]
    labels = [label for label, weight in zip(values["masked_lm_ids"], weights, strict=True) if weight]
    for position in positions:
        if not 0 <= position < length:
            raise BadExample(f"has {position} in masked_lm_positions, the sequence has {length} tokens")
    _check_ids("masked_lm_ids", labels, vocab_size)
    (label,) = values["next_sentence_labels"]
    if label not in (0, 1):
        raise BadExample(f"has {label} in next_sentence_labels, 0 or 1 expected")
    return (tokens, first, bool(label), positions, labels), own


def parse(
    data: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    wanted: np.ndarray,
    widths: Widths,
    vocab_size: int = MAX_ID + 1,
) -> tuple[Ragged, np.ndarray]:
    """Examples of records as sequences.

    Args:
        data: uint8 [B].
        starts, ends: int64 [R], record r lies at ``data[starts[r]:ends[r]]``.
        wanted: bool [R], records to read.
        widths: what every record must have.
        vocab_size: ids must be smaller.

    Returns:
        The sequences, and bool [R]: the records that gave one.
    """
    rows, good = [], np.zeros(len(wanted), bool)
    for index in np.flatnonzero(wanted):
        record = data[starts[index] + HEADER_BYTES : ends[index] - FOOTER_BYTES].tobytes()
        try:
            rows.append(parse_example(record, widths, vocab_size)[0])
        except BadExample:
            continue
        good[index] = True
    return Ragged.from_rows(rows), good


def _put_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _put(number: int, content: bytes) -> bytes:
    return _put_varint(number << 3 | _LENGTH) + _put_varint(len(content)) + content


def encode_example(row: Row, widths: Widths) -> bytes:
    """A tf.train.Example, byte for byte as the benchmark's generator wrote it; see `parse_example`."""
    tokens, first, random_next, positions, labels = row
    padding, unused = widths.max_seq_length - len(tokens), widths.max_predictions - len(positions)
    lists: dict[str, list] = {
        "input_ids": [*tokens, *[0] * padding],
        "input_mask": [1] * len(tokens) + [0] * padding,
        "segment_ids": [0] * first + [1] * (len(tokens) - first) + [0] * padding,
        "masked_lm_positions": [*positions, *[0] * unused],
        "masked_lm_ids": [*labels, *[0] * unused],
        "masked_lm_weights": [1.0] * len(positions) + [0.0] * unused,
        "next_sentence_labels": [int(random_next)],
    }
    entries = b""
    for name in NAMES:
        values, kind = lists[name], _KIND[name]
        packed = struct.pack(f"<{len(values)}f", *values) if kind == _FLOAT else b"".join(map(_put_varint, values))
        entries += _put(1, _put(1, name.encode()) + _put(2, _put(kind, _put(1, packed))))
    return _put(1, entries)


def frame(record: bytes) -> bytes:
    """One record: length, data and their checksums."""
    length = struct.pack("<Q", len(record))
    crcs = [
        masked_crc32c(np.frombuffer(part, np.uint8), np.array([0]), np.array([len(part)]))[0]
        for part in (length, record)
    ]
    return length + struct.pack("<I", crcs[0]) + record + struct.pack("<I", crcs[1])


def encode(rows: Ragged, widths: Widths) -> bytes:
    """All sequences as records, back to back. They must fit ``widths``."""
    ends, masked_ends = rows.offsets[1:], rows.masked_offsets[1:]
    out = []
    for s in range(len(rows)):
        tokens = rows.tokens[rows.offsets[s] : ends[s]].tolist()
        masked = slice(rows.masked_offsets[s], masked_ends[s])
        positions, labels = rows.masked_positions[masked].tolist(), rows.masked_labels[masked].tolist()
        row = (tokens, int(rows.first_lengths[s]), bool(rows.next_sentence[s]), positions, labels)
        out.append(frame(encode_example(row, widths)))
    return b"".join(out)
