"""What every check looks at: the logs of one system with its description, and how a check words an error."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from mlbert.mlperf.findings import Complaint, Complaints, Outcome
from mlbert.mlperf.logs import Event, Log

_LARGEST = int(sys.float_info.max)

# Rules that several checks name.
LOG_FORMAT = "log format: every line is a JSON object with metadata, without which official tools crash"
ONE_SETTING = "rules: ten runs of one system, code and set of hyper-parameters"
SAMPLE_COUNTS = "rules, BERT: epoch_num is the number of training samples so far"
OWN_FORM = "this code's own logs"


@dataclass(frozen=True)
class ResultSet:
    """The logs of one system, in the order of their names."""

    logs: Sequence[Log]
    system: Mapping[str, Any] | None = None  # systems/<system>.json; None outside a tree, as is the next but one
    division: str | None = None  # that the user named
    tree: Path | None = None  # its folder, with its history if it has one

    @property
    def system_file(self) -> Path | None:
        """systems/<system>.json beside the logs' results/<system>/bert; None outside a tree."""
        folders = self.logs[0].path.parents
        if self.system is None or len(folders) < 4:
            return None
        return folders[3] / "systems" / f"{folders[1].name}.json"

    @property
    def wanted_division(self) -> object:
        """What every log should say: the user's word, else the system's, else the first log's."""
        if self.division is not None:
            return self.division
        if self.system is not None:
            return self.system.get("division")
        return self.logs[0].value("submission_division")


Check = Callable[[ResultSet], Complaints]


def is_ours(log: Log) -> bool:
    """Whether this code wrote a log: it tells its recipe or its configuration, or a call in this code wrote a line."""
    return log.is_of_this_code


def error(log: Log, text: str, rule: str, event: Event | None = None) -> Complaint:
    """An error in one log, at the line of an event."""
    return Complaint(Outcome.ERROR, where(log, event) + text, rule)


def where(log: Log, event: Event | None = None) -> str:
    """How a complaint begins: the file, and the line of an event."""
    return f"{log.path.name}: " + (f"line {event.line}: " if event else "")


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a plain, finite number that fits a float; true and false are none."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= _LARGEST
    return isinstance(value, float) and math.isfinite(value)
