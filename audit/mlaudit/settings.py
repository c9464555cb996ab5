"""Names of mlbert's settings, for logs that state them; imported only when such a log is judged.

The list imports the declarations of all packages of mlbert, none of which needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mlbert.config.section import Registry, Section, Setting
from mlbert.host.errors import UserError

if TYPE_CHECKING:
    from mlbert.config.sources import ConfigName, Export

# Public name of the recipes masked_lm_stored and masked_lm_text.
MASKED_LM = "masked_lm"


def settings_by_key() -> Mapping[str, Setting]:
    """Return every setting that a run may have, by its key in config.json."""
    from mlbert.recipes import sections

    return sections.settings_by_key()


def settings_by_env() -> Mapping[str, Setting]:
    """Return every legal export by name."""
    from mlbert.recipes import sections

    return sections.settings_by_env()


def sections() -> Sequence[type[Section]]:
    """Return the classes that declare settings."""
    from mlbert.recipes.sections import SECTIONS

    return SECTIONS


def registry_of(key: str) -> Registry:
    """Return the choices of a setting, by its key."""
    registry = settings_by_key()[key].registry
    assert registry is not None
    return registry


@cache
def section_names() -> frozenset[str]:
    """Return the names of the classes that declare settings."""
    return frozenset(section.__name__ for section in sections())


def parse_config_name(name: str) -> ConfigName | None:
    """Return what a config's file name says of the run; see `mlbert.config.sources`."""
    from mlbert.config import sources

    return sources.parse_config_name(name)


def check_exports(config_file: Path) -> dict[str, Export]:
    """Return the exports of a ``config_*.sh``; see `mlbert.config.sources.check_exports`."""
    from mlbert.recipes import sections

    return sections.check_exports(config_file)


def unknown_name(name: str, what: str, known: Iterable[str]) -> UserError:
    """Return the error for an unknown name; see `mlbert.config.words.unknown_name`."""
    from mlbert.recipes import sections

    return sections.unknown_name(name, what, known)
