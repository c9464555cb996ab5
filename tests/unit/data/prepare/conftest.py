"""Fixtures for tests of preparing data."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlbert.host.progress import Progress
from stored_sets import make_rows, random_lengths, write_set


@pytest.fixture(scope="session")
def assets() -> Path:
    """Return the folder of a small text, its vocabulary, and the digests of its instances."""
    return Path(__file__).resolve().parents[3] / "assets" / "instances"


class Said(Progress):
    """Keeps the lines of a step, and of each task the units done and their total."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.done: dict[str, list[int]] = {}

    def __call__(self, line: str) -> None:
        self.lines.append(line)

    @contextmanager
    def task(self, name: str, total: int, unit: str) -> Iterator:
        self.done[name] = [0, total]

        def advance(units: int) -> None:
            self.done[name][0] += units

        yield advance


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a prepared set of 300 sequences in three shards."""
    return write_set(tmp_path / "source", make_rows(random_lengths(300)))
