"""The share of a step that one of several commands runs: ``--task I/N``, or ``--merge``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mlbert.host.errors import UserError


@dataclass(frozen=True)
class Share:
    """What a process does of a step: the tasks whose number modulo ``count`` is ``index`` (none if
    it is 0), and the merge if ``merges``.
    """

    index: int = 0
    count: int = 1
    merges: bool = True

    @classmethod
    def only_merge(cls) -> Share:
        """Return the share that has no task and merges."""
        return cls(count=0)

    @property
    def is_all(self) -> bool:
        """Whether it is the whole step."""
        return self.merges and self.count == 1

    def has(self, task: int) -> bool:
        """Return whether a task belongs to this share."""
        return bool(self.count) and task % self.count == self.index


def parse_share(task: str | None, merge: bool) -> Share:
    """Return the share of ``--task I/N`` or ``--merge``; all if neither is given.

    Raises UserError.
    """
    if task is None:
        return Share.only_merge() if merge else Share()
    if merge:
        reason = "exclude each other"
        raise UserError(
            "config.conflict",
            "--task and --merge",
            reason,
            "Use --merge after the tasks of all shares",
        )
    found = re.fullmatch(r"([0-9]{1,6})/([1-9][0-9]{0,5})", task)
    if not found:
        raise UserError(
            "config.value", "--task", f"{task} is not I/N", "Use for example 0/4, 1/4, 2/4 and 3/4"
        )
    index, count = map(int, found.groups())
    if index >= count:
        reason = f"{task}: there is no share {index} of {count}"
        raise UserError("config.range", "--task", reason, f"Use 0/{count} to {count - 1}/{count}")
    return Share(index, count, merges=False)
