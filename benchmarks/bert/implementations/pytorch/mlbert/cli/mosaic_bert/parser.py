"""Flags as argparse reads them; a wrong one is told as the other programs tell mistakes."""

from __future__ import annotations

import argparse
from typing import NoReturn

from mlbert.dist.lifecycle import WRONG_INPUT


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def __init__(self, program: str, description: str) -> None:
        super().__init__(program, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Ends the process."""
        self.exit(WRONG_INPUT, f"mlbert: error: {self.prog}: {message}. See {self.prog} --help.\n")
