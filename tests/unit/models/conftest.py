"""Fixtures for tests of models."""

import pytest

from mlbert.ops import api as ops


@pytest.fixture(params=["plain", "auto"])
def chosen_ops(request: pytest.FixtureRequest, restore_selection: None) -> None:
    """Run the test with the plain ops and with those of this machine."""
    ops.select(request.param)
