"""Read around bad rows of a data set, and record what was skipped.

A row is a sequence, or a pack in a set that stores packs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np

from mlbert.data.formats.base import Store
from mlbert.data.formats.open import open_store
from mlbert.data.formats.ragged import Ragged
from mlbert.host.errors import UserError
from mlbert.host.files import read_plain, write_atomically
from mlbert.host.json_files import parse_json

Result = TypeVar("Result")


@lru_cache(maxsize=1)
def opened(folder: Path) -> Store:
    """Return a set, opened once per worker."""
    return open_store(folder)


def gather_rows(store: Store, rows: np.ndarray, packed: bool) -> tuple[Ragged, np.ndarray]:
    """Return the sequences of some rows (int64 [R]), and int64 [R] sequences per row."""
    return store.gather_packs(rows) if packed else (store.gather(rows), np.ones(len(rows), np.int64))


def read_past_errors(
    read: Callable[[np.ndarray], Result], first: int, end: int, block: int
) -> Iterator[Result | UserError]:
    """Yield the results of ``read`` for the rows from ``first`` to ``end`` (exclusive), in order, at most ``block`` at
    a time. If it raises `UserError`, halve the rows down to single ones, and yield the error of each bad row
    instead."""
    for start in range(first, end, block):
        stop = min(start + block, end)
        try:
            result = read(np.arange(start, stop))
        except UserError as error:
            if stop - start == 1:
                yield error
            else:
                yield from read_past_errors(read, start, stop, (stop - start + 1) // 2)
        else:
            yield result


@dataclass(frozen=True)
class LeftOut:
    """Records of what was skipped in each shard, stored next to the shards until the manifest lists it, because a rerun
    keeps shards."""

    folder: Path
    num_shards: int

    def _path(self, index: int) -> Path:
        return self.folder / f"skipped-{index:05d}.json"

    def write(self, index: int, lines: list[str]) -> None:
        """Record the skipped rows before shard ``index`` is written, so that every existing shard has its record."""
        write_atomically(self._path(index), json.dumps(lines))

    def read(self, index: int) -> list[str] | None:
        """Return what was skipped in shard ``index``, or None if that is unknown."""
        try:
            return [str(line) for line in parse_json(read_plain(self._path(index)))]
        except (ValueError, TypeError):  # UserError too
            return None

    def remove(self) -> None:
        """Remove all records."""
        for index in range(self.num_shards):
            self._path(index).unlink(missing_ok=True)
