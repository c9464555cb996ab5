"""What every check looks at: the logs of one system with its description, and how a check words an error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from mlbert.submission.findings import Complaint, Complaints, Outcome
from mlbert.submission.logs import Log

_OURS = ("configuration", "recipe")

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
    def wanted_division(self) -> object:
        """What every log should say: the user's word, else the system's, else the first log's."""
        if self.division is not None:
            return self.division
        if self.system is not None:
            return self.system.get("division")
        return self.logs[0].value("submission_division")


Check = Callable[[ResultSet], Complaints]


def is_ours(log: Log) -> bool:
    """Whether this code wrote a log: then it tells its recipe or its configuration."""
    return any(log.first(key) is not None for key in _OURS)


def error(log: Log, text: str, rule: str) -> Complaint:
    """An error in one log."""
    return Complaint(Outcome.ERROR, f"{log.path.name}: {text}", rule)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a plain, finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
