"""Rank programs for `test_meeting`: a rank that stops while joining, and ranks that find errors."""

import os
import resource
import signal
import time
from typing import NoReturn

import torch.distributed as dist

from mlbert.cli.main import exit_code
from mlbert.distributed import rendezvous
from mlbert.distributed.lifecycle import Lifecycle
from mlbert.distributed.world import World
from mlbert.host.errors import UserError

DEADLINE = 3.0


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


def gather_and_leave() -> None:
    """Gather the hosts and exit; rank 0, whose process holds the store, has read them a second before the others."""
    world = World.identify()

    class SlowStore(dist.PrefixStore):
        def get(self, key: str) -> bytes:
            time.sleep(1.0)
            return super().get(key)

    if world.rank > 0:
        dist.PrefixStore = SlowStore
    assert world.hosts() == [world.host] * world.world_size


def start_with_few_files(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    def work() -> int:
        World.identify().start()
        return 0

    raise SystemExit(exit_code(work))
