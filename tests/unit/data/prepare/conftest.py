"""What the tests of preparing data share."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlbert.data.prepare.jobs import Progress

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="session")
def assets() -> Path:
    """A small text of our own, its vocabulary, and the digests of its instances."""
    return ROOT / "tests" / "assets" / "instances"


class Said(Progress):
    """Keeps the lines that a step says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def said() -> Said:
    """Progress that remembers."""
    return Said()
