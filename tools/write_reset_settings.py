"""Writes launch/reset_settings.sh from the table of settings.

python tools/write_reset_settings.py
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from mlbert.core.settings import settings_by_env

TARGET = Path(__file__).parents[1] / "benchmarks/bert/implementations/pytorch/launch/reset_settings.sh"
HEADER = """\
# Forgets every setting that another config exported, so that sourcing config B after config A equals sourcing B.
# Sourced first by each system's env.sh. Written by tools/write_reset_settings.py from mlbert/core/settings.py.
# shellcheck shell=bash
"""


def text() -> str:
    """The whole file."""
    names = textwrap.wrap(" ".join(settings_by_env()), 110, break_long_words=False)
    return HEADER + "unset " + " \\\n    ".join(names) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
