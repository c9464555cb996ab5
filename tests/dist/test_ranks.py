"""Four ranks on gloo against one process: gradients, LAMB, overlap, small collectives, groups, lost ranks."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import run_ranks
from mlbert.distributed.world import World
from rank_programs import train

Ranks = list[dict[str, Any]]
# float32 sums in another order, of gradients of about 1 (weights: after LAMB's division by their norm).
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    results = run_ranks("rank_programs:everything", 4, tmp_path_factory.mktemp("ranks"), node_size=2)
    return [result.value for result in results]


@pytest.mark.parametrize("accumulation", ["1", "2"])
def test_training_matches_one_process(ranks: Ranks, accumulation: str) -> None:
    expected = train(World())
    found = ranks[0]["train"][accumulation]
    for key in ("losses", "grads", "norms", "weights"):
        torch.testing.assert_close(torch.tensor(found[key]), torch.tensor(expected[key]), rtol=1e-5, atol=TOLERANCE)
    assert [rank["train"][accumulation] for rank in ranks] == [found] * 4, "all ranks must be bit-equal"


def test_parameter_unused_on_some_ranks_is_summed(ranks: Ranks) -> None:
    expected = torch.tensor([rank["uneven_use"]["own"] for rank in ranks]).sum(0)
    for rank in ranks:
        assert rank["uneven_use"]["summed"] == ranks[0]["uneven_use"]["summed"]
        torch.testing.assert_close(torch.tensor(rank["uneven_use"]["summed"]), expected, rtol=1e-5, atol=TOLERANCE)


def test_reduction_overlaps_backward(ranks: Ranks) -> None:
    """Four layers, one bucket each: at least two are in flight when the first layer's backward begins."""
    for rank in ranks:
        before_last, in_last = rank["overlap"]["seen"]
        assert before_last == 0, "no reduction may start before the last micro-batch"
        assert in_last >= 2
        assert rank["overlap"]["overlapped"] == rank["overlap"]["buckets"] == 4


def test_small_programs(ranks: Ranks) -> None:
    """Only rank 0 has a micro-batch in no_backward; it has no rows to gather, rank 1 has one, and so on."""
    rows = [[10.0, 11.0], [20.0, 21.0], [22.0, 23.0], [30.0, 31.0], [32.0, 33.0], [34.0, 35.0]]
    for rank in ranks:
        assert rank["no_backward"] == [0.0, 1.0, 2.0]
        assert "after its sum had started" in rank["second_backward"]
        assert rank["numbers"] == {"sum": [1 + 2 + 3 + 4, 4 * 10], "seed": 2**61 + 7}
        assert rank["rows"] == {"rows": rows, "dtype": "torch.float64"}


def test_groups_of_ranks(ranks: Ranks) -> None:
    """Padding is exchanged by a rank alone, its node or all; groups inside nodes need ranks numbered node by node."""
    for rank in ranks:
        assert rank["exchange groups"] == {"off": 1, "group": 2, "all": 4}
        sharding, exchange = rank["uneven nodes"]
        assert "numbered node by node" in sharding
        assert "EXCHANGE_PADDING: group needs the same number of ranks on each node" in exchange
        assert "\n" not in sharding + exchange


def test_network_benchmark_measures_every_link(ranks: Ranks, tmp_path: Path) -> None:
    """Three hosts, an odd ring; ranks of one host have no link."""
    results = run_ranks("rank_programs:measure_as", 3, tmp_path, hosts=["n1", "n2", "n3"])
    reports = [result.value for result in results]
    assert reports[0] == reports[1] == reports[2]
    assert list(reports[0]["nodes"]) == ["n1", "n2", "n3"]
    assert all(speed > 0 for speed in reports[0]["nodes"].values())
    assert list(reports[0]["reduce"]) == [str(2**20)]
    assert [rank["network of one host"] for rank in ranks] == [{}] * 4


def survivor_message(output: str) -> tuple[float, str]:
    match = re.search(r"after ([\d.]+) s: (.*)", output)
    assert match, output
    return float(match[1]), match[2]


@pytest.mark.parametrize("how", ["kill", "kill early"])
def test_killed_rank_ends_the_others(tmp_path: Path, how: str) -> None:
    limits = {"collective_timeout_s": 15.0, "time_limit_s": 60.0}
    results = run_ranks("rank_programs:lose_a_rank", 3, tmp_path, check=False, how=how, **limits)
    assert results[1].returncode == -9
    for survivor in (results[0], results[2]):
        assert survivor.returncode == 1
        seconds, message = survivor_message(survivor.output)
        assert seconds < 20.0
        assert "Error" in message


def test_hung_rank_ends_the_others_at_the_timeout(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as failure:
        run_ranks("rank_programs:lose_a_rank", 2, tmp_path, how="stop", collective_timeout_s=3.0, time_limit_s=60.0)
    assert 2.0 < survivor_message(str(failure.value))[0] < 50.0
