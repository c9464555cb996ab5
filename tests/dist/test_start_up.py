"""Nothing of starting up is left for the time that counts: no first use of a collective, no compiling, no capture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness import HERE, free_port, rank_environment
from training_settings import train_arguments


def diaries(folder: Path, mode: str, **changes: object) -> list[dict[str, list[str]]]:
    """Of two ranks that train, and evaluate twice."""
    often = {"eval_iter_start_samples": 8, "eval_iter_samples": 8, "save_checkpoint_steps": 2, "max_steps": 4}
    words = train_arguments(folder, cuda_graph_mode=mode, **often, **changes)
    command = [sys.executable, str(HERE / "start_up_program.py"), str(folder), mode, *words]
    port = free_port()
    ranks = [
        subprocess.Popen(
            command,
            env=rank_environment(rank, 2, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=250)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 0], "\n".join(outputs)
    return [json.loads((folder / f"diary_{rank}.json").read_text()) for rank in range(2)]


SHARDED = {"sharded_optimizer": "all", "weights_allgather": "bf16", "exchange_padding": "all", "exchange_by": "gather"}


@pytest.mark.parametrize(
    ("mode", "changes"), [("none", SHARDED), ("full_iteration", {"ops": "plain"})], ids=["sharded", "graphs"]
)
def test_nothing_begins_in_the_time_that_counts(tmp_path: Path, mode: str, changes: dict[str, object]) -> None:
    for diary in diaries(tmp_path, mode, **changes):
        assert "all_reduce in group of all ranks" in diary["timed"], "the traps are set"
        assert not set(diary["timed"]) - set(diary["before"])
        for one_time in ("a capture", "a new group", "a native library is compiled", "a Triton kernel is compiled"):
            assert one_time not in diary["timed"]
        assert ("a capture" in diary["before"]) == (mode != "none")
        assert len(diary["timed"]) > 10
