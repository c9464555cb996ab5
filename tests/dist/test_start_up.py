"""The timed part of a run contains no start-up work: no first use of a collective, no compilation, no capture."""

import json
from pathlib import Path

import pytest

from harness import start_ranks
from start_up_program import train
from training_settings import train_arguments

SHARDED = {"sharded_optimizer": "all", "weights_allgather": "bf16", "exchange_padding": "all"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "changes"), [("none", SHARDED), ("full_iteration", {"ops": "plain"})], ids=["sharded", "graphs"]
)
def test_no_start_up_work_is_timed(tmp_path: Path, mode: str, changes: dict[str, object]) -> None:
    frequent = {"eval_iter_start_samples": 8, "eval_iter_samples": 8, "save_checkpoint_steps": 2, "max_steps": 4}
    words = train_arguments(tmp_path, cuda_graph_mode=mode, **frequent, **changes)
    ranks = start_ranks(train, (tmp_path, mode, words), 2, tmp_path)
    outputs = [rank.communicate(timeout=250) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 0], "\n".join(outputs)
    for rank in range(2):
        events = json.loads((tmp_path / f"events_{rank}.json").read_text())
        assert "all_reduce in group of all ranks" in events["timed"], "the hooks must be installed"
        assert not set(events["timed"]) - set(events["before"])
        for one_time in ("a capture", "a new group", "a native library is compiled", "a Triton kernel is compiled"):
            assert one_time not in events["timed"]
        assert ("a capture" in events["before"]) == (mode != "none")
        assert len(events["timed"]) > 10
