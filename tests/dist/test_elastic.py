"""torchrun as in docs/torchrun.md: a killed rank is restarted, the run continues exactly,
and nodes end quietly.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import rank_environment, run_program
from programs import free_ports
from training_settings import exports

IMPLEMENTATIONS = Path("benchmarks/bert/implementations")


def exports_of_a_run(folder: Path, tree_root: Path, name: str) -> dict[str, str]:
    """Return the exports of a run on two ranks into ``folder/name``."""
    config = tree_root / IMPLEMENTATIONS / "cpu_demo/config_cpu_1x1x32x1_demo.sh"
    values = exports(folder) | {"CONFIG_FILE": str(config), "CLEAR_CACHES": "0"}
    values |= {
        "DGXNNODES": "2",
        "DGXNGPU": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "RESUME": "1",
    }
    values |= {"SAVE_CHECKPOINT_STEPS": "10", "MAX_STEPS": "100", "TARGET_MLM_ACCURACY": "1e-6"}
    return values | {"LOGDIR": str(folder / name)}


@pytest.mark.slow
def test_killed_rank_does_not_change_the_final_weights(tmp_path: Path, tree_root: Path) -> None:
    """Run two ranks undisturbed, and then with two torchrun agents,
    as on two machines with one rank each.
    """
    program = tree_root / IMPLEMENTATIONS / "cpu_demo/run_pretraining.py"
    port, own_port = free_ports(2)
    own = exports_of_a_run(tmp_path, tree_root, "whole")
    ranks = [
        run_program(program, [], tmp_path, rank_environment(rank, 2, port, 1) | own)
        for rank in range(2)
    ]
    outputs = [rank.communicate(120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)

    words = [
        "--nnodes=2",
        "--nproc-per-node=1",
        "--max-restarts=1",
        "--rdzv-backend=c10d",
        "--rdzv-id=any",
    ]
    words += [f"--rdzv-endpoint=127.0.0.1:{own_port}", "--monitor-interval=0.2", "--no-python"]
    launcher = str(tree_root / IMPLEMENTATIONS / "pytorch/launch/run_and_time.sh")
    identity = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    environ = {
        name: value for name, value in rank_environment(0, 2, port).items() if name not in identity
    }
    environ |= exports_of_a_run(tmp_path, tree_root, "disturbed")
    environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [sys.executable, "-m", "torch.distributed.run", *words, launcher]
    agents = [
        subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    deadline = time.monotonic() + 150
    while not list(tmp_path.glob("disturbed/run_0/checkpoints/step_*")):
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.02)
    children = Path(f"/proc/{agents[1].pid}/task/{agents[1].pid}/children").read_text().split()
    rank = next(
        int(pid)
        for pid in children
        if b"run_pretraining.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(rank, signal.SIGKILL)
    output = "\n".join(agent.communicate(timeout=120)[0] for agent in agents)
    assert [agent.returncode for agent in agents] == [0, 0], output
    assert "resumed at step" in output
    assert "died after step" in output
    whole, disturbed = (
        tmp_path / f"{name}/run_0/weights/model.safetensors" for name in ("whole", "disturbed")
    )
    assert disturbed.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("status", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_nodes_end_without_a_stack_of_torch(tmp_path: Path, status: int) -> None:
    """Rank 0 writes the results when the others have ended, and its node has the store."""
    program = "import os, sys, time; first = os.environ['RANK'] == '0'; time.sleep(first); "
    program += f"print(os.environ.get('TORCH_CPP_LOG_LEVEL')); sys.exit({status} * first)"
    words = [
        "--nnodes=2",
        "--nproc-per-node=1",
        "--master-addr=127.0.0.1",
        f"--master-port={free_ports(1)[0]}",
    ]
    command = [sys.executable, "-m", "mlbert", "launch", "ranks", *words]
    ranks = ["--no-python", sys.executable, "-c", program]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": tmp_path, "text": True}
    agents = [
        subprocess.Popen([*command, f"--node-rank={node}", *ranks], **options) for node in range(2)
    ]
    outputs = [agent.communicate(timeout=120) for agent in agents]
    assert outputs == [("None\n", "")] * 2, (
        "the ranks would show torch's warnings, the agents do not"
    )
    assert [agent.returncode for agent in agents] == [status, 0]
