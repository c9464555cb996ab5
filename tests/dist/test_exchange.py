"""Padding exchange on real ranks: exchange by communication against partitioning by known lengths."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from harness import run_ranks
from stored_sets import make_rows, random_lengths, write_set


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_set(tmp_path_factory.mktemp("set") / "set", make_rows(random_lengths(300))))


@pytest.mark.parametrize(("size", "node_size"), [(2, 2), (4, 2)])
def test_both_kinds_of_exchange_give_the_same_bytes(size: int, node_size: int, folder: str, tmp_path: Path) -> None:
    results = run_ranks("exchange_programs:both_ways", size, tmp_path, node_size=node_size, folder=folder)
    for result in results:
        ways = {way: steps for way, steps in result.value.items() if way.endswith(" lengths")}
        assert len(ways) == 12
        for way, steps in ways.items():
            assert steps == result.value[way.replace(" lengths", " gather")], way
    for way in results[0].value:
        batches = Counter(batch for result in results for step in result.value[way] for batch in step)
        assert max(batches.values()) == 1, "no batch may occur twice"
    if size > node_size:
        first = results[0].value
        assert first["group 1 False 1 gather"] != first["all 1 False 1 gather"]


def test_lost_rank_ends_the_others(folder: str, tmp_path: Path) -> None:
    results = run_ranks("exchange_programs:lost_rank", 2, tmp_path, check=False, folder=folder)
    assert [result.returncode for result in results] == [5, 7]
    match = re.search(r"after ([\d.]+) s", results[0].output)
    assert match is not None
    assert float(match.group(1)) < 20


def test_close_does_not_wait_for_other_ranks(folder: str, tmp_path: Path) -> None:
    results = run_ranks("exchange_programs:uneven_end", 2, tmp_path, folder=folder)
    assert all(result.value["seconds"] < 20 for result in results), "must be below the timeout of a collective"


def test_group_exchange_requires_equal_ranks_per_node(tmp_path: Path) -> None:
    results = run_ranks("exchange_programs:uneven_nodes", 2, tmp_path, check=False)
    for result in results:
        assert result.returncode != 0
        assert "EXCHANGE_PADDING: group needs the same number of ranks on each node" in result.output
