"""Before collectives are available: a hung rank is named,
and an error on several ranks is printed once.
"""

import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist

from harness import Rank, rank_environment, start_ranks
from mlbert.cli.main import main
from mlbert.distributed import rendezvous
from mlbert.distributed.lifecycle import Lifecycle
from mlbert.distributed.world import World
from mlbert.host.command_line import exit_code
from mlbert.host.errors import UserError
from programs import free_ports
from training_settings import train_arguments

DEADLINE = 3.0
WAYS = [(1, way) for way in ("connecting", "connecting to one rank", "joining the watch")]
MISTAKES = {
    "'fast' is not a number": {"learning_rate": "fast"},
    "/nowhere: ": {"synthetic_data": 0, "input_dir": "/nowhere"},
    "damaged.safetensors": {"init_checkpoint": "damaged.safetensors"},
    "there is nothing to evaluate": {},
}


def outcome(
    function: Callable[..., None],
    arguments: tuple[object, ...],
    folder: Path,
    size: int = 2,
    stopped: int = -1,
) -> tuple[list[int | None], list[str]]:
    """Return the exit codes and all error lines but gloo's own;
    kill the stopped rank at the end.
    """
    ranks = start_ranks(function, arguments, size, folder)
    ending = sorted(range(size), key=lambda rank: rank == stopped)
    lines = [
        line
        for rank in ending
        for line in ranks[rank].communicate(0 if rank == stopped else 40).splitlines()
    ]
    errors = [line for line in lines if "error" in line.lower() and "/gloo/" not in line]
    return [rank.returncode for rank in ranks], errors


def stop(*_: object, **__: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGSTOP)
    raise AssertionError("the process was resumed")


def meet(victim: int, where: str) -> None:
    """Connect and start the health monitor with short deadlines; the victim stops at ``where``."""
    rendezvous.GRACE_SECONDS = 1.5
    rendezvous.JOIN_SECONDS = DEADLINE
    world = World.identify()
    if world.rank == victim:
        if where == "holding the store":
            world.rendezvous.store(DEADLINE)
            stop()
        if where == "connecting":
            dist.init_process_group = stop
        if where == "connecting to one rank":
            dist.all_reduce = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        if where == "joining the watch":
            World.hosts = stop

    def work() -> int:
        world.start()
        with Lifecycle(world, lambda *_: None).guard():
            return 0

    raise SystemExit(exit_code(work))


@pytest.mark.parametrize(("victim", "where"), [*WAYS, (0, "holding the store"), (0, "connecting")])
def test_rank_that_stops_while_joining_is_named_once(
    tmp_path: Path, victim: int, where: str
) -> None:
    codes, (line,) = outcome(meet, (victim, where), tmp_path, 3, victim)
    assert codes == [-signal.SIGKILL if rank == victim else 2 for rank in range(3)]
    message = f"rank {victim} on {socket.gethostname()} joined, then hung or died"
    # A stopped rank 0 does not answer requests to its store.
    assert (message if victim else "rank 0 has not answered for") in line


def gather_and_leave() -> None:
    """Gather the hosts and exit; rank 0, whose process holds the store,
    has read them a second before the others.
    """
    world = World.identify()

    class SlowStore(dist.PrefixStore):
        def get(self, key: str) -> bytes:
            time.sleep(1.0)
            return super().get(key)

    if world.rank > 0:
        dist.PrefixStore = SlowStore
    assert world.hosts() == [world.host] * world.world_size


def test_all_ranks_have_read_what_was_gathered_before_the_store_closes(tmp_path: Path) -> None:
    assert outcome(gather_and_leave, (), tmp_path, 3) == ([0, 0, 0], [])


def run_first(end: str) -> None:
    """Let rank 0 work for a second."""
    world = World.identify()

    def work() -> list[int]:
        time.sleep(1.0)
        if end == "mistake":
            raise UserError("data.missing", "TEXT", "is empty", "Give another one")
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "interrupted":
            raise KeyboardInterrupt
        return [world.rank, 7]

    def run() -> int:
        assert world.rendezvous.run_on_rank_0("work", work) == [0, 7]
        return 0

    raise SystemExit(exit_code(run))


@pytest.mark.parametrize(
    ("way", "statuses", "words"),
    [
        ("success", [0, 0, 0], []),
        ("mistake", [2, 2, 2], ["mlbert: error: TEXT: is empty. Give another one. [data.missing]"]),
        ("killed", [-signal.SIGKILL, 3, 3], []),
        ("interrupted", [130, 3, 3], []),
    ],
)
def test_all_ranks_wait_for_the_work_of_rank_0(
    tmp_path: Path, way: str, statuses: list[int], words: list[str]
) -> None:
    assert outcome(run_first, (way,), tmp_path, 3) == (statuses, words)


def run_all(mistakes: dict[str, str]) -> None:
    world = World.identify()

    def work() -> str:
        if str(world.rank) in mistakes:
            raise UserError("data.missing", "DATADIR_PHASE2", mistakes[str(world.rank)], "Mend it")
        return "fine"

    def run() -> int:
        assert world.rendezvous.run_all("inputs", work) == "fine"
        world.start()
        world.barrier()
        return 0

    raise SystemExit(exit_code(run))


@pytest.mark.parametrize(
    ("mistakes", "words"),
    [
        (
            {"0": "no shards", "1": "no shards", "2": "no shards"},
            ["error: DATADIR_PHASE2: no shards. Mend it."],
        ),
        (
            {"2": "no shards"},
            [f"error: rank 2 on {socket.gethostname()}: DATADIR_PHASE2: no shards. Mend it."],
        ),
        (
            {"0": "no shards", "1": "half of it"},
            ["error: DATADIR_PHASE2: no shards", "DATADIR_PHASE2: half of it"],
        ),
        (
            {"0": "no shards", "1": "half of it", "2": "a third"},
            ["error: DATADIR_PHASE2: no shards", "half of it. Ranks with yet other errors: 1"],
        ),
        ({}, []),
    ],
    ids=["all", "one", "two kinds", "three kinds", "none"],
)
def test_mistake_on_several_ranks_is_printed_once(
    tmp_path: Path, mistakes: dict[str, str], words: list[str]
) -> None:
    codes, lines = outcome(run_all, (mistakes,), tmp_path, 3)
    assert codes == [2 if mistakes else 0] * 3
    assert len(lines) == len(words)
    assert all(word in line for word, line in zip(words, lines, strict=True))


@pytest.mark.parametrize(
    ("words", "changes"), MISTAKES.items(), ids=["setting", "data", "weights", "evaluation only"]
)
def test_training_prints_a_mistake_once(
    tmp_path: Path, words: str, changes: dict[str, object]
) -> None:
    (tmp_path / "damaged.safetensors").write_bytes(b"no weights")
    changes = {
        key: tmp_path / value if key == "init_checkpoint" else value
        for key, value in changes.items()
    }
    more = [] if changes else ["--evaluate-only"]
    codes, (line,) = outcome(main, ([*train_arguments(tmp_path, **changes), *more],), tmp_path)
    assert words in line
    assert codes[0] == 2


def test_join_timeout_is_configurable(tmp_path: Path) -> None:
    words = train_arguments(tmp_path, join_timeout=2)
    rank = Rank(main, (words,), rank_environment(0, 3, *free_ports(1)), tmp_path / "output.txt")
    (line,) = [line for line in rank.communicate(40).splitlines() if "error" in line]
    assert rank.returncode == 2
    assert "rank 1, 2 did not join within 2 s" in line


def start_with_few_files(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    def work() -> int:
        World.identify().start()
        return 0

    raise SystemExit(exit_code(work))


def test_low_limit_on_open_files_is_printed_once(tmp_path: Path) -> None:
    codes, (line,) = outcome(start_with_few_files, (200,), tmp_path)
    assert codes == [2, 2]
    assert "error: ulimit -n: the hard limit on open files is 200, and 2 ranks need 260" in line
