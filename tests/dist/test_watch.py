"""A rank that dies, hangs or fails is named, and the others end soon."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import mlbert
from harness import run_ranks, start_ranks
from mlbert.cli.main import main
from mlbert.distributed.lifecycle import Lifecycle
from mlbert.distributed.stages import Stage
from mlbert.distributed.world import World
from mlbert.host.errors import UserError
from mlbert.host.exit_statuses import LOST_RANK, WRONG_INPUT
from mlbert.training.step import Step
from stored_sets import VOCAB_SIZE, make_rows, random_lengths, write_set
from training_settings import read_metrics, train_arguments

HANG_SECONDS = 3.0
READ_SECONDS = 6.0
BAD_STEP = 4
ALL = 99  # victims
LONGEST_STOP_SECONDS = 80
INHERITED_FILES = 1100  # with a thousand ranks, connections have file descriptors above 1,023


def train(world: World, folder: str, what: str, victim: int) -> int:
    """Run six steps; in the fifth, one rank dies, hangs, stops, fails or gets a signal.

    Return the steps done.
    """
    story = Path(folder, f"story_{world.rank}.txt")

    def close_log(status: str, reason: str | None) -> None:
        if not list(
            story.parent.glob("story_*")
        ):  # the first call of any rank counts, as with the log
            story.write_text(f"{status}: {reason}")

    if what == "many files":
        open_many_files()
    read_seconds = READ_SECONDS if what == "has no data" else 1000.0
    lifecycle = Lifecycle(world, close_log, HANG_SECONDS, read_seconds)
    step = 0
    with lifecycle.guard():
        lifecycle.accept_warnings()
        for step in range(6):
            lifecycle.watch.mark(step, Stage.READ)
            if step == BAD_STEP and world.rank == victim and what == "hangs":
                lifecycle.watch.mark(step, Stage.COMPUTE)
            if step == BAD_STEP and victim in (world.rank, ALL):
                fail_as(what, story.parent)
            if step == BAD_STEP and (what, victim, world.rank) == ("stops", 0, 2):
                # The launcher ends this rank after another one reported rank 0 as lost;
                # it then reports to rank 0.
                threading.Timer(HANG_SECONDS + 2, os.kill, (os.getpid(), signal.SIGTERM)).start()
                time.sleep(1000)
            if step == BAD_STEP and what == "dies and ends the others":
                end_as_slurm_does(lifecycle, Path(folder), victim)
            if step == BAD_STEP and what == "canceled":
                time.sleep(0.2 * world.rank)
                os.kill(os.getpid(), signal.SIGTERM)
            lifecycle.watch.mark(step, Stage.COUNT)
            if float(world.all_reduce_sum(torch.tensor(float(lifecycle.warned)))):
                lifecycle.leave()
            lifecycle.watch.mark(step, Stage.COMPUTE)
            time.sleep(0.5 * HANG_SECONDS if what in ("many files", "has late data") else 0)
        lifecycle.finish("success")
    return step + 1


def end_as_slurm_does(lifecycle: Lifecycle, folder: Path, victim: int) -> None:
    """Let the victim die and end the others with SIGTERM at once, while they compute."""
    world = lifecycle.world
    watch = lifecycle.watch
    (folder / f"pid_{world.rank}").write_text(str(os.getpid()))
    world.barrier()
    if world.rank == victim:
        pids = [int((folder / f"pid_{rank}").read_text()) for rank in range(world.world_size)]
        command = ["sh", "-c", "sleep 1; kill -KILL $1; shift; kill -TERM $*", "sh"]
        subprocess.Popen([*command, str(pids.pop(victim)), *map(str, pids)], start_new_session=True)
    while True:
        time.sleep(0.05)
        if world.rank not in (0, victim):  # rank 0 reads first of those that it has heard last
            watch._channels[0].send(place=watch._place)


def fail_as(what: str, stories: Path) -> None:
    signals = {"dies": signal.SIGKILL, "warned": signal.SIGUSR1, "ended": signal.SIGTERM}
    if what in signals:
        os.kill(os.getpid(), signals[what])
    if what in ("hangs", "has no data"):
        time.sleep(1000)
    if what == "has late data":
        time.sleep(3 * HANG_SECONDS)
    if what == "stops":
        # Resume only after the others have reported this rank as lost, however long that takes.
        wake_up = (
            "for i in $(seq $1); do sleep 1; ls $2/story_* && break; done; sleep 3; kill -CONT $3"
        )
        words = [
            "sh",
            "-c",
            wake_up,
            "sh",
            str(LONGEST_STOP_SECONDS),
            str(stories),
            str(os.getpid()),
        ]
        subprocess.Popen(words, start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)
    if what == "fails":
        raise ValueError("record 17 is damaged")
    if what == "is mistaken":
        raise UserError("data.damaged", "train.h5", "record 17 is damaged", "Restore it")


def open_many_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2 * INHERITED_FILES, hard), hard))
    for _ in range(INHERITED_FILES):
        os.dup(0)


def run_and_read_status(
    folder: Path, what: str, victim: int
) -> tuple[dict[str, str], tuple[int, ...], tuple[str, ...]]:
    """Return the logged status by the file of the rank that logged it,
    and the exit codes and outputs of all ranks.
    """
    results = run_ranks(train, 3, folder, check=False, folder=str(folder), what=what, victim=victim)
    return {path.stem: path.read_text() for path in folder.glob("story_*.txt")}, *zip(
        *results, strict=True
    )


def node_to_exclude(story):
    """Return the node that run.sub takes to be lost for this reason,
    of the node that the reason names and another.
    """
    launch = Path(mlbert.__file__).parents[1] / "launch/lost_nodes.sh"
    program = 'source "$1"; nodes=("$2" other); named_node "$3"'
    words = ["bash", "-c", program, "bash", str(launch), story.split()[3], story]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(("what", "victim"), [("dies", 2), ("dies", 0), ("hangs", 1), ("fails", 0)])
def test_lost_rank_is_named_and_the_others_end(tmp_path, what, victim):
    logged, codes, outputs = run_and_read_status(tmp_path, what, victim)
    assert 0 not in codes
    reporter = 1 if (what, victim) == ("dies", 0) else 0
    assert set(logged) == {f"story_{reporter}"}
    status, _, story = logged[f"story_{reporter}"].partition(": ")
    assert status == "aborted"
    assert story.startswith(f"rank {victim} on ")
    # When rank 0 dies, rank 1 only knows its own step, which it may not have begun.
    assert any(f"after step {step}" in story for step in (BAD_STEP, BAD_STEP - reporter))
    assert {"dies": "died", "hangs": "hangs", "fails": "ValueError: record 17 is damaged"}[
        what
    ] in story
    if what == "hangs":
        assert "COMPUTE" in story
    assert node_to_exclude(story) == ("" if what == "fails" else story.split()[3])
    assert codes[reporter] == (1 if (what, victim) == ("fails", 0) else LOST_RANK)
    assert story in outputs[reporter]


@pytest.mark.parametrize("victim", [1, ALL])
def test_a_run_waits_for_a_stalled_storage(tmp_path: Path, victim: int) -> None:
    logged, codes, outputs = run_and_read_status(tmp_path, "has late data", victim)
    assert codes == (0, 0, 0)
    assert logged == {"story_0": "success: None"}
    begin, end = [line for line in outputs[0].splitlines() if "mlbert: warning" in line]
    assert f"s after step {BAD_STEP}: rank {1 if victim == 1 else 0} on " in begin
    assert " in READ. The run waits for up to 17 minutes (READ_TIMEOUT)" in begin
    assert "data again after" in end


@pytest.mark.parametrize("victim", [2, ALL])
def test_a_storage_that_stalls_for_too_long_is_no_lost_node(tmp_path: Path, victim: int) -> None:
    logged, codes, _ = run_and_read_status(tmp_path, "has no data", victim)
    assert codes == (LOST_RANK,) * 3
    assert list(logged) == ["story_0"]
    story = logged["story_0"].removeprefix("aborted: ")
    assert story.startswith("no data for ")
    assert f"s after step {BAD_STEP}: rank {2 if victim == 2 else 0} on " in story
    assert node_to_exclude(f"rank 0 on host: {story}") == ""
    assert node_to_exclude(story) == ""


def test_a_death_is_named_before_the_signals_that_it_causes(tmp_path: Path) -> None:
    logged, codes, _ = run_and_read_status(tmp_path, "dies and ends the others", 2)
    assert codes[0] == LOST_RANK
    assert f"died after step {BAD_STEP}" in logged["story_0"]


def test_wrong_input_of_one_rank_is_the_status_of_all(tmp_path: Path) -> None:
    logged, codes, _ = run_and_read_status(tmp_path, "is mistaken", 1)
    assert codes == (WRONG_INPUT,) * 3
    story = logged["story_0"].removeprefix("aborted: ")
    assert (
        "failed after step 4: train.h5: record 17 is damaged. Restore it. [data.damaged]" in story
    )
    assert node_to_exclude(story) == ""


def test_wrong_input_of_all_ranks_is_the_status_of_the_launcher(
    tmp_path: Path, tree_root: Path
) -> None:
    """Rank 0 reports it, although torchrun ends all ranks when the first one exits."""
    for name in ("train", "eval"):
        write_set(tmp_path / name, make_rows(random_lengths(64)))
    data = {"synthetic_data": 0, "input_dir": tmp_path / "train", "eval_dir": tmp_path / "eval"}
    settings = train_arguments(
        tmp_path, num_eval_examples=100, shape={"vocab_size": VOCAB_SIZE}, **data
    )[1:]
    program = tree_root / "benchmarks/bert/implementations/cpu_demo/run_pretraining.py"
    words = [sys.executable, "-m", "mlbert", "launch", "local", "-n", "2", str(program), *settings]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == WRONG_INPUT, done.stderr
    assert [line for line in done.stderr.splitlines() if "error" in line] == [
        f"mlbert: error: {tmp_path / 'eval'}: it contains 64 examples, but 100 are requested. "
        "Set NUM_EVAL_EXAMPLES from 1 to 64. [config.range]"
    ]


@pytest.mark.parametrize("victim", [0, 1])
def test_suspended_rank_that_wakes_up_reports_nobody_as_lost(tmp_path, victim):
    logged, codes, outputs = run_and_read_status(tmp_path, "stops", victim)
    assert codes == (LOST_RANK,) * 3
    (story,) = logged.values()
    assert story.startswith(f"aborted: rank {victim} on ")
    assert "is silent" in story
    assert node_to_exclude(story.removeprefix("aborted: ")) == story.split()[4]
    error_lines = [
        line for output in outputs for line in output.splitlines() if "mlbert: error: rank" in line
    ]
    assert error_lines
    assert all(f"error: rank {victim} on " in line for line in error_lines)


@pytest.mark.parametrize(
    ("what", "victim", "code", "status"),
    [
        ("warned", 0, 128 + signal.SIGUSR1, "aborted: SIGUSR1"),
        ("warned", 2, 128 + signal.SIGUSR1, "aborted: SIGUSR1"),
        ("ended", 2, LOST_RANK, f"failed after step {BAD_STEP}: Terminated: SIGTERM"),
    ],
)
def test_signal_to_one_rank_ends_all(
    tmp_path: Path, what: str, victim: int, code: int, status: str
) -> None:
    logged, codes, _ = run_and_read_status(tmp_path, what, victim)
    assert codes == (code,) * 3
    assert list(logged) == ["story_0"]
    assert status in logged["story_0"]


def test_sigterm_on_all_ranks_names_no_failed_rank(tmp_path: Path) -> None:
    logged, codes, outputs = run_and_read_status(tmp_path, "canceled", -1)
    assert logged == {"story_0": "aborted: SIGTERM"}
    assert codes[0] == 128 + signal.SIGTERM
    assert "mlbert: error: rank" not in "".join(outputs)


def test_successful_run_is_not_disturbed(tmp_path: Path) -> None:
    """If the health monitor cannot read its connection,
    a rank is reported as silent after the hang timeout.
    """
    assert run_ranks(train, 3, tmp_path, folder=str(tmp_path), what="many files", victim=0) == [
        6,
        6,
        6,
    ]
    assert [path.read_text() for path in tmp_path.glob("story_*.txt")] == ["success: None"]


def train_slowly(arguments: list[str], slow_rank: int) -> None:
    """Run ``mlbert`` with each rank on its own node; one rank sleeps before each micro-batch."""
    os.environ["SLURMD_NODENAME"] = f"n{os.environ['RANK']}"
    forward_backward = Step._forward_backward

    def slow(*words: object) -> None:
        time.sleep(0.2)
        forward_backward(*words)

    if os.environ["RANK"] == str(slow_rank):
        Step._forward_backward = slow
    raise SystemExit(main(arguments))


def test_slowest_rank_is_named_although_all_ranks_wait_for_it(tmp_path: Path) -> None:
    ranks = start_ranks(
        train_slowly, (train_arguments(tmp_path, max_steps=9, log_freq=3), 1), 3, tmp_path
    )
    outputs = [rank.communicate(120) for rank in ranks]
    assert ranks[0].returncode == 1, outputs[0]
    points = read_metrics(tmp_path / "out")
    assert [point["step"] for point in points] == [1, 3, 6, 9]
    assert {(point["slowest_rank"], point["slowest_host"]) for point in points[1:]} == {(1, "n1")}
    for point in points[1:]:
        assert point["slowest_rank_seconds"] >= 0.4, "two micro-batches"
        assert (
            point["fastest_rank_seconds"]
            <= point["median_rank_seconds"]
            < point["slowest_rank_seconds"] - 0.2
        )
