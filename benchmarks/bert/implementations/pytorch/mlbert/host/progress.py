"""Receive the progress of a long piece of work; `mlbert.host.console` has the forms
that print it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Progress:
    """Receives the progress of a step.

    This one is silent; the command line has one that draws a bar.
    """

    def __call__(self, line: str) -> None:
        """Print one line."""

    @contextmanager
    def task(self, name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """Begin a task of ``total`` units (for example bytes);
        call the yielded function with the number of units just done.
        """
        del name, total, unit
        yield lambda units: None

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Begin a step of unknown size, which ends with the block."""
        del name
        yield
