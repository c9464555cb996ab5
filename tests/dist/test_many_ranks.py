"""Many forked ranks start with few descriptors and little work, and name a killed one.

Only the model is missing: rendezvous, connections, health monitoring and counts are those of a
training run. Each rank writes <folder>/<rank>.json; the rank that reports the killed one writes
<folder>/story_<rank>.txt. With 0 steps, the victim is killed once all ranks are monitored, before
the first collective.
"""

import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness import Rank, rank_environment
from mlbert.data.batches import HostBatch
from mlbert.distributed.lifecycle import Lifecycle
from mlbert.distributed.stages import Stage
from mlbert.distributed.world import World
from mlbert.host.exit_statuses import LOST_RANK, SUCCESS
from mlbert.training.reader import BatchReader
from programs import free_ports

STEPS = 3
TIME_LIMIT_S = 170
Mark = Callable[[str], None]


def count_steps(world: World, lifecycle: Lifecycle, steps: int, mark: Mark) -> None:
    world.warm_up(torch.device("cpu"))
    mark("warm_up")
    objective = SimpleNamespace(
        scope="step", counts=lambda batch: (1,), divisors=lambda counts: counts
    )
    model = SimpleNamespace(training_flops=lambda batch: 1)
    source = SimpleNamespace(
        is_preparing=False, next_step=lambda: [HostBatch.dummy(8)], state_dict=dict
    )
    reader = BatchReader(source, objective, model, world, lifecycle.watch, lambda: lifecycle.warned)
    for step in range(steps):
        assert reader.take(step).counts.samples == world.world_size
        reader.begin_count(step, 7.0 + world.rank)
        lifecycle.watch.mark(step, Stage.COMPUTE)
        following = reader.finish_count(step)
        assert following is not None
        assert following.seconds == 7.0, "rank 0's clock"
    mark("steps")


def wait_for_mark(name: str, folder: Path, ranks: int) -> None:
    while sum(name in json.loads(path.read_text()) for path in folder.glob("*.json")) < ranks:
        time.sleep(0.1)


def train(world: World, folder: Path, victim: int, steps: int, mark: Mark) -> None:
    """Start as training does and run the steps; then the victim is killed while the others wait for
    it.
    """

    def close_log(status: str, reason: str | None) -> None:
        if not list(folder.glob("story_*")):  # the first call of any rank counts, as with the log
            (folder / f"story_{world.rank}.txt").write_text(f"{time.time()} {status}: {reason}")

    world.rendezvous.run_all("inputs", lambda: None)
    mark("rendezvous")
    world.start()
    mark("start")
    lifecycle = Lifecycle(world, close_log)
    with lifecycle.guard():
        mark("watch")
        if steps:
            count_steps(world, lifecycle, steps, mark)
        if world.rank == victim:
            wait_for_mark("steps" if steps else "watch", folder, world.world_size)
            mark("end")
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()
        lifecycle.finish(SUCCESS)
    world.stop()


def be_rank(rank: int, ranks: int, port: int, folder: Path, victim: int, steps: int) -> None:
    """Run one rank and write its CPU seconds, its descriptors and the time at each mark."""
    os.environ.clear()
    os.environ.update(rank_environment(rank, ranks, port))
    inherited = len(os.listdir("/proc/self/fd"))
    marks = {}
    begun = time.process_time()

    def mark(name: str) -> None:
        marks[name] = {
            "time": time.time(),
            "cpu_seconds": time.process_time() - begun,
            "descriptors": len(os.listdir("/proc/self/fd")) - inherited,
            "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        (folder / f"{rank}.part").write_text(json.dumps(marks))
        # The process may end at any time.
        os.replace(folder / f"{rank}.part", folder / f"{rank}.json")

    train(World.identify(), folder, victim, steps, mark)


def start_and_wait(ranks: int, folder: Path, victim: int, steps: int) -> None:
    (port,) = free_ports(1)
    children = {}
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            signal.alarm(TIME_LIMIT_S)
            be_rank(rank, ranks, port, folder, victim, steps)
            os._exit(0)
        children[child] = rank
    codes = {}
    while len(codes) < ranks:
        child, status = os.wait()
        codes[children[child]] = os.waitstatus_to_exitcode(status)
    (folder / "codes.json").write_text(json.dumps([codes[rank] for rank in range(ranks)]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "steps"), [(128, STEPS), (8, 0)], ids=["while training", "before any collective"]
)
def test_many_ranks_start_and_name_a_killed_one(tmp_path: Path, ranks: int, steps: int) -> None:
    victim = ranks // 2
    # Name servers may not answer: gloo looks up the loopback address's name.
    environment = rank_environment(0, 1, 1) | {"RES_OPTIONS": "timeout:1 attempts:1"}
    parent = Rank(
        start_and_wait, (ranks, tmp_path, victim, steps), environment, tmp_path / "output.txt"
    )
    output = parent.communicate(TIME_LIMIT_S)
    assert parent.returncode == 0, output
    codes = json.loads((tmp_path / "codes.json").read_text())
    assert codes == [-signal.SIGKILL if rank == victim else LOST_RANK for rank in range(ranks)], (
        output
    )

    killed_at = json.loads((tmp_path / f"{victim}.json").read_text())["end"]["time"]
    (story,) = tmp_path.glob("story_*")
    reported_at, words = story.read_text().split(" ", 1)
    assert (
        words
        == f"aborted: rank {victim} on {socket.gethostname()} died after step {max(0, steps - 1)}"
    )
    assert float(reported_at) - killed_at < 30

    marks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    first, *others = [one["steps" if steps else "watch"]["descriptors"] for one in marks]
    assert first <= 2 * ranks + 100
    assert max(others) <= 64
    # A full mesh of 256 took 70 s.
    assert sum(one["watch"]["cpu_seconds"] for one in marks) < 10
