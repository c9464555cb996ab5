"""run_and_time.sh: the arguments it passes to the training program, and how many ranks it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from programs import run_quietly

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
    """Create a system folder whose training program records its arguments; return its config."""
    folder = tmp_path / "a system"
    folder.mkdir()
    (folder / "run_pretraining.py").write_text(PROGRAM)
    config = folder / "config_any_1x1x4x1.sh"
    exports = {"CONFIG_FILE": config, "LOGDIR": folder, "DGXNGPU": 1, "RECIPE": "any", "BATCHSIZE": 4}
    exports["CLEAR_CACHES"] = 0
    config.write_text("".join(f"export {name}='{value}'\n" for name, value in exports.items()))
    return config


def start(
    config: Path, tree_root: Path, before: str = "", arguments: str = "", through: str = ""
) -> subprocess.CompletedProcess[str]:
    """Source the config, run ``before`` and start the launcher, optionally ``through`` another launcher."""
    launcher = tree_root / "benchmarks/bert/implementations/pytorch/launch/run_and_time.sh"
    command = f"source '{config}'; {before} exec {through} '{launcher}' {arguments}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return run_quietly("bash", "-c", command, timeout=120, env={"PATH": path})


def recorded(config: Path, rank: int = 0) -> dict[str, object]:
    return json.loads((config.parent / f"rank_{rank}.json").read_text())


def test_flags_and_exports_reach_the_program_whose_status_is_passed_on(system: Path, tree_root: Path) -> None:
    done = start(system, tree_root, "export BATCHSIZE=8 EXIT_CODE=3;", "--learning_rate '1e-3' 'key=a b'")
    assert done.returncode == 3, done.stderr
    expected = {"CACHES_CLEARED": "false", "WORLD_SIZE": None, "BATCHSIZE": "8"}
    assert recorded(system) == {**expected, "arguments": ["--learning_rate", "1e-3", "key=a b"]}


def test_program_learns_whether_caches_were_dropped(system: Path, tree_root: Path) -> None:
    done = start(system, tree_root, "export CLEAR_CACHES=1;")
    failed = "page cache was not dropped" in done.stderr
    assert recorded(system)["CACHES_CLEARED"] == ("false" if failed else "true")


def test_caches_already_dropped_by_the_job_are_not_dropped_again(system: Path, tree_root: Path) -> None:
    done = start(system, tree_root, "export CLEAR_CACHES=1 CACHES_CLEARED=true;")
    assert done.stderr == ""
    assert recorded(system)["CACHES_CLEARED"] == "true"


def test_several_ranks_start_through_torchrun(system: Path, tree_root: Path) -> None:
    done = start(system, tree_root, "export DGXNGPU=2 BIND_CPUS=1;")
    assert done.returncode == 0, done.stderr
    assert [recorded(system, rank)["WORLD_SIZE"] for rank in (0, 1)] == ["2", "2"]


def test_only_one_torchrun_rank_drops_the_caches(system: Path, tree_root: Path) -> None:
    torchrun = "python3 -m torch.distributed.run --standalone --nproc-per-node=2 --no-python"
    done = start(system, tree_root, "export DGXNGPU=2 CLEAR_CACHES=1;", through=torchrun)
    assert done.returncode == 0, done.stderr
    assert recorded(system, 0)["CACHES_CLEARED"] in ("true", "false")
    assert recorded(system, 1)["CACHES_CLEARED"] is None


def test_slurm_task_starts_one_rank(system: Path, tree_root: Path) -> None:
    done = start(system, tree_root, "export DGXNGPU=2 SLURM_STEP_ID=0 SLURM_LOCALID=1;")
    assert done.returncode == 0, done.stderr
    assert recorded(system)["WORLD_SIZE"] is None
    assert recorded(system)["CACHES_CLEARED"] is None
