"""Damage a file as disks, editors, other programs and attackers do.

The damage depends only on a random generator.

JSON values and TFRecords are also damaged one by one;
checksums of records are then recomputed, so that readers accept them.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlbert.data.formats import tfrecord_plain

_TOKEN = ":::MLLOG "
_DEEP = 20_000
_HUGE = 300_000  # number of characters in a text
_NUMBERS = (
    0,
    -1,
    1,
    0.5,
    -0.0,
    1e308,
    -1e308,
    5e-324,
    2**31,
    2**53 + 1,
    2**63,
    2**64,
    -(2**63),
    10**30,
)
_MARKUP = (
    "<script>alert(1)</script>",
    "[red]x[/]",
    "[/]",
    "\x1b[2J\x1b]0;x\x07",
    "\u202eabc",
    "{{7*7}}",
    "a\nb\rc",
)
_ODD_TEXTS = (
    "",
    " ",
    "x",
    "1",
    "0x10",
    "nan",
    "1e999",
    "eval_accuracy",
    ":::MLLOG {}",
    "\0",
    "\ud800",
    "é" * 300,
)
_PATHS = ("../../etc/passwd", "/dev/zero", "/" * 5000)
_ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    {"": 0},
    float("nan"),
    float("inf"),
    -float("inf"),
)
_ODD: tuple[Any, ...] = (*_ODD_TEXTS, *_PATHS, *_ODD_VALUES, *_NUMBERS, *_MARKUP)
_JSON_TEXTS = ("", " ", "\n", "null", "[]", "{}", "5", '"x"', "true", "NaN", "9" * 5000, "1e999999")
_DEEP_TEXTS = ("[" * _DEEP, '{"a":' * _DEEP, '"' + "x" * _HUGE + '"')
_OTHER_TEXTS = ("\ufeff{}", "{" + '"a": 1,' * 3 + '"a": 2}', "\0" * 100, "<html>", "#!/bin/sh\n")
_TEXTS = (*_JSON_TEXTS, *_DEEP_TEXTS, *_OTHER_TEXTS)
_WORDS = (4, 8)  # byte widths of a number in a file
_PATTERNS = (b"\0", b"\xff", b"\x7f", b"\x80", b"\x01")


def damage(path: Path, rng: random.Random) -> str:
    """Damage a file and return a description.

    The file may then be missing or not a regular file.
    """
    if rng.random() < 0.06:
        return replace_file(path, rng)
    data = path.read_bytes()
    ways: list[Callable[[bytes, random.Random], bytes]] = [_bytes]
    if path.suffix in (".safetensors",):
        ways = [_bytes, _header]
    elif path.suffix == ".tfrecord" or path.name.endswith("_tfrecord"):
        ways = [_bytes, _records, _records]
    elif _is_text(data):
        is_json = data.lstrip()[:1] in b"{[" and path.suffix != ".yaml"
        ways = [
            _text,
            _text_numbers,
            _bytes,
            *([_values] * 3 if is_json or _TOKEN.encode() in data else []),
        ]
    way = rng.choice(ways)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = way(data, rng)
    path.write_bytes(data)
    return f"{path.name}: {way.__name__.strip('_')}"


def _is_text(data: bytes) -> bool:
    return b"\0" not in data[:4096] and not any(byte > 0xF7 for byte in data[:4096])


def replace_file(path: Path, rng: random.Random) -> str:
    """Replace a file with something else, and return a description."""
    kind = rng.choice(
        (
            "gone",
            "empty",
            "folder",
            "fifo",
            "link to nothing",
            "link to itself",
            "endless",
            "socket name",
        )
    )
    if kind == "empty":
        path.write_bytes(b"")
        return f"{path.name}: {kind}"
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link to nothing":
        path.symlink_to("nowhere")
    elif kind == "link to itself":
        path.symlink_to(path.name)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    return f"{path.name}: {kind}"


def _bytes(data: bytes, rng: random.Random) -> bytes:
    """Damage bits, words and byte ranges."""
    if not data:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(1, 64)))
    at = rng.randrange(len(data))
    length = rng.choice((1, 2, 8, 64, 4096))
    word = rng.choice(_WORDS)
    return rng.choice(
        (
            lambda: data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
            lambda: data[:at],
            lambda: data[:at] + data[at + length :],
            lambda: data[: at + length] + data[at:],
            lambda: data[:at] + rng.choice(_PATTERNS) * word + data[at + word :],
            lambda: data[:at] + rng.choice(_PATTERNS) * length + data[at:],
            lambda: data[:at] + rng.randbytes(length) + data[at + length :],
            lambda: data + rng.randbytes(length),
            lambda: rng.randbytes(length) + data,
            lambda: data + data,
        )
    )()


def _text(data: bytes, rng: random.Random) -> bytes:
    """Damage lines, line endings and encodings."""
    lines = data.splitlines(keepends=True) or [b""]
    at = rng.randrange(len(lines))
    other = rng.randrange(len(lines))
    replaced = rng.choice(_TEXTS).encode()
    return rng.choice(
        (
            lambda: b"".join([*lines[:at], *lines[at + 1 :]]),
            lambda: b"".join([*lines[:at], lines[other], *lines[at:]]),
            lambda: b"".join([*lines[:at], *lines[at:] * 50]),
            lambda: b"".join(sorted(lines, key=lambda _: rng.random())),
            lambda: data.replace(
                b"\n", rng.choice((b"\r", b"\r\n", b"\n\n", b"\0", b"\x0b", "\u2028".encode()))
            ),
            lambda: b"\xef\xbb\xbf" + data,
            lambda: data.decode(errors="replace").encode(
                rng.choice(("utf-16", "utf-32", "utf-16-le"))
            ),
            lambda: b"".join(
                [*lines[:at], bytes(rng.choices(range(128, 256), k=20)), b"\n", *lines[at:]]
            ),
            lambda: b"".join([*lines[:at], replaced, b"\n", *lines[at + 1 :]]),
            lambda: replaced,
            lambda: (
                lines[at].rstrip(b"\n")
                + rng.choice((b" ", b"{", b"eval_accuracy", b"a" * 7)) * (_HUGE // 4)
                + data
            ),
            lambda: data.replace(b'"', b"'"),
            lambda: data.replace(b" ", rng.choice((b"\t", b"", b"\xc2\xa0"))),
        )
    )()


def _text_numbers(data: bytes, rng: random.Random) -> bytes:
    """Replace one number in a text."""
    found = list(re.finditer(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?", data))
    if not found:
        return _text(data, rng)
    chosen = rng.choice(found)
    other = rng.choice(
        (
            *map(str, _NUMBERS),
            "NaN",
            "-Infinity",
            "9" * 4500,
            "1e400",
            "",
            "x",
            "0x1F",
            "1_000",
            "٣",
        )
    )
    return data[: chosen.start()] + other.encode() + data[chosen.end() :]


def _values(data: bytes, rng: random.Random) -> bytes:
    """Damage one value of a JSON or JSON Lines document."""
    text = data.decode(errors="replace")
    lines = text.splitlines(keepends=True)
    try:
        return _dump(_changed(json.loads(text), rng), rng).encode(errors="surrogatepass")
    except (ValueError, RecursionError):
        pass
    chosen = [
        index
        for index, line in enumerate(lines)
        if line.rpartition(_TOKEN)[2].lstrip()[:1] in ("{", "[")
    ]
    if not chosen:
        return _text(data, rng)
    index = rng.choice(chosen)
    before, token, line = lines[index].rpartition(_TOKEN)
    try:
        changed = _dump(_changed(json.loads(line), rng), rng)
    except (ValueError, RecursionError):
        return _text(data, rng)
    lines[index] = f"{before}{token}{changed}\n"
    return "".join(lines).encode(errors="surrogatepass")


def _dump(value: Any, rng: random.Random) -> str:
    try:
        text = json.dumps(value, ensure_ascii=rng.random() < 0.8)
    except (ValueError, RecursionError):
        return "{}"
    return text.replace('"@deep@"', "[" * _DEEP + "]" * _DEEP).replace('"@long@"', "9" * 5000)


def _changed(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with one part replaced, removed, renamed or duplicated."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.12:
        return rng.choice(
            (
                rng.choice(_ODD),
                "@deep@",
                "@long@",
                "x" * _HUGE,
                [value],
                {"value": value},
                str(value),
            )
        )
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = rng.choice(keys)
    kind = rng.random()
    if kind < 0.7:
        value[key] = _changed(value[key], rng)
    elif kind < 0.85:
        del value[key]
    elif isinstance(value, dict):
        moved = value.pop(key) if rng.random() < 0.5 else rng.choice(_ODD)
        value[f"{key}{rng.choice(('s', ' ', '_', 'é', ''))}"] = moved
    else:
        value.insert(key, value[rng.randrange(len(value))])
    return value


def _header(data: bytes, rng: random.Random) -> bytes:
    """Damage the header of a safetensors file and correct its length."""
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= len(data) - 8:
        return _bytes(data, rng)
    header = _values(data[8 : 8 + length], rng)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def _records(data: bytes, rng: random.Random) -> bytes:
    """Drop, duplicate or damage records of a TFRecord file, with valid checksums."""
    records = []
    at = 0
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        if length > len(data):
            return _bytes(data, rng)
        records.append(data[at + 12 : at + 12 + length])
        at += 16 + length
    if not records:
        return _bytes(data, rng)
    index = rng.randrange(len(records))
    kind = rng.random()
    if kind < 0.15:
        del records[index]
    elif kind < 0.3:
        records.insert(index, records[rng.randrange(len(records))])
    else:
        records[index] = _bytes(records[index], rng)
    return b"".join(map(tfrecord_plain.frame, records))
