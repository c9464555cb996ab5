"""Runs on hosts over ssh and mpirun: exact command lines, checks before the start, and how they end."""

import json
import subprocess

import pytest

from fake_cluster import MISSPELT, FakeCluster
from programs import assert_refused


def test_ssh_starts_torchrun_on_each_host(cluster: FakeCluster) -> None:
    done = cluster.start("run_multinode.sh", "--max_steps", "5", HOSTS="n1,n2", BATCHSIZE=4)
    calls = cluster.calls("ssh", "run_and_time.sh")
    assert sorted(call["words"][2] for call in calls) == ["n1", "n2"], done.stderr
    for call in calls:
        assert call["words"][:2] == ["-o", "BatchMode=yes"]
        # How the remote shell parses the line, with printf instead of the program.
        line = call["words"][3].replace("exec env", "exec printf '%s\\n'")
        remote = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout.splitlines()
        assert f"NODE_RANK={call['words'][2][1:] == '2':d}" in remote
        assert {"MASTER_ADDR=n1", "MASTER_PORT=29500", "BATCHSIZE=4", f"LOGDIR={cluster.logs}"} <= set(remote)
        assert remote[-3:] == [str(cluster.launch / "run_and_time.sh"), "--max_steps", "5"]


@pytest.mark.parametrize(
    ("word", "status", "error"), [("true", 2, "on n2;"), ("run_and_time", 3, "lost the connection")]
)
def test_lost_ssh_connections_are_reported(cluster: FakeCluster, word: str, status: int, error: str) -> None:
    ssh = cluster.programs / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "$*" >>{cluster.notes}\ncase $* in *n2*{word}*) exit 255 ;; esac\n')
    done = cluster.start("run_multinode.sh", HOSTS="n1,n2")
    assert (done.returncode, "run_and_time" in cluster.notes.read_text()) == (status, status == 3)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ssh ")
    assert error in line


@pytest.mark.parametrize("engine", ["ssh", "mpirun"])
def test_settings_are_checked_before_anything_starts_on_the_hosts(checking_cluster: FakeCluster, engine: str) -> None:
    cluster = checking_cluster
    command = ["run_multinode.sh", *["--mpirun"] * (engine == "mpirun")]
    for flags, exports, name in (((), {"BATCHSIZE": 15}, "BATCHSIZE"), (("--max_steps", "x"), {}, "max_steps")):
        assert_refused(cluster.start(*command, *flags, **exports), name)
    assert not cluster.notes.exists(), "something was started"
    done = cluster.start(*command, GRADIENT_CLIPING="x")
    assert MISSPELT in done.stderr.splitlines()
    assert cluster.calls(engine, "run_and_time.sh")


def test_mpirun_starts_all_ranks(cluster: FakeCluster) -> None:
    done = cluster.start("run_multinode.sh", "--mpirun", HOSTS="n1,n2")
    (call,) = cluster.calls("mpirun")
    words = ["--np", "8", "--host", "n1:4,n2:4", "--map-by", "ppr:4:node", "--bind-to", "none"]
    assert call["words"][:8] == words, done
    assert call["words"][-1] == str(cluster.launch / "run_and_time.sh")
    assert {"RECIPE", "LOGDIR", "EXPERIMENT", "MASTER_ADDR", "PATH", "PYTHONPATH"} <= set(call["words"])


@pytest.mark.parametrize(
    ("mpirun", "reason", "status"),
    [
        *((137, "rank 1 on n2 died after step 4", 3), (137, None, 3), (2, None, 2), (143, None, 143)),
        (143, "SIGTERM", 143),
        (3, "rank 1 on n2 failed after step 4: data: is damaged. Restore it. [data.damaged]", 2),
    ],
)
def test_mpirun_ends_with_the_runs_status(cluster: FakeCluster, mpirun: int, reason: str | None, status: int) -> None:
    exports = {"RUN_STOP": json.dumps({"reason": reason, "status": "aborted"})} if reason else {}
    done = cluster.start("run_multinode.sh", "--mpirun", HOSTS="n1,n2", STATUS=mpirun, **exports)
    assert done.returncode == status, done.stderr
    assert f"run 0 ended with status {status}." in done.stdout
