"""The hosts of a run without a scheduler: ``--hosts a,b`` or a host file of lines such as
``node1 slots=8``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlbert.host.errors import UserError
from mlbert.host.files import read_plain
from mlbert.host.texts import is_count

_NAME = re.compile(r"(?:[\w.-]+@)?[\w.:%-]+", re.ASCII)
_LINE = "Write lines such as: node1 slots=8"
MOST_SLOTS = 1024


@dataclass(frozen=True)
class HostList:
    """Hosts of a run.

    Attributes:
        names: as ``ssh`` takes them, the first one for rank 0.
        slots: ranks of each host; None if they are not given.
    """

    names: tuple[str, ...]
    slots: int | None = None

    @property
    def first_address(self) -> str:
        """The first host without the name of a user."""
        return self.names[0].rpartition("@")[2]


def parse_hosts(text: str) -> HostList:
    """Return the hosts of a text such as ``a,b,c``.

    Raises UserError if it has none, one twice, or one that is not a host name.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    _check_names("--hosts", names)
    return HostList(tuple(names))


def read_hostfile(path: Path) -> HostList:
    """Return the hosts of a file, whose lines have a name and perhaps ``slots=N``; the rest of a
    line after ``#`` is a comment.

    Raises UserError if it cannot be read, has another line, or not as many slots for each host.
    """
    names: list[str] = []
    slots: list[int | None] = []
    text = read_plain(path, "Name an existing file").decode(errors="replace")
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        names.append(words[0])
        slots.append(_slots(path, number, words[1:]))
    _check_names(path, names)
    if len(set(slots)) > 1:
        reason = "has hosts with different numbers of slots"
        remedy = "Give all hosts the same number, and start a separate job for each kind of machine"
        raise UserError("config.unsupported", path, reason, remedy)
    return HostList(tuple(names), slots[0])


def _slots(path: Path, number: int, words: Sequence[str]) -> int | None:
    """Return the slots of a line of a host file."""
    if not words:
        return None
    name, _, count = words[0].partition("=")
    is_known = len(words) == 1 and name == "slots" and is_count(count)
    if not is_known or not 1 <= int(count) <= MOST_SLOTS:
        reason = f"line {number} has '{' '.join(words)}' after the host"
        raise UserError("config.file", path, reason, _LINE)
    return int(count)


def _check_names(subject: str | Path, names: Sequence[str]) -> None:
    if not names:
        raise UserError("config.missing", subject, "names no host", "Name at least one")
    for name in names:
        if not _NAME.fullmatch(name) or name.startswith("-"):
            reason = f"'{name}' is not the name of a host"
            raise UserError("config.value", subject, reason, "Write a name as for ssh")
        if names.count(name) > 1:
            raise UserError("config.duplicate", subject, f"{name} is named twice", "Name it once")
