"""Groups of ranks that exchange padding, on real ranks."""

from __future__ import annotations

from pathlib import Path

from harness import run_ranks


def test_groups_are_the_rank_its_node_or_all(tmp_path: Path) -> None:
    for result in run_ranks("exchange_programs:sizes", 4, tmp_path, node_size=2):
        assert result.value == {"off": 1, "group": 2, "all": 4}


def test_group_exchange_requires_equal_ranks_per_node(tmp_path: Path) -> None:
    results = run_ranks("exchange_programs:uneven_nodes", 2, tmp_path, check=False)
    for result in results:
        assert result.returncode != 0
        assert "EXCHANGE_PADDING: group needs the same number of ranks on each node" in result.output
