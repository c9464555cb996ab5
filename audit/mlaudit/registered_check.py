"""What the registry of our own checks says of a check: its function, and where it applies."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from mlbert.host.registry import Choice


class Scope(Enum):
    """The benchmarks that a check is for."""

    EVERY = auto()
    # Every benchmark, but its thresholds were measured on logs of BERT. What an honest run of
    # another benchmark can show is not known, so its errors are warnings there.
    MEASURED_ON_BERT = auto()
    BERT = auto()


@dataclass(frozen=True)
class OwnCheck(Choice):
    """A check and what it needs. Its place is a function that yields the complaints.

    Attributes:
        scope: the benchmarks that it is for.
        needs_system: whether it reads the system description, which only a tree has.
        reads_empty: whether it reads logs without events, too.
    """

    scope: Scope
    needs_system: bool = False
    reads_empty: bool = False
