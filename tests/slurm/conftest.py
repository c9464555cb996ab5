"""A cluster for the whole session, and a site on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cluster import Cluster, running, why_not
from slurm_site import Site

# Four for the largest job; the others are for jobs that mostly wait while the tests go on.
NUM_NODES = 10


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips this folder where no Slurm can be brought up."""
    reason = why_not()
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """`NUM_NODES` nodes."""
    with running(NUM_NODES) as cluster:
        yield cluster


@pytest.fixture
def site(cluster: Cluster, tmp_path: Path, tree_root: Path) -> Site:
    """A site whose path holds a blank."""
    return Site(cluster, tmp_path / "a tree", tree_root)
