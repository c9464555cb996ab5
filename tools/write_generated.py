"""Writes what is made from the table of settings: launch/reset_settings.sh and docs/settings.md.

python tools/write_generated.py
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

from mlbert import recipes
from mlbert.core.setting import Setting
from mlbert.core.setting_words import markdown_table
from mlbert.core.settings import LAUNCH_SETTINGS, settings_by_env

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks/bert/implementations/tensorflow2"))
LAUNCHERS = ROOT / "benchmarks/bert/implementations/pytorch/launch"
RESET = ROOT / "benchmarks/bert/implementations/pytorch/launch/reset_settings.sh"
SETTINGS = ROOT / "docs/settings.md"
RESET_HEADER = """\
# Forgets every setting that another config exported, so that sourcing config B after config A equals sourcing B.
# Sourced by begin_system.sh. Written by tools/write_generated.py from mlbert/core/settings.py.
# shellcheck shell=bash
"""
SETTINGS_HEADER = """\
# Settings

Every name that a `config_<system>.sh` may export, with its flag of `mlbert train` and its key in YAML. A later source
wins: recipe default, YAML (`--config`; `extends:` names a parent), export, flag or `key=value`. A default after a
semicolon is that of the recipe it names; "required": somebody has to give it. Written by
`tools/write_generated.py` from `mlbert/core/settings.py`.
Whatever a run gives: Result not verified by MLCommons Association.

"""


def reset_text() -> str:
    """The whole of reset_settings.sh."""
    names = textwrap.wrap(" ".join(settings_by_env()), 110, break_long_words=False)
    return RESET_HEADER + "unset " + " \\\n    ".join(names) + "\n"


def settings_text() -> str:
    """The whole of settings.md."""
    launchers = [(row, launcher_default(row)) for row in LAUNCH_SETTINGS]
    return SETTINGS_HEADER + markdown_table(defaults(), launchers)


def defaults() -> Mapping[str, Mapping[str, object]]:
    """Recipe to defaults; what TensorFlow's does not read counts as what most of the others have."""
    from tf2_bert.recipe import DEFAULTS, UNREAD

    found = {name: recipes.load(name).DEFAULTS for name in recipes.names()}
    return {**found, "tensorflow2": {**UNREAD, **found["packed_lamb"], **DEFAULTS}}


def launcher_default(row: Setting) -> str:
    """The constant that the launchers put in place of a variable that is not set, if there is one."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(LAUNCHERS.iterdir()) if path.is_file())
    found = set(re.findall(rf"\$\{{{row.env}:[-=]([\w.]+)\}}", text))
    return found.pop() if len(found) == 1 else "not set"


if __name__ == "__main__":
    RESET.write_text(reset_text(), encoding="utf-8")
    SETTINGS.parent.mkdir(exist_ok=True)
    SETTINGS.write_text(settings_text(), encoding="utf-8")
