"""Where the sample data lies that comes with the project's workplace but not with a clone."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """`../shared/data` beside the tree, or a skip."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the sample data in {folder}, which a clone does not have")
    return folder


@pytest.fixture(scope="session")
def assets() -> Path:
    """A small text of our own, its vocabulary, and the digests of its instances."""
    return ROOT / "tests" / "assets" / "instances"
