"""run_and_time.sh: the arguments it passes to the training program, and how many ranks it starts."""

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


def test_flags_and_exports_reach_the_program_whose_status_is_passed_on(system: Path, tree_root: Path) -> None:
    done = start(system, tree_root, "export BATCHSIZE=8 EXIT_CODE=3;", "--learning_rate '1e-3' 'key=a b'")
    assert done.returncode == 3, done.stderr
    expected = {"CACHES_CLEARED": "false", "WORLD_SIZE": None, "BATCHSIZE": "8"}
    expected["arguments"] = ["--learning_rate", "1e-3", "key=a b"]
    assert json.loads(system.with_name("rank_0.json").read_text()) == expected


TORCHRUN = "python3 -m torch.distributed.run --standalone --nproc-per-node=2 --no-python"


@pytest.mark.parametrize(
    ("exports", "through", "sizes", "dropped"),
    [
        ("CLEAR_CACHES=1", "", [None], ["by this"]),
        ("CLEAR_CACHES=1 CACHES_CLEARED=true", "", [None], ["true"]),  # by the job
        ("DGXNGPU=2 BIND_CPUS=1", "", ["2", "2"], ["false", "false"]),
        ("DGXNGPU=2 CLEAR_CACHES=1", TORCHRUN, ["2", "2"], ["by this", None]),
        ("DGXNGPU=2 SLURM_STEP_ID=0 SLURM_LOCALID=1", "", [None], [None]),  # Slurm starts the other rank
    ],
)
def test_each_way_to_start_ranks_and_drop_caches(
    system: Path, tree_root: Path, exports: str, through: str, sizes: list[str | None], dropped: list[str | None]
) -> None:
    done = start(system, tree_root, f"export {exports};", through=through)
    assert done.returncode == 0, done.stderr
    failed = "page cache was not dropped" in done.stderr
    assert not failed or "by this" in dropped, "dropped twice"
    found = [json.loads(system.with_name(f"rank_{rank}.json").read_text()) for rank in range(len(sizes))]
    assert [rank["WORLD_SIZE"] for rank in found] == sizes
    own = "false" if failed else "true"
    assert [rank["CACHES_CLEARED"] for rank in found] == [own if by == "by this" else by for by in dropped]
