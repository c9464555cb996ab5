"""torchrun as in docs/torchrun.md: a killed rank is restarted and the run continues exactly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from harness import free_port, rank_environment
from mlbert.config.sections import settings_by_key
from training_settings import SETTINGS, SHAPE


def start(folder: Path, tree_root: Path, port: int, **changes: str) -> list[subprocess.Popen[str]]:
    """Start two torchrun agents, as on two machines, with one rank each."""
    implementations = tree_root / "benchmarks/bert/implementations"
    (folder / "bert_config.json").write_text(json.dumps(SHAPE))
    table = settings_by_key()
    exports = {table[name].env: value for name, value in SETTINGS.items()}
    exports |= {"CONFIG_FILE": str(implementations / "cpu_demo/config_cpu_1x1x32x1_demo.sh"), "CLEAR_CACHES": "0"}
    exports |= {"BERT_CONFIG": str(folder / "bert_config.json"), "DGXNNODES": "2", "DGXNGPU": "1"}
    exports |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    exports |= {
        "RESUME": "1",
        "SAVE_CHECKPOINT_STEPS": "10",
        "MAX_STEPS": "100",
        "TARGET_MLM_ACCURACY": "1e-6",
        **changes,
    }
    inherited = rank_environment(0, 2, port)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del inherited[name]
    words = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-id=any"]
    words += [f"--rdzv-endpoint=127.0.0.1:{port}", "--monitor-interval=0.2", "--no-python"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *words,
        str(implementations / "pytorch/launch/run_and_time.sh"),
    ]
    environment = {**inherited, **exports, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]


def finish(agents: list[subprocess.Popen[str]]) -> str:
    outputs = [agent.communicate(timeout=120)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    return "\n".join(outputs)


def rank_of(agent: subprocess.Popen[str]) -> int:
    """Return the process id of the rank that an agent started."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    return next(int(pid) for pid in children if b"run_pretraining.py" in Path(f"/proc/{pid}/cmdline").read_bytes())


def test_killed_rank_does_not_change_the_final_weights(tmp_path: Path, tree_root: Path) -> None:
    whole, disturbed = tmp_path / "whole", tmp_path / "disturbed"
    finish(start(tmp_path, tree_root, free_port(), LOGDIR=str(whole)))

    agents = start(tmp_path, tree_root, free_port(), LOGDIR=str(disturbed))
    deadline = time.monotonic() + 150
    while not list(disturbed.glob("run_0/checkpoints/step_*")):
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.02)
    os.kill(rank_of(agents[1]), signal.SIGKILL)
    output = finish(agents)

    assert "resumed at step" in output
    assert "died after step" in output
    weights = "run_0/weights/model.safetensors"
    assert (disturbed / weights).read_bytes() == (whole / weights).read_bytes()
