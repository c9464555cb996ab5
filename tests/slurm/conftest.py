"""A Slurm cluster for the whole session, and a site on it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cluster import Cluster, running, unavailable_reason
from slurm_site import Site

# Four for the largest job; the others run slow jobs while the tests continue.
NUM_NODES = 12


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = unavailable_reason()
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with running(NUM_NODES) as cluster:
        yield cluster


@pytest.fixture
def site(cluster: Cluster, tmp_path: Path, tree_root: Path) -> Site:
    return Site(cluster, tmp_path / "a tree", tree_root)
