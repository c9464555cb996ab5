"""``mlbert launch local`` with real ranks, on one node and on two."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlbert.cli.launch import local_command
from programs import free_ports
from user_errors import user_error

SCRIPT = r"""
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
sys.stdout.write(" ".join([*(os.environ[name] for name in names), *sys.argv[1:]]) + "\n")  # one write per line
dist.barrier()  # a rank that left now would break the connection that another still opens
dist.destroy_process_group()
"""


def start(script: Path, *words: str, **exports: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mlbert", "launch", "local", *words, str(script), "a.yaml", "--n=1"]
    environ = {**os.environ, **exports}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)


def lines(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-2000:]
    return sorted(out.splitlines())


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (path := tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    return path


def test_one_node_starts_all_ranks_with_the_script_arguments(script: Path) -> None:
    assert lines(start(script, "-n", "2")) == ["0 2 0 2 a.yaml --n=1", "1 2 1 2 a.yaml --n=1"]


@pytest.mark.slow
def test_two_nodes_from_flags_and_from_environment_variables(script: Path) -> None:
    port = str(*free_ports(1))
    flags = ("-n", "1", "--world_size", "2", "--master_addr", "127.0.0.1", "--master_port", port)
    first = start(script, *flags, "--node_rank", "0")
    exports = {"WORLD_SIZE": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    second = start(script, "-n", "1", **exports)
    assert lines(first) == ["0 2 0 1 a.yaml --n=1"]
    assert lines(second) == ["1 2 0 1 a.yaml --n=1"]


def test_inconsistent_world_sizes_are_errors() -> None:
    for numbers, code, subject in (
        ((2, 3, 0, "127.0.0.1", 7501), "config.conflict", "--world_size 3"),
        ((2, 4, 2, "127.0.0.1", 7501), "config.conflict", "--world_size 4"),
        ((2, 4, 0, "127.0.0.1", None), "config.missing", "--master_port"),
    ):
        with user_error(code, subject):
            local_command(*numbers)


@pytest.mark.parametrize(
    ("end", "status", "stderr"),
    [
        ("sys.exit('mlbert: error: no data')", 1, "mlbert: error: no data\n"),
        pytest.param("os.kill(os.getpid(), 9)", 3, "", marks=pytest.mark.slow),
    ],
)
def test_failed_rank_decides_the_output_and_exit_status(tmp_path: Path, end: str, status: int, stderr: str) -> None:
    """Print the rank's own error without torchrun's report; exit with its status, or 3 if it was killed."""
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys, time\nif os.environ['RANK'] == '1': {end}\ntime.sleep(100)\n")
    process = start(script, "-n", "2")
    assert (process.communicate(timeout=120)[1], process.returncode) == (stderr, status)
