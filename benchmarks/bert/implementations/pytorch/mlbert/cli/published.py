"""Run our commands under the program names and flags of published implementations;
system folders hold stubs.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import NoReturn

from mlbert.cli import main as command_line
from mlbert.host.errors import UserError
from mlbert.host.exit_statuses import WRONG_INPUT

# program -> (our command, {its flag: our flag, or "" for the next positional argument})
_CHECKPOINT = {"--pt_checkpoint": "", "--save_checkpoint": ""}
PROGRAMS: Mapping[str, tuple[tuple[str, str], Mapping[str, str]]] = {
    "convert_tf_checkpoint.py": (
        ("convert", "tf1-to-nvidia"),
        {"--tf_checkpoint": "", "--output_checkpoint": "", "--bert_config_path": "--config"},
    ),
    "run_split_and_chop_hdf5_files.py": (
        ("prepare", "bins-hdf5"),
        {"--input_dir": "", "--output_dir": ""},
    ),
    # Both models start from the same folder.
    "convert_ckpt_baseline.py": (("convert", "nvidia-to-torch"), _CHECKPOINT),
    "convert_ckpt_methods.py": (("convert", "nvidia-to-torch"), _CHECKPOINT),
}

# What Python's parser says.
_REQUIRED = re.compile(r"the following arguments are required: (.*)")
_UNRECOGNIZED = re.compile(r"unrecognized arguments: (.*)")
_ARGUMENT = re.compile(r"argument ([^:]*): (.*)")
_CHOICE = re.compile(r"invalid choice: ('[^']*') \(choose from (.*)\)")
_VALUE = re.compile(r"invalid (\w+) value: ('.*')")
_KINDS = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """A parser for the flags of a published program that reports errors as `mlbert` does."""

    def __init__(self, program: str, description: str) -> None:
        super().__init__(program, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Print the error and exit."""
        self.exit(WRONG_INPUT, f"mlbert: error: {self._in_our_words(message).as_line()}\n")

    def _in_our_words(self, message: str) -> UserError:
        remedy = f"See {self.prog} --help"
        if (missing := _REQUIRED.fullmatch(message)) is not None:
            verb = "are" if "," in missing[1] else "is"
            return UserError("config.missing", missing[1], f"{verb} missing", remedy)
        if (unknown := _UNRECOGNIZED.fullmatch(message)) is not None:
            return UserError("config.unknown-name", unknown[1], "is unknown", remedy)
        wrong = _ARGUMENT.fullmatch(message)
        if wrong is None:
            return UserError("config.syntax", self.prog, message, remedy)
        name, problem = wrong.groups()
        if problem.startswith("expected "):
            return UserError("config.syntax", name, "has no value", f"Write {name} VALUE")
        if (choice := _CHOICE.fullmatch(problem)) is not None:
            choices = choice[2].replace("'", "").split(", ")
            return UserError("config.choice", name, f"{choice[1]} is not a choice", "", choices)
        if (value := _VALUE.fullmatch(problem)) is not None:
            kind = _KINDS.get(value[1], f"a {value[1]}")
            return UserError("config.value", name, f"{value[2]} is not {kind}", remedy)
        return UserError("config.value", name, problem, remedy)


def main(program: str) -> None:
    """Run the command equivalent to ``program`` with this process's arguments,
    then exit as `mlbert` does.
    """
    command, flags = PROGRAMS[program]
    parser = Parser(program, f"Same as: mlbert {' '.join(command)}")
    for flag in flags:
        parser.add_argument(flag, required=True)
    given = vars(parser.parse_args())
    words = list(command)
    for flag, ours in flags.items():
        words += [ours, given[flag.lstrip("-")]] if ours else [given[flag.lstrip("-")]]
    command_line.main(words)
