"""Registries: what is chosen by name, each name with where it is and what it reads.

    SCHEDULES = Registry({"linear": Choice("mlbert.optim.schedules:Linear", reads=("end_lr",))})

Choices, help, docs and the auditor's rules derive from a registry,
so a new choice is a new file and one line.
"""

from __future__ import annotations

import pkgutil
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, TypeVar


@dataclass(frozen=True)
class Choice:
    """One choice of a registry. Kinds of choices with more facts are subclasses.

    Attributes:
        place: ``module:object``, imported when the choice is used.
        reads: keys of the settings that only some choices read, and this one does.
        needs: those of them that must be set.
        in_closed: True if MLPerf's closed division allows it.
    """

    place: str
    _: KW_ONLY
    reads: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    in_closed: bool = False

    def load(self) -> Any:
        """Import and return the object."""
        return pkgutil.resolve_name(self.place)


Kind = TypeVar("Kind", bound=Choice)


class Registry(dict[str, Kind], Generic[Kind]):
    """Choices by name, in the order in which users see them."""

    def load(self, name: str) -> Any:
        """Import and return the object that a name stands for. Raises KeyError if there is none."""
        return self[name].load()

    @property
    def allowed_in_closed(self) -> tuple[str, ...]:
        """The names that MLPerf's closed division allows."""
        return tuple(name for name, choice in self.items() if choice.in_closed)

    def unread_by(self, name: str) -> tuple[str, ...]:
        """Return the keys, sorted, that other choices read and this one does not."""
        every = {key for choice in self.values() for key in choice.reads}
        return tuple(sorted(every - set(self[name].reads)))
