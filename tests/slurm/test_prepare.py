"""Preparation as job arrays on a real Slurm: the bytes of one process, also if jobs are killed."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster import Cluster
from stored_sets import tree
from text_sets import json_lines

HOME = Path("benchmarks/bert/implementations/pytorch")
WORDS = ("the", "river", "runs", "under", "a", "bridge", "by", "the", "old", "kitchen", "1984")
KILLS = 3
ENVIRONMENT = {"SBATCH_OUTPUT": "/dev/null", "SBATCH_EXCLUSIVE": "exclusive"}  # one job per node


def states(cluster: Cluster, job: str) -> set[str]:
    lines = cluster.run("scontrol", "--oneliner", "show", "job", job).stdout.splitlines()
    return {word.removeprefix("JobState=") for line in lines for word in line.split() if word.startswith("JobState=")}


@pytest.mark.slow
def test_a_killed_array_makes_the_bytes_of_one_process(cluster: Cluster, tree_root: Path, tmp_path: Path) -> None:
    draw = random.Random(0)
    (tmp_path / "texts").mkdir()
    for number in range(8):  # large enough to be tasks by themselves
        texts = (" ".join(draw.choices(WORDS, k=draw.randrange(1, 6000))) for _ in range(1000))
        (tmp_path / f"texts/{number}.jsonl").write_text(json_lines(texts))
    convert = [sys.executable, tree_root / "benchmarks/mosaic_bert/common/convert_dataset.py", "--dataset", "text"]
    convert += ["--path", tmp_path / "texts", "--splits", "train", "val", "--concat_tokens", "64", "--out_root"]
    draw, killed = random.Random(time.time_ns()), 0
    script = (tree_root / HOME / "launch/prepare_data.sh", "--slurm", "7", "--workers", "1", "--")
    done = cluster.run(*script, *convert, tmp_path / "many", environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    jobs = [line.split()[1].rstrip(":") for line in done.stdout.splitlines() if line.startswith("job ")]
    assert len(jobs) == 3  # two passes and the merge
    deadline = time.monotonic() + 400
    while states(cluster, jobs[-1]) <= {"PENDING", "RUNNING", "COMPLETING"}:
        assert time.monotonic() < deadline
        running = cluster.running("convert_dataset.py")
        if killed < KILLS and running and draw.random() < 0.2:
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(running), signal.SIGKILL)
                killed += 1
        time.sleep(draw.uniform(0, 0.5))
    assert [states(cluster, job) for job in jobs] == [{"COMPLETED"}] * 3
    assert killed == KILLS
    subprocess.run([*convert, tmp_path / "one"], check=True, capture_output=True, timeout=300)
    assert "train/shard.00002.mds" in tree(tmp_path / "one")
    assert tree(tmp_path / "many") == tree(tmp_path / "one")
