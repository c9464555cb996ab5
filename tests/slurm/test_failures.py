"""Job failures and recovery: lost ranks and nodes, signals, the time limit,
restarts and job chains.
"""

import os
import re
import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster
from mlaudit.logs import read_log
from mlbert.distributed.place import expand_hostlist
from slurm_site import Site, statuses

# LONG runs can be interrupted half way, with a recent checkpoint.
# ENDLESS runs are never meant to finish.
LONG = {"MAX_STEPS": 40, "SAVE_CHECKPOINT_STEPS": 10, "PAUSE_S": 0.1}
ENDLESS = {"MAX_STEPS": 100_000, "SAVE_CHECKPOINT_STEPS": 10, "LOG_FREQ": 1000, "PAUSE_S": 0.1}


def weights(run: Path) -> bytes:
    return (run / "weights/model.safetensors").read_bytes()


def nodes_of(site: Site, job: str) -> list[str]:
    return expand_hostlist(site.cluster.job(job)["NodeList"])


# Of jobs that take about a minute while other tests run:
# site, id, and when a rank was stopped or which node was lost.
SlowJobs = dict[str, tuple[Site, str, Any]]


@pytest.fixture(scope="module", autouse=True)
def slow_jobs(
    cluster: Cluster, tree_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> SlowJobs:
    """Start the slow jobs first: one with a stopped rank, one that hits its time limit,
    one that loses a node.
    """
    names = ("stopped", "limit", "power")
    sites = {
        name: Site(cluster, tmp_path_factory.mktemp(name) / "tree", tree_root) for name in names
    }
    # Without checkpoints: while one is written, a rank may be silent for ten minutes.
    stopped = sites["stopped"].submit(MAX_STEPS=100_000, LOG_FREQ=1, PAUSE_S=0.1)
    # The signal comes when at most 75 seconds are left, and Slurm looks every 30 seconds: on a busy
    # machine the first checkpoint needs more than 20 seconds.
    limit = sites["limit"].submit("--signal=B:USR1@45", nodes=1, WALLTIME=2, **ENDLESS)
    power = submit_with_checkpoint(sites["power"], **LONG)
    cluster.kill_node(lost := nodes_of(sites["power"], power)[1])
    metrics = sites["stopped"].runs / "out/run_0/metrics.jsonl"
    cluster.wait_for(
        lambda: metrics.exists() and metrics.read_text().count("\n") > 3, 90, "four steps"
    )
    os.kill(cluster.rank(stopped, 1), signal.SIGSTOP)
    jobs = {"stopped": (stopped, time.time()), "limit": (limit, None), "power": (power, lost)}
    return {name: (sites[name], *job) for name, job in jobs.items()}


@pytest.fixture(scope="module")
def undisturbed(
    cluster: Cluster, tree_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> bytes:
    site = Site(cluster, tmp_path_factory.mktemp("undisturbed") / "tree", tree_root)
    _, output = site.run(**LONG)
    assert "run 0 ended with status 1" in output
    return weights(site.runs / "out/run_0")


def wait_for_first_checkpoint(site: Site, job: str) -> None:
    def found() -> list[Path]:
        return list(site.runs.glob("out/run_0/checkpoints/step_*"))

    site.cluster.wait_for(
        lambda: found() or site.cluster.job(job)["JobState"] == "FAILED", 90, "a checkpoint"
    )
    assert found(), site.output(job)


def submit_with_checkpoint(site: Site, *words: str, **exports: object) -> str:
    job = site.submit(*words, **exports)
    wait_for_first_checkpoint(site, job)
    return job


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_killed_rank_ends_the_job_and_is_named(site: Site, rank: int) -> None:
    job = submit_with_checkpoint(site, **ENDLESS)
    os.kill(site.cluster.rank(job, rank), signal.SIGKILL)
    killed = time.monotonic()
    facts = site.cluster.wait_for_end(job)
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "3:0"), (
        "whichever rank Slurm killed"
    )
    assert time.monotonic() - killed < 60
    words = f"rank {rank} on {nodes_of(site, job)[rank]} died after step "
    assert words in site.output(job)
    log = site.runs / "out/result_0.txt"
    assert statuses(log) == ["aborted"]
    assert words in log.read_text()
    assert not list(log.parent.glob(".*")), "the job must remove its temporary files"
    if rank == 0:
        job = site.submit(**ENDLESS)
        assert site.cluster.wait_for_end(job)["ExitCode"] == "2:0", "the old log must not count"
        assert site.output(job).count("is the log of an unfinished run") == 1


@pytest.mark.slow
@pytest.mark.parametrize("way", ["spare", "requeue", "same nodes"])
def test_run_continues_without_the_node_of_a_killed_rank(
    site: Site, undisturbed: bytes, way: str
) -> None:
    words = {"spare": ("-N3",), "requeue": (), "same nodes": ("--no-requeue",)}[way]
    limits = {"SPARES": int(way == "spare"), "MAX_RESTARTS": int(way != "spare")}
    job = submit_with_checkpoint(site, *words, **LONG, **limits)
    lost = nodes_of(site, job)[1]
    os.kill(site.cluster.rank(job, 1), signal.SIGKILL)
    facts = site.cluster.wait_for_end(job)
    output = site.output(job)
    excluded = lost if way == "requeue" else "(null)"
    assert (facts["Restarts"], facts["ExcNodeList"]) == (str(int(way == "requeue")), excluded), (
        output
    )
    assert output.count(f"{lost} is excluded from this job: rank 1 on {lost} died after step ") == (
        way != "same nodes"
    )
    assert "resumed at step" in output
    later = re.findall(r"run 0 (?:lost a rank and continues|starts) on (\S+)", output)[-1].split(
        ","
    )
    assert (len(later), lost in later) == (2, way == "same nodes")
    assert weights(site.runs / "out/run_0") == undisturbed
    assert not list((site.runs / "out").glob(".*")), "the job must remove its temporary files"


def test_slurm_signals_the_job_before_the_time_limit(slow_jobs: SlowJobs) -> None:
    """This job trains until it is canceled, so the test comes early."""
    site, job, _ = slow_jobs["limit"]
    site.wait_for_output(job, "resumed at step", 240)
    site.cluster.run("scancel", job)
    site.cluster.wait_for_end(job)
    output = site.output(job)
    assert "the ranks write a checkpoint" in output
    assert "requeueing; run 0 continues from /" in output


@pytest.mark.slow
def test_job_ends_when_it_has_lost_as_many_nodes_as_it_has_spares(site: Site) -> None:
    job = submit_with_checkpoint(site, "-N4", **ENDLESS, SPARES=1, nodes=3)
    first, second, third, spare = nodes_of(site, job)
    os.kill(site.cluster.rank(job, 0), signal.SIGKILL)
    site.wait_for_output(job, "resumed at step", 90)
    assert f"{first} is excluded from this job: rank 0 on {first} died after step " in site.output(
        job
    )
    log = site.runs / "out/result_0.txt"
    site.cluster.wait_for(
        lambda: read_log(log).first("run_start"), 90, "the first step after the restart"
    )
    os.kill(site.cluster.rank(job, 2), signal.SIGKILL)
    facts = site.cluster.wait_for_end(job)
    assert (facts["ExitCode"], facts["Restarts"]) == ("3:0", "0")
    assert f"rank 2 on {spare} died after step " in log.read_text()
    assert (
        f"the job has already lost 1 nodes ({first}), as many as SPARES and MAX_RESTARTS allow"
        in site.output(job)
    )
    assert f"{second} is excluded" not in site.output(job)
    assert f"{third} is excluded" not in site.output(job)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["after a checkpoint", "before the ranks start"])
def test_job_requeued_by_a_signal_loses_no_steps(site: Site, undisturbed: bytes, when: str) -> None:
    job = site.submit(**LONG)
    if when == "after a checkpoint":
        wait_for_first_checkpoint(site, job)
    else:
        site.wait_for_output(job, "run 0 starts", 60)
    site.cluster.run("scancel", "--batch", "--signal=USR1", job)
    facts = site.cluster.wait_for_end(job)
    output = site.output(job)
    assert facts["Restarts"] == "1", output
    continues = "requeueing; run 0 continues from its beginning"
    assert ("resumed at step" in output, continues in output) == (
        when == "after a checkpoint",
        "ranks" in when,
    )
    assert weights(site.runs / "out/run_0") == undisturbed


@pytest.mark.slow
def test_signal_to_a_job_of_an_array_leaves_the_others_alone(site: Site) -> None:
    """The last job of an array has the array's own number."""
    array = site.submit("--array=0-1", nodes=1, **ENDLESS)
    first = f"{array}_0"
    last = f"{array}_1"
    checkpoints = site.runs / "out/run_1/checkpoints"
    site.cluster.wait_for(lambda: list(checkpoints.glob("step_*")), 90, "a checkpoint")
    assert site.cluster.job(last)["JobId"] == array
    site.cluster.run("scancel", "--batch", "--signal=USR1", last)
    site.cluster.wait_for(lambda: site.cluster.job(last)["Restarts"] == "1", 60, "a restart")
    facts = site.cluster.job(first)
    assert (facts["JobState"], facts["Restarts"]) == ("RUNNING", "0"), site.output(first)
    assert "warned of the end" not in site.output(first)
    site.cluster.run("scancel", array)
    site.cluster.wait_for_end(last)


def test_signal_aborts_a_timed_run(site: Site) -> None:
    job = submit_with_checkpoint(site, **ENDLESS, TIMED=1, NEXP=2)
    site.cluster.run("scancel", "--batch", "--signal=USR1", job)
    facts = site.cluster.wait_for_end(job)
    assert (facts["JobState"], facts["Restarts"]) == ("FAILED", "0")
    assert "warned of the end: the run is aborted." in site.output(job)
    assert statuses(site.runs / "out/result_0.txt") == ["aborted"]
    assert not (site.runs / "out/result_1.txt").exists()


@pytest.mark.slow
def test_requeue_aborts_a_timed_run_and_starts_the_next_one(site: Site) -> None:
    job = submit_with_checkpoint(site, **ENDLESS, TIMED=1, NEXP=2)
    site.cluster.run("scontrol", "requeue", job)
    second = site.runs / "out/result_1.txt"
    site.cluster.wait_for(
        lambda: second.exists() and '"seed"' in second.read_text(), 90, "the second run"
    )
    site.cluster.run("scancel", job)
    site.cluster.wait_for_end(job)
    log = site.runs / "out/result_0.txt"
    assert statuses(log) == ["aborted"]
    assert "resumed at step" not in site.output(job)
    assert site.output(job).count("do not mean that a node failed") == 2, (
        "once for the requeue and once for scancel"
    )
    assert "mlbert: error: rank" not in site.output(job), "no rank may be reported as lost"
    assert '"reason": "SIGTERM"' in log.read_text()
    assert read_log(second).value("seed") == 6


@pytest.mark.slow
def test_lost_step_daemon_ends_the_job(site: Site) -> None:
    job = submit_with_checkpoint(site, **LONG, SLURM_WAIT=5)
    site.cluster.kill_step_daemon(job, 1)
    facts = site.cluster.wait_for_end(job)
    assert facts["JobState"] == "FAILED", site.output(job)
    assert (site.runs / "out/run_0/summary.json").exists(), "the ranks must have finished training"


@pytest.mark.slow
def test_next_job_of_a_chain_resumes_the_run(site: Site, undisturbed: bytes) -> None:
    first, second = site.chain(2, **LONG)
    wait_for_first_checkpoint(site, first)
    assert site.cluster.job(second)["JobState"] == "PENDING"
    site.cluster.run("scancel", first)
    site.cluster.wait_for_end(second)
    assert "resumed at step" in site.output(second)
    assert weights(site.runs / "out/run_0") == undisturbed


def test_stopped_rank_ends_the_job_and_is_named(slow_jobs: SlowJobs) -> None:
    site, job, stopped_at = slow_jobs["stopped"]
    facts = site.cluster.wait_for_end(job)
    assert facts["JobState"] == "FAILED"
    ended = datetime.fromisoformat(facts["EndTime"]).timestamp()
    assert ended - stopped_at < 60, "including Slurm's KillWait"
    words = f"rank 1 on {nodes_of(site, job)[1]} is silent after step "
    assert words in site.output(job)
    assert statuses(site.runs / "out/result_0.txt") == ["aborted"]


def test_lost_node_loses_no_steps(slow_jobs: SlowJobs, undisturbed: bytes) -> None:
    site, job, node = slow_jobs["power"]
    facts = site.cluster.wait_for_end(job)
    site.cluster.start_node(node)
    output = site.output(job)
    assert facts["Restarts"] == "1", output
    assert node not in nodes_of(site, job)
    assert "resumed at step" in output
    assert weights(site.runs / "out/run_0") == undisturbed
    site.cluster.wait_for(lambda: not site.cluster.states() & {"down", "down*"}, 30, "all nodes up")
