"""Two ranks whose steps are recorded, collectives among them: what they become without recording, bit for bit."""

from __future__ import annotations

from pathlib import Path

from harness import run_ranks


def test_replayed_ranks_agree(tmp_path: Path) -> None:
    first, second = (result.value for result in run_ranks("graph_programs:train", 2, tmp_path))
    assert [run["mode"] for run in first] == ["segmented", "segmented", "full_iteration", "full_iteration"]
    for recorded, called, twin in zip(first[::2], first[1::2], second[::2], strict=True):
        assert recorded["hash"] == called["hash"] == twin["hash"]
        assert recorded["norms"] == called["norms"]
    assert first[1]["overlapped"] == 0
    assert first[3]["overlapped"] > 1, "within a graph sums start during backward"
