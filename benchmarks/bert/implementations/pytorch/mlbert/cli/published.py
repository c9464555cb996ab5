"""Run our commands under the program names and flags of published implementations;
system folders hold stubs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import NoReturn

from mlbert.cli import main as command_line
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


class Parser(argparse.ArgumentParser):
    """A parser for the flags of a published program that reports errors as `mlbert` does."""

    def __init__(self, program: str, description: str) -> None:
        super().__init__(program, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Print the error and exit."""
        self.exit(WRONG_INPUT, f"mlbert: error: {self.prog}: {message}. See {self.prog} --help.\n")


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
