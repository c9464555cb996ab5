"""What a job survives and how it ends: lost ranks and nodes, warnings, the time limit, a restart, a chain."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

from cluster import Cluster
from mlbert.distributed.place import expand_hostlist
from slurm_site import Site, read_log

# Long enough to be disturbed in the middle, with a checkpoint always near; the other one where the end does not matter.
LONG = {"MAX_STEPS": 120, "SAVE_CHECKPOINT_STEPS": 10}
ENDLESS = {"MAX_STEPS": 100_000, "SAVE_CHECKPOINT_STEPS": 10, "LOG_FREQ": 1000}


def weights(run: Path) -> bytes:
    return (run / "weights/model.safetensors").read_bytes()


def nodes_of(site: Site, job: str) -> list[str]:
    return expand_hostlist(site.cluster.job(job)["NodeList"])


@dataclass(frozen=True)
class Slow:
    """A job that waits for a minute or so while the other tests go on; when its rank was stopped, the node it lost."""

    site: Site
    job: str
    begun: float
    lost_node: str


@pytest.fixture(scope="module", autouse=True)
def slow(cluster: Cluster, tree_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Slow]:
    """Started before all others: two with a stopped rank, one that meets its time limit, one that loses a node."""
    names = ("0", "1", "limit", "power")
    sites = {name: Site(cluster, tmp_path_factory.mktemp(name) / "tree", tree_root) for name in names}
    # Without checkpoints: while one is written, silence is borne for ten minutes.
    jobs = {name: sites[name].submit(MAX_STEPS=100_000, LOG_FREQ=1) for name in ("0", "1")}
    # Slurm looks at limits about every half a minute, so this one comes 30 to 60 seconds after the start.
    jobs["limit"] = sites["limit"].submit("--signal=B:USR1@15", nodes=1, WALLTIME=1, **ENDLESS)
    jobs["power"] = sites["power"].submit(**LONG)
    in_training(sites["power"], jobs["power"])
    lost_node = nodes_of(sites["power"], jobs["power"])[1]
    cluster.kill_node(lost_node)
    begun = dict.fromkeys(names, time.time())
    for name in ("0", "1"):
        metrics = sites[name].runs / "out/run_0/metrics.jsonl"
        cluster.wait_for(lambda path=metrics: path.exists() and path.read_text().count("\n") > 3, 90, "four steps")
        os.kill(cluster.rank(jobs[name], int(name)), signal.SIGSTOP)
        begun[name] = time.time()
    return {name: Slow(sites[name], job, begun[name], lost_node) for name, job in jobs.items()}


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
    job = site.submit(**ENDLESS)
    in_training(site, job)
    os.kill(site.cluster.rank(job, rank), signal.SIGKILL)
    killed = time.monotonic()
    facts = site.cluster.finished(job)
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "3:0"), "whichever rank Slurm has ended by a signal"
    assert time.monotonic() - killed < 60
    words = f"rank {rank} on {nodes_of(site, job)[rank]} died after step "
    assert words in site.output(job)
    log = site.runs / "out/result_0.txt"
    assert read_log(log)["run_stop"] == ["aborted"]
    assert words in log.read_text()
    assert not list(log.parent.glob(".*")), "nothing of the job's own is left"
    if rank == 1:
        job = site.submit(**ENDLESS)
        assert site.cluster.finished(job)["ExitCode"] == "2:0", "the log of before tells nothing of this job"
        assert site.output(job).count("is the log of an unfinished run") == 1


def test_a_job_goes_on_by_itself_where_that_is_allowed(site: Site, undisturbed: bytes) -> None:
    job = site.submit(**LONG, MAX_RESTARTS=1)
    in_training(site, job)
    os.kill(site.cluster.rank(job, 1), signal.SIGKILL)
    assert site.cluster.finished(job)["Restarts"] == "0"
    assert "run 0 lost a rank and continues from" in site.output(job)
    assert weights(site.runs / "out/run_0") == undisturbed


def test_a_warning_before_the_end_costs_no_step(site: Site, undisturbed: bytes) -> None:
    job = site.submit(**LONG)
    in_training(site, job)
    site.cluster.run("scancel", "--batch", "--signal=USR1", job)
    facts = site.cluster.finished(job)
    output = site.output(job)
    assert facts["Restarts"] == "1", output
    assert "resumed at step" in output
    assert weights(site.runs / "out/run_0") == undisturbed


def test_a_warning_before_the_ranks_are_up_costs_nothing(site: Site, undisturbed: bytes) -> None:
    job = site.submit(**LONG)
    site.cluster.wait_for(lambda: "run 0 starts" in site.output(job), 60, "start of the ranks")
    site.cluster.run("scancel", "--batch", "--signal=USR1", job)
    facts = site.cluster.finished(job)
    output = site.output(job)
    assert facts["Restarts"] == "1", output
    assert "requeueing; run 0 continues from its beginning" in output
    assert weights(site.runs / "out/run_0") == undisturbed


def test_a_warning_aborts_a_timed_run(site: Site) -> None:
    job = site.submit(**ENDLESS, TIMED=1, NEXP=2)
    in_training(site, job)
    site.cluster.run("scancel", "--batch", "--signal=USR1", job)
    facts = site.cluster.finished(job)
    assert (facts["JobState"], facts["Restarts"]) == ("FAILED", "0")
    assert "warned of the end: the run is aborted." in site.output(job)
    assert read_log(site.runs / "out/result_0.txt")["run_stop"] == ["aborted"]
    assert not (site.runs / "out/result_1.txt").exists()


def test_a_timed_run_is_aborted_by_a_restart_and_the_next_one_starts(site: Site) -> None:
    job = site.submit(**ENDLESS, TIMED=1, NEXP=2)
    in_training(site, job)
    site.cluster.run("scontrol", "requeue", job)
    second = site.runs / "out/result_1.txt"
    site.cluster.wait_for(lambda: second.exists() and '"seed"' in second.read_text(), 90, "the second run")
    site.cluster.run("scancel", job)
    site.cluster.finished(job)
    log = site.runs / "out/result_0.txt"
    assert read_log(log)["run_stop"] == ["aborted"]
    assert "resumed at step" not in site.output(job)
    assert site.output(job).count("do not mean that a node failed") == 2, "the requeue and the scancel"
    assert "mlbert: error: rank" not in site.output(job), "nobody is accused"
    assert '"reason": "SIGTERM"' in log.read_text()
    assert read_log(second)["seed"] == [6]


def test_a_step_whose_daemon_is_lost_ends_the_job(site: Site) -> None:
    job = site.submit(**LONG, SLURM_WAIT=5)
    in_training(site, job)
    site.cluster.kill_step_daemon(job, 1)
    facts = site.cluster.finished(job)
    assert facts["JobState"] == "FAILED", site.output(job)
    assert (site.runs / "out/run_0/summary.json").exists(), "the ranks have trained to the end"


def test_a_chain_continues_what_its_links_leave(site: Site, undisturbed: bytes) -> None:
    first, second = site.chain(2, **LONG)
    in_training(site, first)
    assert site.cluster.job(second)["JobState"] == "PENDING"
    site.cluster.run("scancel", first)
    site.cluster.finished(second)
    assert "resumed at step" in site.output(second)
    assert weights(site.runs / "out/run_0") == undisturbed


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_ends_the_job_and_is_named(slow: dict[str, Slow], rank: int) -> None:
    site, job, begun = slow[str(rank)].site, slow[str(rank)].job, slow[str(rank)].begun
    facts = site.cluster.finished(job)
    assert facts["JobState"] == "FAILED"
    ended = datetime.fromisoformat(facts["EndTime"]).timestamp()
    assert ended - begun < 60, "with Slurm's own KillWait"
    words = f"rank {rank} on {nodes_of(site, job)[rank]} is silent after step "
    assert words in site.output(job)
    assert read_log(site.runs / "out/result_0.txt")["run_stop"] == ["aborted"]


def test_slurm_warns_before_the_time_limit(slow: dict[str, Slow]) -> None:
    site, job = slow["limit"].site, slow["limit"].job
    site.cluster.wait_for(lambda: "resumed at step" in site.output(job), 120, "restart")
    site.cluster.run("scancel", job)
    site.cluster.finished(job)
    output = site.output(job)
    assert "the ranks write a checkpoint" in output
    assert "requeueing; run 0 continues from /" in output


def test_a_node_that_loses_power_costs_no_step(slow: dict[str, Slow], undisturbed: bytes) -> None:
    site, job, node = slow["power"].site, slow["power"].job, slow["power"].lost_node
    facts = site.cluster.finished(job)
    site.cluster.start_node(node)
    output = site.output(job)
    assert facts["Restarts"] == "1", output
    assert node not in nodes_of(site, job)
    assert "resumed at step" in output
    assert weights(site.runs / "out/run_0") == undisturbed
    site.cluster.wait_for(lambda: not site.cluster.states() & {"down", "down*"}, 30, "all nodes up")
