"""run_and_time.sh: what it hands to the training program, and how many of them it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, os, sys
from pathlib import Path
rank = os.environ.get("RANK", "0")
facts = {name: os.environ.get(name) for name in ("CACHES_CLEARED", "WORLD_SIZE", "BATCHSIZE")}
Path(os.environ["LOGDIR"], f"rank_{rank}.json").write_text(json.dumps({**facts, "arguments": sys.argv[1:]}))
sys.exit(int(os.environ.get("EXIT_CODE", "0")))
"""


@pytest.fixture
def system(tree_root: Path, tmp_path: Path) -> Path:
    """A system folder whose training program writes down what it was given."""
    folder = tmp_path / "a system"
    folder.mkdir()
    (folder / "run_pretraining.py").write_text(PROGRAM)
    config = folder / "config_any_1x1x4x1.sh"
    exports = {"CONFIG_FILE": config, "DGXNGPU": 1, "RECIPE": "any", "LOGDIR": folder}
    exports |= {"BATCHSIZE": 4, "CLEAR_CACHES": 0}
    config.write_text("".join(f"export {name}='{value}'\n" for name, value in exports.items()))
    return config


def start(
    config: Path, tree_root: Path, before: str = "", arguments: str = "", through: str = ""
) -> subprocess.CompletedProcess[str]:
    """Sources the config, runs ``before`` and starts the launcher, ``through`` another one where that is given."""
    launcher = tree_root / "benchmarks/bert/implementations/pytorch/launch/run_and_time.sh"
    python = Path(sys.executable).parent
    command = f"source '{config}'; {before} exec {through} '{launcher}' {arguments}"
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={"PATH": f"{python}:{os.environ['PATH']}"},
    )


def seen(config: Path, rank: int = 0) -> dict[str, object]:
    return json.loads((config.parent / f"rank_{rank}.json").read_text())


def test_flags_and_exports_reach_the_program(system: Path, tree_root: Path) -> None:
    done = start(system, tree_root, "export BATCHSIZE=8;", "--learning_rate '1e-3' 'key=a b'")
    assert done.returncode == 0, done.stderr
    assert seen(system)["arguments"] == ["--learning_rate", "1e-3", "key=a b"]
    assert seen(system)["BATCHSIZE"] == "8"
    assert seen(system)["WORLD_SIZE"] is None


def test_log_is_told_whether_caches_were_dropped(system: Path, tree_root: Path) -> None:
    done = start(system, tree_root, "export CLEAR_CACHES=1;")
    said_no = "page cache was not dropped" in done.stderr
    assert seen(system)["CACHES_CLEARED"] == ("false" if said_no else "true")


def test_caches_that_the_job_dropped_are_not_dropped_again(system: Path, tree_root: Path) -> None:
    done = start(system, tree_root, "export CLEAR_CACHES=1 CACHES_CLEARED=true;")
    assert done.stderr == ""
    assert seen(system)["CACHES_CLEARED"] == "true"


def test_dropping_caches_can_be_turned_off(system: Path, tree_root: Path) -> None:
    done = start(system, tree_root)
    assert done.returncode == 0
    assert seen(system)["CACHES_CLEARED"] == "false"


def test_exit_code_is_that_of_the_program(system: Path, tree_root: Path) -> None:
    assert start(system, tree_root, "export EXIT_CODE=3;").returncode == 3


def test_several_ranks_start_through_torchrun(system: Path, tree_root: Path) -> None:
    done = start(system, tree_root, "export DGXNGPU=2 BIND_CPUS=1;")
    assert done.returncode == 0, done.stderr
    assert [seen(system, rank)["WORLD_SIZE"] for rank in (0, 1)] == ["2", "2"]


def test_of_the_ranks_of_torchrun_one_drops_the_caches(system: Path, tree_root: Path) -> None:
    torchrun = "python3 -m torch.distributed.run --standalone --nproc-per-node=2 --no-python"
    done = start(system, tree_root, "export DGXNGPU=2 CLEAR_CACHES=1;", through=torchrun)
    assert done.returncode == 0, done.stderr
    assert seen(system, 0)["CACHES_CLEARED"] in ("true", "false")
    assert seen(system, 1)["CACHES_CLEARED"] is None


def test_a_slurm_step_is_one_rank(system: Path, tree_root: Path) -> None:
    done = start(system, tree_root, "export DGXNGPU=2 SLURM_STEP_ID=0 SLURM_LOCALID=1;")
    assert done.returncode == 0, done.stderr
    assert seen(system)["WORLD_SIZE"] is None
    assert seen(system)["CACHES_CLEARED"] is None
