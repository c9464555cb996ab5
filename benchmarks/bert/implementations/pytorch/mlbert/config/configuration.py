"""A run's resolved configuration, and the catalog of all settings that it is made from.

No section is known here: `mlbert.recipes.sections` makes the catalog, and hands it to
`mlbert.config.resolution`.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

from mlbert.config.section import Contradiction, Section, Setting, settings_of

Kind = TypeVar("Kind", bound=Section)


class Relations(Protocol):
    """Relations between values of different sections;
    a section's own methods check those within it.
    """

    def contradictions(self, config: Configuration) -> Iterable[Contradiction]:
        """Return contradictions between values, the most important first."""

    def oddities(self, config: Configuration) -> Iterable[str]:
        """Return a sentence about each value that is legal but looks like a mistake."""

    def may_change(self, config: Configuration) -> Iterable[str]:
        """Return exports that a resumed run may change, although they are declared as fixed."""


@dataclass(frozen=True)
class Catalog:
    """Every setting that a run may have.

    Attributes:
        sections: the classes that declare them.
        launchers: declares what only the launchers read.
        relations: between values of different sections.
    """

    sections: tuple[type[Section], ...]
    launchers: type[Section]
    relations: Relations

    @cached_property
    def by_key(self) -> Mapping[str, Setting]:
        """Every setting that a run may have, by key."""
        settings = [one for section in self.sections for one in settings_of(section)]
        found = {one.key: one for one in settings}
        assert len(found) == len(settings), "two settings have the same key"
        return types.MappingProxyType(found)

    @cached_property
    def by_env(self) -> Mapping[str, Setting]:
        """Every legal export by name; those that only the launchers read are last."""
        settings = (*self.by_key.values(), *settings_of(self.launchers))
        return types.MappingProxyType({one.env: one for one in settings})


class Configuration:
    """The sections of a run, by type: ``configuration[OptimizerConfig].beta1``.

    Args:
        sections: one instance of each of the recipe's sections.
        catalog: of all settings.
    """

    def __init__(self, sections: Iterable[Section], catalog: Catalog) -> None:
        self._sections = {type(section): section for section in sections}
        self.catalog = catalog

    def __getitem__(self, kind: type[Kind]) -> Kind:
        """Return a section; KeyError if the run's recipe does not have it."""
        section = self._sections[kind]
        assert isinstance(section, kind)
        return section

    def or_defaults(self, kind: type[Kind]) -> Kind:
        """Return a section, or its defaults if the run's recipe does not have it."""
        return self[kind] if kind in self._sections else kind()

    def get(self, setting: Setting) -> object:
        """Return the value of a setting; None if the recipe does not have its section."""
        section = self._sections.get(setting.section)
        return None if section is None else getattr(section, setting.field)

    def fixed_on_resume(self) -> dict[str, object]:
        """Return environment name to value for settings that a resumed run must not change.

        Data, model shape and batch are compared by content, not by a setting. Limits, evaluations,
        paths, speed settings and the length of the schedule may change.
        """
        settings = self.catalog.by_key.values()
        fixed = {one.env: self.get(one) for one in settings if one.fixed_on_resume}
        for env in self.catalog.relations.may_change(self):
            del fixed[env]
        return fixed

    def replace(self, section: Section) -> Configuration:
        """Return a copy with this section replacing the one of its type."""
        return Configuration({**self._sections, type(section): section}.values(), self.catalog)

    @property
    def sections(self) -> Iterable[Section]:
        """All sections."""
        return self._sections.values()
