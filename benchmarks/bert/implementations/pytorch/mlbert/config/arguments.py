"""Arguments of a training command, sorted into flags, files and ``key=value`` words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlbert.config.configuration import Catalog
from mlbert.config.section import is_yes_or_no
from mlbert.config.words import unknown_name
from mlbert.host.errors import UserError

_KEY_VALUE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class CommandLine:
    """Arguments of a command line, sorted by kind; types are not checked yet."""

    flags: Mapping[str, str] = field(default_factory=dict)  # key (or flag) to text
    # Arguments of --config: files of ``key: value`` lines, later ones win;
    # ``extends: other.yaml`` names a parent.
    yaml_files: Sequence[Path] = ()
    overrides: Sequence[str] = ()  # key=value


def split_arguments(catalog: Catalog, words: Sequence[str]) -> CommandLine:
    """Sort command line arguments into flags, ``--config FILE`` and ``key=value``.

    Accepts ``--flag value`` and ``--flag=value``, with dashes or underscores;
    a yes/no flag may appear without a value.

    Raises:
        UserError: an unknown flag, a flag without its value, or a stray word.
    """
    flags: dict[str, str] = {}
    yaml_files: list[Path] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            if not _KEY_VALUE.fullmatch(word):
                raise UserError(
                    "config.syntax",
                    word,
                    "is neither a flag nor key=value",
                    "See mlbert train --help",
                )
            overrides.append(word)
            continue
        flag, has_value, value = word.partition("=")
        key = "config" if flag == "--config" else key_of_flag(catalog, flag)
        if not has_value:
            is_alone = not rest or rest[0].startswith("--") or not is_yes_or_no(rest[0])
            if key != "config" and catalog.by_key[key].kind is bool and is_alone:
                value = "1"
            elif rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            else:
                raise UserError("config.syntax", flag, "has no value", f"Write {flag} VALUE")
        if key == "config":
            yaml_files.append(Path(value))
        elif key in flags:
            raise UserError("config.duplicate", flag, "is given twice", "Give it once")
        else:
            flags[key] = value
    return CommandLine(flags, yaml_files, overrides)


def key_of_flag(catalog: Catalog, flag: str) -> str:
    """Return the key of the setting that a flag sets. Raise UserError if there is none."""
    key = flag.removeprefix("--").replace("-", "_")
    if key in catalog.by_key:
        return key
    known = [*(one.flag for one in catalog.by_key.values()), "--config"]
    raise unknown_name(catalog, f"--{flag.removeprefix('--')}", "option", known)
