"""What a job survives and how it ends: killed ranks, a node without power, the time limit, a restart, a chain."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from cluster import Cluster
from slurm_site import Site, read_log

# Long enough to be disturbed in the middle on any machine, with a checkpoint always near.
LONG = {"MAX_STEPS": 120, "SAVE_CHECKPOINT_STEPS": 10}


def weights(run: Path) -> bytes:
    return (run / "weights/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tree_root: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Final weights of the long run when nothing happens."""
    site = Site(cluster, tmp_path_factory.mktemp("undisturbed") / "tree", tree_root)
    _, output = site.run(**LONG)
    assert "run 0 ended with status 1" in output
    return weights(site.runs / "out/run_0")


def in_training(site: Site, job: str) -> None:
    """Waits until the first checkpoint is there."""
    checkpoints = site.runs / "out/run_0/checkpoints"
    site.cluster.wait_for(
        lambda: list(checkpoints.glob("step_*")) or site.cluster.job(job)["JobState"] == "FAILED", 90, "a checkpoint"
    )
    assert list(checkpoints.glob("step_*")), site.output(job)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_job_and_is_named(site: Site, rank: int) -> None:
    job = site.submit(**LONG)
    in_training(site, job)
    os.kill(site.cluster.rank(job, rank), signal.SIGKILL)
    killed = time.monotonic()
    assert site.cluster.finished(job)["JobState"] == "FAILED"
    assert time.monotonic() - killed < 60
    words = f"rank {rank} on node{rank + 1} died after step "
    assert words in site.output(job)
    log = site.runs / "out/result_0.txt"
    assert read_log(log)["run_stop"] == ["aborted"]
    assert words in log.read_text()


def test_a_job_goes_on_by_itself_where_that_is_allowed(site: Site, undisturbed: bytes) -> None:
    job = site.submit(**LONG, MAX_RESTARTS=1)
    in_training(site, job)
    os.kill(site.cluster.rank(job, 1), signal.SIGKILL)
    assert site.cluster.finished(job)["Restarts"] == "0"
    assert "run 0 lost a rank and continues from" in site.output(job)
    assert weights(site.runs / "out/run_0") == undisturbed


def test_a_node_that_loses_power_costs_no_step(site: Site, undisturbed: bytes) -> None:
    job = site.submit(**LONG)
    in_training(site, job)
    node = "node2" if "2" in site.cluster.job(job)["NodeList"] else "node4"
    site.cluster.kill_node(node)
    facts = site.cluster.finished(job)
    site.cluster.start_node(node)
    output = site.output(job)
    assert facts["Restarts"] == "1", output
    assert node not in facts["NodeList"]
    assert "resumed at step" in output
    assert weights(site.runs / "out/run_0") == undisturbed
    site.cluster.wait_for(lambda: site.cluster.states() == {"idle"}, 30, "idle nodes")


def test_a_warning_before_the_end_costs_no_step(site: Site, undisturbed: bytes) -> None:
    job = site.submit(**LONG)
    in_training(site, job)
    site.cluster.run("scancel", "--batch", "--signal=USR1", job)
    facts = site.cluster.finished(job)
    output = site.output(job)
    assert facts["Restarts"] == "1", output
    assert "resumed at step" in output
    assert weights(site.runs / "out/run_0") == undisturbed


def test_slurm_warns_before_the_time_limit(site: Site) -> None:
    # Slurm looks at limits about every half a minute, so this one comes 30 to 60 seconds after the start.
    job = site.submit("--signal=B:USR1@15", WALLTIME=1, **{**LONG, "MAX_STEPS": 100_000})
    site.cluster.wait_for(lambda: "resumed at step" in site.output(job), 120, "restart")
    site.cluster.run("scancel", job)
    site.cluster.finished(job)
    output = site.output(job)
    assert "the ranks write a checkpoint" in output
    assert "requeueing; the run continues from" in output


def test_a_timed_run_is_aborted_by_a_restart_and_the_next_one_starts(site: Site) -> None:
    job = site.submit(**LONG, TIMED=1, NEXP=2)
    in_training(site, job)
    site.cluster.run("scontrol", "requeue", job)
    second = site.runs / "out/result_1.txt"
    site.cluster.wait_for(lambda: second.exists() and '"seed"' in second.read_text(), 90, "the second run")
    site.cluster.run("scancel", job)
    site.cluster.finished(job)
    assert read_log(site.runs / "out/result_0.txt")["run_stop"] == ["aborted"]
    assert "resumed at step" not in site.output(job)
    assert read_log(second)["seed"] == [6]


def test_a_chain_continues_what_its_links_leave(site: Site, undisturbed: bytes) -> None:
    first, second = site.chain(2, **LONG)
    in_training(site, first)
    assert site.cluster.job(second)["JobState"] == "PENDING"
    site.cluster.run("scancel", first)
    site.cluster.finished(second)
    assert "resumed at step" in site.output(second)
    assert weights(site.runs / "out/run_0") == undisturbed
