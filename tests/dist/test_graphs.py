"""Two ranks whose steps are recorded, collectives among them: what they become without recording, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import run_ranks


def test_replayed_ranks_agree(tmp_path: Path) -> None:
    first, second = (result.value for result in run_ranks("graph_programs:train", 2, tmp_path))
    assert [(run["way"], run["mode"]) for run in first[::2]] == [
        (way, mode) for way in ("whole", "buckets", "rounded") for mode in ("segmented", "full_iteration")
    ]
    for recorded, called, twin in zip(first[::2], first[1::2], second[::2], strict=True):
        assert recorded["hash"] == called["hash"] == twin["hash"]
        assert recorded["norms"] == called["norms"]
        if called["mode"] == "full_iteration":
            assert called["overlapped"] > 1, "within a graph sums start during backward"
        else:
            assert recorded["overlapped"] == 0, "a replayed graph tells no hook of its gradients"


def test_what_the_loss_divides_by(tmp_path: Path) -> None:
    """Counts of all ranks; or the rank's own, times the number of ranks, since gradients are summed. One rank's warning
    reaches all."""
    ranks = [result.value for result in run_ranks("graph_programs:divisors", 2, tmp_path)]
    masked, samples = (sum(rank["own"][i] for rank in ranks) for i in (0, 1))
    assert ranks[0]["own"] != ranks[1]["own"]
    for rank in ranks:
        assert rank["step"] == pytest.approx([masked + 1e-5, samples])
        assert rank["rank"] == pytest.approx([2 * (rank["own"][0] + 1e-5), 2 * rank["own"][1]])
        assert rank["samples"] == samples
        assert rank["warned"]
