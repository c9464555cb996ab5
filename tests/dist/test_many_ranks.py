"""Many forked ranks start with few descriptors and little work, and name a killed one."""

import json
import signal
import socket
from pathlib import Path

import pytest

from harness import Rank, rank_environment
from many_ranks_program import STEPS, TIME_LIMIT_S, main
from mlbert.distributed.lifecycle import LOST_RANK


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "steps"), [(128, STEPS), (8, 0)], ids=["while training", "before any collective"])
def test_many_ranks_start_and_name_a_killed_one(tmp_path: Path, ranks: int, steps: int) -> None:
    victim = ranks // 2
    # Name servers may not answer: gloo looks up the loopback address's name.
    environment = rank_environment(0, 1, 1) | {"RES_OPTIONS": "timeout:1 attempts:1"}
    parent = Rank(main, (ranks, tmp_path, victim, steps), environment, tmp_path / "output.txt")
    output = parent.communicate(TIME_LIMIT_S)
    assert parent.returncode == 0, output
    codes = json.loads((tmp_path / "codes.json").read_text())
    assert codes == [-signal.SIGKILL if rank == victim else LOST_RANK for rank in range(ranks)], output

    killed_at = json.loads((tmp_path / f"{victim}.json").read_text())["end"]["time"]
    (story,) = tmp_path.glob("story_*")
    reported_at, words = story.read_text().split(" ", 1)
    assert words == f"aborted: rank {victim} on {socket.gethostname()} died after step {max(0, steps - 1)}"
    assert float(reported_at) - killed_at < 30

    marks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    first, *others = [one["steps" if steps else "watch"]["descriptors"] for one in marks]
    assert first <= 2 * ranks + 100
    assert max(others) <= 64
    # A full mesh of 256 took 70 s.
    assert sum(one["watch"]["cpu_seconds"] for one in marks) < 10
