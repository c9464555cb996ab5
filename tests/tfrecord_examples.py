"""Hand-written tf.train.Examples in every encoding that protocol buffers allow."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlbert.data.formats import tfrecord_plain as plain
from mlbert.data.formats.manifest import write_json
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.tfrecord import ExampleReader, write_examples

Lists = dict[str, list]
# The sequence of `simple_lists`: tokens, length of the first segment, is-next label,
# masked positions and labels.
SIMPLE_ROW = ([101, 7, 102, 30000, 102], 3, True, [1, 3], [9, 65535])
SIMPLE_WIDTHS = plain.Widths(8, 3)


def write_parts(folder: Path, *parts: Ragged) -> Path:
    """Write a new folder of TFRecords, one file per part, with the widths 32 and 5."""
    folder.mkdir()
    for number, rows in enumerate(parts):
        write_examples(folder / f"part-{number:05d}-of-{len(parts):05d}", rows, 32, 5)
    return folder


def read_examples(path: Path | str, **options: Any) -> Iterator[Ragged]:
    return (part.rows for part in ExampleReader(path, **options))


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def message(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def values(content: list, packed: bool = True, kind: int = 3) -> bytes:
    """Encode the content of a tf.train.Int64List (kind 3) or FloatList (kind 2)."""
    pieces = [struct.pack("<f", value) if kind == 2 else varint(value) for value in content]
    if packed:
        return message(1, b"".join(pieces))
    tag = bytes([8 if kind == 3 else 13])
    return b"".join(tag + piece for piece in pieces)


def feature(content: list, packed: bool = True, kind: int = 3) -> bytes:
    return message(kind, values(content, packed, kind))


def entry(name: str, content: bytes) -> bytes:
    return message(1, message(1, name.encode()) + message(2, content))


def entries(lists: Lists, **options: Any) -> list[bytes]:
    kinds = {name: 2 if name == "masked_lm_weights" else 3 for name in lists}
    return [
        entry(name, feature(content, kind=kinds[name], **options))
        for name, content in lists.items()
    ]


def example(lists: Lists, **options: Any) -> bytes:
    return message(1, b"".join(entries(lists, **options)))


def simple_lists() -> Lists:
    """Return a sequence of 5 tokens (3 in the first segment) padded to 8,
    with 2 masked tokens padded to 3.
    """
    return {
        "input_ids": [101, 7, 102, 30000, 102, 0, 0, 0],
        "input_mask": [1, 1, 1, 1, 1, 0, 0, 0],
        "segment_ids": [0, 0, 0, 1, 1, 0, 0, 0],
        "masked_lm_positions": [1, 3, 0],
        "masked_lm_ids": [9, 65535, 0],
        "masked_lm_weights": [1.0, 1.0, 0.0],
        "next_sentence_labels": [1],
    }


def frame(*records: bytes) -> bytes:
    return b"".join(map(plain.frame, records))


def odd_examples() -> dict[str, bytes]:
    """Return the sequence of `simple_lists` in many encodings."""
    lists = simple_lists()
    whole = example(lists)
    backwards = dict(reversed(lists.items()))
    halves = [message(1, part) for part in entries(lists)]
    ids = lists["input_ids"]
    others = {name: content for name, content in lists.items() if name != "input_ids"}
    mixed = message(
        3, values(ids[:2]) + values(ids[2:4], packed=False) + message(1, b"") + values(ids[4:])
    )
    two_lists = message(3, values(ids[:4])) + message(3, values(ids[4:]))
    replaced = feature([1.0, 2.0], kind=2) + feature(ids)
    value_first = message(1, message(2, feature(ids)) + message(1, b"input_ids"))
    long_ids = [
        bytes([i & 127 | 128, i >> 7 & 127 | 128, i >> 14 & 127 | 128, 128, 0]) for i in ids
    ]
    long_varints = message(3, message(1, b"".join(long_ids)))
    unknown = (
        varint(99 << 3) + varint(5) + varint(7 << 3 | 1) + bytes(8) + varint(8 << 3 | 5) + bytes(4)
    )

    def with_ids(content: bytes) -> bytes:
        return message(1, b"".join(entries(others)) + content)

    return {
        "unpacked": example(lists, packed=False),
        "other order": example(backwards),
        "features in pieces": b"".join(halves),
        "packed and unpacked": with_ids(entry("input_ids", mixed)),
        "a list in two pieces": with_ids(entry("input_ids", two_lists)),
        "a kind replaced": with_ids(entry("input_ids", replaced)),
        "the value before its name": with_ids(value_first),
        "long varints": with_ids(entry("input_ids", long_varints)),
        "a later entry wins": message(1, entry("input_ids", feature([1, 2]))) + whole,
        "an unknown feature": whole
        + message(1, entry("more", feature([1])) + entry("text", message(1, b"\n\1a"))),
        "unknown fields": unknown + whole + unknown,
        "weights in other places": example(
            {
                **lists,
                "masked_lm_positions": [1, 0, 3],
                "masked_lm_ids": [9, 0, 65535],
                "masked_lm_weights": [1, 0, 1],
            }
        ),
        "padding that is not zero": example(
            {
                **lists,
                "input_ids": [*ids[:5], 70000, -1, 5],
                "segment_ids": [0, 0, 0, 1, 1, 1, 5, 0],
            }
        ),
    }


def write_list(
    folder: Path, names: list[str], vocabulary_sha256: str = "a" * 64, size: int = 500
) -> None:
    """Write an instances.json that lists some files of a folder in their current state."""
    files = []
    for name in names:
        rows = Ragged.concatenate(list(read_examples(folder / name)))
        counts = {
            "num_sequences": len(rows),
            "num_tokens": len(rows.tokens),
            "num_masked": len(rows.masked_labels),
        }
        files.append({"file": name, "bytes": (folder / name).stat().st_size, **counts})
    widths = {"max_seq_length": 32, "max_predictions": 5}
    totals = {
        key: sum(file[key] for file in files)
        for key in ("num_sequences", "num_tokens", "num_masked")
    }
    document = {
        "format": "tfrecord",
        "vocabulary": {"sha256": vocabulary_sha256, "size": size},
        **widths,
        **totals,
    }
    write_json(folder / "instances.json", {**document, "files": files, "provenance": {}})


def records_of(path: Path) -> list[bytes]:
    content = path.read_bytes()
    found = []
    place = 0
    while place < len(content):
        end = place + struct.unpack_from("<Q", content, place)[0] + 16
        found.append(content[place:end])
        place = end
    return found
