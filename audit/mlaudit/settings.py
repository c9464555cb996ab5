"""Names of mlbert's settings, for logs that state them; imported only when such a log is judged.

The list imports the declarations of all packages of mlbert, none of which needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

from mlbert.config.section import Section, Setting

if TYPE_CHECKING:
    from mlbert.config.sources import ConfigName

# Public name of the recipes masked_lm_stored and masked_lm_text.
MASKED_LM = "masked_lm"


def settings_by_key() -> Mapping[str, Setting]:
    """Return every setting that a run may have, by its key in config.json."""
    from mlbert.config import sections

    return sections.settings_by_key()


def settings_by_env() -> Mapping[str, Setting]:
    """Return every legal export by name."""
    from mlbert.config import sections

    return sections.settings_by_env()


def sections() -> Sequence[type[Section]]:
    """Return the classes that declare settings."""
    from mlbert.config.sections import SECTIONS

    return SECTIONS


@cache
def section_names() -> frozenset[str]:
    """Return the names of the classes that declare settings."""
    return frozenset(section.__name__ for section in sections())


def parse_config_name(name: str) -> ConfigName | None:
    """Return what a config's file name says of the run; see `mlbert.config.sources`."""
    from mlbert.config import sources

    return sources.parse_config_name(name)
