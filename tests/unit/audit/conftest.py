"""A log of another program, and one of this code in a tree."""

from pathlib import Path

import pytest

from audit import copy_of_ours
from logger_logs import write_log


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "result_0.txt")


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """Return a good open log of this code, in a tree."""
    return copy_of_ours(tmp_path)[0]
