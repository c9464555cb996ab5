"""All models of these tests are small."""

import pytest

from mlbert.ops import api as ops


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass


@pytest.fixture(params=["plain", "auto"])
def chosen_ops(request: pytest.FixtureRequest, restore_selection: None) -> None:
    """Run the test with the plain ops and with those of this machine."""
    ops.select(request.param)
