"""Rank programs for `test_watch`: monitored ranks, one of which fails at step 4."""

import os
import resource
import signal
import subprocess
import threading
import time
from pathlib import Path

import torch

from mlbert.cli.main import main
from mlbert.distributed.health import Stage
from mlbert.distributed.lifecycle import Lifecycle
from mlbert.distributed.world import World
from mlbert.host.errors import UserError
from mlbert.training.step import Step

HANG_SECONDS = 3.0
BAD_STEP = 4
LONGEST_STOP_SECONDS = 80
INHERITED_FILES = 1100  # with a thousand ranks, connections have file descriptors above 1,023


def train(world: World, folder: str, what: str, victim: int) -> int:
    """Run six steps; in the fifth, one rank dies, hangs, stops, fails or gets a signal. Return the steps done."""
    story = Path(folder, f"story_{world.rank}.txt")

    def close_log(status: str, reason: str | None) -> None:
        if not list(story.parent.glob("story_*")):  # the first call of any rank counts, as with the log
            story.write_text(f"{status}: {reason}")

    if what == "many files":
        open_many_files()
    lifecycle = Lifecycle(world, close_log, hang_seconds=HANG_SECONDS)
    step = 0
    with lifecycle.guard():
        lifecycle.accept_warnings()
        for step in range(6):
            lifecycle.watch.mark(step, Stage.READ)
            if step == BAD_STEP and world.rank == victim:
                fail_as(what, story.parent)
            if step == BAD_STEP and (what, victim, world.rank) == ("stops", 0, 2):
                # The launcher ends this rank after another one reported rank 0 as lost; it then reports to rank 0.
                threading.Timer(HANG_SECONDS + 2, os.kill, (os.getpid(), signal.SIGTERM)).start()
                time.sleep(1000)
            if step == BAD_STEP and what == "dies and ends the others":
                end_as_slurm_does(lifecycle, Path(folder), victim)
            if step == BAD_STEP and what == "cancelled":
                time.sleep(0.2 * world.rank)
                os.kill(os.getpid(), signal.SIGTERM)
            lifecycle.watch.mark(step, Stage.COUNT)
            if float(world.all_reduce_sum(torch.tensor(float(lifecycle.warned)))):
                lifecycle.leave()
            lifecycle.watch.mark(step, Stage.COMPUTE)
            time.sleep(0.5 * HANG_SECONDS if what == "many files" else 0)
        lifecycle.finish("success")
    return step + 1


def end_as_slurm_does(lifecycle: Lifecycle, folder: Path, victim: int) -> None:
    """Let the victim die and end the others with SIGTERM at once, while they compute."""
    world, watch = lifecycle.world, lifecycle.watch
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
    if what == "hangs":
        time.sleep(1000)
    if what == "stops":
        # Resume only after the others have reported this rank as lost, however long that takes.
        wake_up = "for i in $(seq $1); do sleep 1; ls $2/story_* && break; done; sleep 3; kill -CONT $3"
        words = ["sh", "-c", wake_up, "sh", str(LONGEST_STOP_SECONDS), str(stories), str(os.getpid())]
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


def train_with_many_files(arguments: list[str]) -> None:
    open_many_files()
    raise SystemExit(main(arguments))


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
