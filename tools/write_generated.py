"""Writes what is made from the table of settings: launch/reset_settings.sh and docs/settings.md.

python tools/write_generated.py
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from mlbert.core.settings import markdown_table, settings_by_env

ROOT = Path(__file__).parents[1]
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
wins: recipe default, YAML (`--config`; `extends:` names a parent), export, flag or `key=value`. Written by
`tools/write_generated.py` from `mlbert/core/settings.py`.
Whatever a run gives: Result not verified by MLCommons Association.

"""


def reset_text() -> str:
    """The whole of reset_settings.sh."""
    names = textwrap.wrap(" ".join(settings_by_env()), 110, break_long_words=False)
    return RESET_HEADER + "unset " + " \\\n    ".join(names) + "\n"


def settings_text() -> str:
    """The whole of settings.md."""
    return SETTINGS_HEADER + markdown_table().rstrip("\n") + "\n"


if __name__ == "__main__":
    RESET.write_text(reset_text(), encoding="utf-8")
    SETTINGS.parent.mkdir(exist_ok=True)
    SETTINGS.write_text(settings_text(), encoding="utf-8")
