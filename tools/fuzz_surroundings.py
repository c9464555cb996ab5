"""Damages of a file or its folder, whatever the format, for `fuzz_campaign`."""

from __future__ import annotations

import os
import random
from pathlib import Path

DEEP = 100_000  # levels of nesting
_DEEP_TEXTS = (
    "[" * DEEP + "]" * DEEP,
    '{"a":' * DEEP + "1" + "}" * DEEP,
    "a: " + "[" * DEEP + "]" * DEEP,
)


def nest(path: Path, rng: random.Random) -> None:
    """Write a text that is nested too deeply for a recursive reader."""
    path.write_text(rng.choice(_DEEP_TEXTS))


def resize(path: Path, rng: random.Random) -> None:
    """Empty, cut or stretch a file, or write one endless row."""
    kind = rng.choice(("empty", "half", "huge", "endless row"))
    if kind == "empty" or (kind == "half" and path.suffix in (".txt", ".csv", ".jsonl", ".yaml")):
        path.write_bytes(b"")
    elif kind == "endless row":
        path.write_bytes(b'{"text": "' + b"x" * (80 << 20))
    else:
        os.truncate(path, path.stat().st_size // 2 if kind == "half" else 6 << 30)


def reencode(path: Path, rng: random.Random) -> None:
    """Write a text in another encoding, or with zero bytes."""
    data = path.read_bytes()
    text = data.decode(errors="replace")
    path.write_bytes(
        rng.choice(
            (text.encode("utf-16"), text.encode("utf-32"), b"\xff\xfe" + data, b"\0\0" + data)
        )
    )


def forbid(path: Path, rng: random.Random) -> None:
    """Take all rights from a file or its folder."""
    rng.choice((path, path, path.parent)).chmod(0)


def link_to_itself(path: Path, rng: random.Random) -> None:
    """Put a loop of symbolic links into the folder, or in place of the file."""
    if rng.random() < 0.5:
        (path.parent / "loop").symlink_to(path.parent)
    else:
        path.unlink()
        path.symlink_to(path.parent / "loop2")
        (path.parent / "loop2").symlink_to(path)
