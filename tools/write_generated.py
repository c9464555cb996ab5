"""Generate launch/reset_settings.sh, docs/settings.md and docs/errors.md from the settings and error codes.

python tools/write_generated.py
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

from mlbert.config.recipe import Recipe
from mlbert.config.section import Setting, settings_of
from mlbert.config.sections import settings_by_env
from mlbert.config.shell import LaunchConfig
from mlbert.config.words import markdown_table
from mlbert.host.error_codes import ERROR_CODES
from mlbert.recipes.registry import RECIPES

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks/bert/implementations/tensorflow2"))
LAUNCHERS = ROOT / "benchmarks/bert/implementations/pytorch/launch"
RESET = ROOT / "benchmarks/bert/implementations/pytorch/launch/reset_settings.sh"
SETTINGS = ROOT / "docs/settings.md"
ERRORS = ROOT / "docs/errors.md"
RESET_HEADER = """\
# Forgets every setting that another config exported, so that sourcing config B after config A equals sourcing B.
# Sourced by begin_system.sh. Written by tools/write_generated.py from the rooms' config.py.
# shellcheck shell=bash
"""
SETTINGS_HEADER = """\
# Settings

Every name that a `config_<system>.sh` may export, with its flag of `mlbert train` and its key in YAML. A later source
wins: default, YAML (`--config`; `extends:` names a parent), export, flag or `key=value`. A default after a
semicolon is that of the recipe it names; "required": somebody has to give it. `RECIPE=masked_lm` is `masked_lm_text` if
`TOKENIZER` is given, else `masked_lm_stored`. Written by `tools/write_generated.py` from the `config.py` of each room.
Whatever a run gives: Result not verified by MLCommons Association.

"""

ERRORS_HEADER = """\
# Errors

A mistake is one line: `mlbert: error: SUBJECT: PROBLEM. REMEDY. [code]`. The code stays the same when the wording
changes. Written by `tools/write_generated.py` from `mlbert/host/error_codes.py`.

| code | exit status | meaning |
|---|---|---|
"""


def reset_text() -> str:
    """Return the text of reset_settings.sh."""
    names = textwrap.wrap(" ".join(settings_by_env()), 110, break_long_words=False)
    return RESET_HEADER + "unset " + " \\\n    ".join(names) + "\n"


def settings_text() -> str:
    """Return the text of settings.md."""
    launchers = [(one, launcher_default(one)) for one in settings_of(LaunchConfig)]
    return SETTINGS_HEADER + markdown_table(recipes(), launchers)


def errors_text() -> str:
    """Return the text of errors.md."""
    rows = [f"| `{code}` | {entry.exit_status} | {entry.help} |" for code, entry in sorted(ERROR_CODES.items())]
    return ERRORS_HEADER + "\n".join(rows) + "\n"


def recipes() -> list[Recipe]:
    """Return all recipes, TensorFlow's last."""
    from tf2_bert.recipe import RECIPE

    return [*RECIPES.values(), RECIPE]


def launcher_default(row: Setting) -> str:
    """Return the launchers' default for an unset variable, if it is a constant."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(LAUNCHERS.iterdir()) if path.is_file())
    found = set(re.findall(rf"\$\{{{row.env}:[-=]([\w.]+)\}}", text))
    return found.pop() if len(found) == 1 else "not set"


if __name__ == "__main__":
    RESET.write_text(reset_text(), encoding="utf-8")
    SETTINGS.parent.mkdir(exist_ok=True)
    SETTINGS.write_text(settings_text(), encoding="utf-8")
    ERRORS.write_text(errors_text(), encoding="utf-8")
