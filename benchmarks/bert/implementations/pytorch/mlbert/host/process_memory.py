"""The memory of a process and of those that it started, as Linux counts it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_KIB = 1024  # bytes, the unit of /proc


@dataclass(frozen=True)
class Memory:
    """Bytes in physical memory.

    Attributes:
        rss: a page that several processes share counts for each.
        pss: it counts once, divided among the processes that share it.
    """

    rss: int
    pss: int


def memory_of(processes: set[int]) -> Memory:
    """Return the memory of processes; those that have ended take none."""
    sums = {"Rss": 0, "Pss": 0}
    for number in processes:
        try:
            lines = (_PROC / str(number) / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(":")
            if name in sums:
                sums[name] += _KIB * int(value.split()[0])
    return Memory(sums["Rss"], sums["Pss"])


def descendants_of(process: int) -> set[int]:
    """Return the processes that a process started, and those that they started."""
    parents = {}
    for path in _PROC.glob("[0-9]*/stat"):
        try:
            # The name of a process, in parentheses, may contain anything.
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(fields[1])
    found: set[int] = set()
    more = {process}
    while more:
        more = {child for child, parent in parents.items() if parent in more}
        found |= more
    return found
