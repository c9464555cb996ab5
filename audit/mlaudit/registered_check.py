"""What the registry of our own checks says of a check: its function, and where it applies."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from mlaudit.result_set import Check


class Scope(Enum):
    """The benchmarks that a check is for."""

    EVERY = auto()
    # Every benchmark, but its thresholds were measured on logs of BERT. What an honest run of
    # another benchmark can show is not known, so its errors are warnings there.
    MEASURED_ON_BERT = auto()
    BERT = auto()


@dataclass(frozen=True)
class OwnCheck:
    """A check and what it needs.

    Attributes:
        function: yields the complaints.
        scope: the benchmarks that it is for.
        needs_system: whether it reads the system description, which only a tree has.
    """

    function: Check
    scope: Scope
    needs_system: bool = False
