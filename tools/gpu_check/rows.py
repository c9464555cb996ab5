"""Measure rows one by one, and append each to a file of JSON lines as soon as it is known.

A row that fails is recorded with its error, and the next one still runs. Several processes may
append to one file: a line is one write.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Rows:
    """The rows of one part.

    Args:
        path: file of JSON lines, to which every part of a call appends.
        part: name of the part, written into each row.
    """

    def __init__(self, path: Path, part: str) -> None:
        self.path = path
        self.part = part

    def measure(self, name: str, measurement: Callable[[], Row]) -> Row:
        """Run a measurement, append its row, and return it."""
        print(f"{self.part}: {name}", flush=True)
        started = time.monotonic()
        try:
            found = measurement()
        except Exception:
            found = {"error": traceback.format_exc()}
        found["wall_seconds"] = round(time.monotonic() - started, 2)
        return self.append(name, found)

    def append(self, name: str, found: Row) -> Row:
        """Append a row to the file, and return it."""
        row = {"part": self.part, "row": name, **found}
        line = json.dumps(row) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        return row


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file in order; a last line that is cut off is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
