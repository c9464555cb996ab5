"""Generate launch/reset_settings.sh, docs/settings.md,
docs/errors.md and the table in records/README.md.

python tools/write_generated.py
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

from mlbert.config.recipe import Recipe
from mlbert.config.section import Setting, settings_of
from mlbert.config.shell import LaunchConfig
from mlbert.config.words import default_words
from mlbert.host.error_codes import ERROR_CODES
from mlbert.recipes.registry import RECIPES
from mlbert.recipes.sections import settings_by_env, settings_by_key

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks/bert/implementations/tensorflow2"))
LAUNCHERS = ROOT / "benchmarks/bert/implementations/pytorch/launch"
RESET = LAUNCHERS / "reset_settings.sh"
SETTINGS = ROOT / "docs/settings.md"
ERRORS = ROOT / "docs/errors.md"
RECORDS = ROOT / "records/README.md"
RECORDS_BEGIN = "<!-- records -->\n"
RECORDS_END = "<!-- /records -->\n"
RECORD_NAME = re.compile(r"(\d{4}-\d{2}-\d{2})_([\w.-]+?)_([\w-]+)")  # date, what, hardware
IN_SHORT = "**In short:** "
RESET_HEADER = """\
# Unset every setting that another config exported,
# so that sourcing config B after config A equals sourcing B.
# Sourced by begin_system.sh.
# Written by tools/write_generated.py from the config.py of each package.
# shellcheck shell=bash
"""
SETTINGS_HEADER = """\
# Settings

```text
mlbert train --help            # every setting with its type
mlbert train --print-config    # every value of the sourced config, with its origin
```

This page lists every name that a `config_<system>.sh` may export, with its default. If a setting
has several sources, the last of these wins: default, YAML (`--config`; `extends:` names a parent),
export, flag or `key=value`. The flag of `mlbert train` is the name in lower case with dashes
(`MAX_STEPS`: `--max-steps`), unless a different flag follows the name; underscores (`--max_steps`)
also work, and the YAML key has underscores (`max_steps`). In parentheses: the unit, the other
choices, and recipes with a different default.
`RECIPE=masked_lm` is `masked_lm_text` if `TOKENIZER` is given, else `masked_lm_stored`. Only
launchers read the settings under Launch, which are not flags. Written by `tools/write_generated.py`
from the `config.py` of each package.
"""
FOOTER = "\nResult not verified by MLCommons Association.\n"
ERRORS_HEADER = """\
# Errors

Each error is one line: `mlbert: error: SUBJECT: PROBLEM. REMEDY. [code]`. If a name is unknown, the
known ones follow the remedy: `Choices: ...`. The exit status is 2. The code stays the same when the
wording changes. For each code, this page gives the meaning and one or two messages as they are
printed; the last sentence of a message is the remedy. Written by `tools/write_generated.py` from
`mlbert/host/error_codes.py` and the messages that the tests have seen.
"""
MESSAGES = ROOT / "tests/golden/error_messages.txt"
SHOWN_MESSAGES = 2  # of a code, with different remedies
MOST_CHARACTERS = 200  # of a shown message, if a shorter one exists
TEMPORARY = re.compile(r"<(tmp|tree)>/?")  # folders of tests, in the messages
# A path with a placeholder, which would be an HTML tag.
PLACEHOLDER = re.compile(r"[\w./]*<\w+>[\w./]*\w")


def reset_text() -> str:
    """Return the text of reset_settings.sh."""
    names = textwrap.wrap(" ".join(settings_by_env()), 110, break_long_words=False)
    return RESET_HEADER + "unset " + " \\\n    ".join(names) + "\n"


def settings_text() -> str:
    """Return the text of settings.md."""
    defaults = [(one, default_words(one, recipes())) for one in settings_by_key().values()]
    defaults += [(one, launcher_default(one)) for one in settings_of(LaunchConfig)]
    text = SETTINGS_HEADER
    last = None
    for setting, default in defaults:
        if setting.section != last:
            text += f"\n## {setting.group}\n\n"
        text = text + setting_line(setting, default)
        last = setting.section
    return text + FOOTER


def setting_line(setting: Setting, defaults: str) -> str:
    """Return a setting in one line, leaving out what its name, default or meaning already says."""
    usual, *others = defaults.split("; ")
    shown = f"`{setting.env}`" if usual in ("required", "not set") else f"`{setting.env}={usual}`"
    if setting.key not in ("", setting.env.lower()):
        shown += f" `{setting.flag}`"
    choices = [one for one in setting.choices if one != usual]
    unit = setting.unit
    known = f"{setting.env} {setting.meaning}".lower()
    meaning = PLACEHOLDER.sub(r"`\g<0>`", setting.meaning)
    notes = [
        "required" if usual == "required" else "",
        unit if unit not in known else "",
        f"or {', '.join(choices)}" if choices else "",
        *merged(others),
    ]
    note = "; ".join(filter(None, notes))
    return f"* {shown}{f' ({note})' if note else ''}: {meaning}\n"


def merged(defaults: list[str]) -> list[str]:
    """Merge recipes with the same default: ``a: 1`` and ``b: 1`` become ``a, b: 1``."""
    recipes_of: dict[str, list[str]] = {}
    for one in defaults:
        recipe, _, value = one.partition(": ")
        recipes_of.setdefault(value, []).append(recipe)
    texts = [f"{', '.join(names)}: {value}" for value, names in recipes_of.items()]
    return [text.replace("masked_lm_stored, masked_lm_text", "masked_lm") for text in texts]


def errors_text() -> str:
    """Return the text of errors.md: a section for each code, in groups."""
    messages: dict[str, list[str]] = {}
    for line in MESSAGES.read_text(encoding="utf-8").splitlines():
        code, _, message = line.partition(": ")
        messages.setdefault(code, []).append(TEMPORARY.sub("", message))
    text = ERRORS_HEADER
    group = ""
    for code, meaning in sorted(ERROR_CODES.items()):
        if not code.startswith(f"{group}."):
            group = code.partition(".")[0]
            text += f"\n## {group}\n"
        text += f"\n### `{code}`\n\n{meaning}\n"
        shown = typical_messages(messages.get(code, []))
        if shown:
            text += "\n```text\n" + "".join(f"{message}\n" for message in shown) + "```\n"
    return text + FOOTER


def typical_messages(messages: list[str]) -> list[str]:
    """Return a short message for each of the most frequent remedies."""
    by_remedy: dict[str, list[str]] = {}
    for message in messages:
        if not message.startswith(":"):  # nothing is left of the subject
            by_remedy.setdefault(message.rpartition(". ")[2], []).append(message)
    frequent = sorted(by_remedy.values(), key=lambda same: (-len(same), same[0]))
    shortest = [min(same, key=lambda message: (len(message), message)) for same in frequent]
    readable = [message for message in shortest if len(message) <= MOST_CHARACTERS]
    return (readable or shortest)[:SHOWN_MESSAGES]


def recipes() -> list[Recipe]:
    """Return all recipes, TensorFlow's last."""
    from tf2_bert.recipe import RECIPE

    return [*RECIPES.values(), RECIPE]


def launcher_default(row: Setting) -> str:
    """Return the launchers' default for an unset variable, if it is a constant."""
    text = "".join(
        path.read_text(encoding="utf-8") for path in sorted(LAUNCHERS.iterdir()) if path.is_file()
    )
    found = set(re.findall(rf"\$\{{{row.env}:[-=]([\w.]+)\}}", text))
    return found.pop() if len(found) == 1 else "not set"


def records_text() -> str:
    """Return the text of records/README.md with a row for each record, newest first."""
    text = RECORDS.read_text(encoding="utf-8")
    before, _, rest = text.partition(RECORDS_BEGIN)
    _, _, after = rest.partition(RECORDS_END)
    folders = sorted((path for path in RECORDS.parent.iterdir() if path.is_dir()), reverse=True)
    rows = [record_row(folder) for folder in folders]
    table = "".join(["| date | question | answer | hardware |\n", "|---|---|---|---|\n", *rows])
    return f"{before}{RECORDS_BEGIN}{table}{RECORDS_END}{after}"


def record_row(folder: Path) -> str:
    """Return the table row of a record, from its folder's name
    and the first lines of its README.
    """
    name = RECORD_NAME.fullmatch(folder.name)
    assert name is not None, f"{folder.name} is not <date>_<what>_<hardware>"
    date, _, hardware = name.groups()
    lines = (folder / "README.md").read_text(encoding="utf-8").splitlines()
    question = lines[0].removeprefix("# ")
    answers = [line for line in lines[:4] if line.startswith(IN_SHORT)]
    assert answers, f"{folder.name}/README.md has no line {IN_SHORT!r} below its title"
    answer = answers[0].removeprefix(IN_SHORT)
    return f"| {date} | [{question}]({folder.name}/README.md) | {answer} | {hardware} |\n"


if __name__ == "__main__":
    RESET.write_text(reset_text(), encoding="utf-8")
    SETTINGS.parent.mkdir(exist_ok=True)
    SETTINGS.write_text(settings_text(), encoding="utf-8")
    ERRORS.write_text(errors_text(), encoding="utf-8")
    RECORDS.write_text(records_text(), encoding="utf-8")
