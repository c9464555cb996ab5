"""Recorded steps on two ranks, including collectives, are bit-equal to steps without recording."""

from pathlib import Path

import pytest

from harness import run_ranks


@pytest.mark.slow
def test_replayed_steps_are_bit_equal(tmp_path: Path) -> None:
    first, second = (result.value for result in run_ranks("graph_programs:train", 2, tmp_path))
    assert [(run["way"], run["mode"]) for run in first[::2]] == [
        (way, mode) for way in ("whole", "buckets", "rounded") for mode in ("segmented", "full_iteration")
    ]
    for recorded, eager, other_rank in zip(first[::2], first[1::2], second[::2], strict=True):
        assert recorded["hash"] == eager["hash"] == other_rank["hash"]
        assert recorded["norms"] == eager["norms"]
        if eager["mode"] == "full_iteration":
            assert eager["overlapped"] > 1, "in a full graph, reductions must start during backward"
        else:
            assert recorded["overlapped"] == 0, "a replayed graph must not call gradient hooks"


def test_loss_divisors(tmp_path: Path) -> None:
    """Divisors are the counts of all ranks, or the rank's own counts times the number of ranks, since gradients are
    summed. A warning on one rank reaches all ranks."""
    ranks = [result.value for result in run_ranks("graph_programs:divisors", 2, tmp_path)]
    masked, samples = (sum(rank["own"][i] for rank in ranks) for i in (0, 1))
    assert ranks[0]["own"] != ranks[1]["own"]
    for rank in ranks:
        assert rank["step"] == pytest.approx([masked + 1e-5, samples])
        assert rank["rank"] == pytest.approx([2 * (rank["own"][0] + 1e-5), 2 * rank["own"][1]])
        assert rank["samples"] == samples
        assert rank["warned"]
