"""Rendezvous of the ranks before any collective works: roll calls, shared errors, and the limit on open files.

A failed collective does not name the rank it waited for, and torch's rendezvous only counts the ranks that joined. So
the ranks take a roll call over a store: at the deadline, the first rank to time out names the missing ones. A mistake
that several ranks make is reported once. Rank 0's process (or torchrun's agent) holds the store. If it is suspended, no
call to the store returns, and a timer ends the other ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, TypeVar

import torch.distributed as dist

from mlbert.distributed.lifecycle import WRONG_INPUT
from mlbert.host.errors import UserError

if TYPE_CHECKING:
    from mlbert.distributed.world import World

# Rank 0 has two connections to each rank: for the store and the watch. The other ranks have one of each, but get the
# same limit, so that all ranks report the same mistake, which is printed once.
CONNECTIONS_PER_RANK = 2
OTHER_FILES = 256  # data, logs, libraries, devices and NCCL's sockets


def raise_open_files_limit(world_size: int) -> None:
    """Raise the soft limit on open files (`ulimit -n`) to what a run of ``world_size`` ranks needs.

    The limit is never lowered. If the hard limit allows it, it becomes twice the need, because further groups of ranks
    open more connections.

    Raises:
        UserError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    needed = CONNECTIONS_PER_RANK * world_size + OTHER_FILES
    if needed > most:
        reason = f"the hard limit on open files is {hard}, and {world_size} ranks need {needed}"
        remedy = "Raise it on every node (LimitNOFILE of slurmd, --ulimit nofile of docker)"
        raise UserError("machine.open-files", "ulimit -n", reason, remedy)
    limit = min(2 * needed, most)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


# How long a few ranks wait for each other at start-up, and the number of ranks that wait twice as long.
JOIN_SECONDS = 120.0
DOUBLE_WAIT_RANKS = 1024
# A rank whose connection fails reports it at most this long after the deadline.
GRACE_SECONDS = 10.0
# Time for every rank to learn that one reports the error: launchers end all ranks when the first one exits.
HEAR_SECONDS = 1.0

Result = TypeVar("Result")


def default_join_seconds(world_size: int) -> float:
    """Return how long ranks wait for each other at start-up if JOIN_TIMEOUT is none.

    Rank 0's work, and the load on a file system from which all ranks import at once, grow with the number of ranks.
    """
    return JOIN_SECONDS * (1 + world_size / DOUBLE_WAIT_RANKS)


class Rendezvous:
    """One rank's side of the rendezvous. All ranks call each method together, with the same name.

    Attributes:
        join_seconds: longest wait for the other ranks in a roll call.
    """

    def __init__(self, world: World) -> None:
        self.join_seconds = default_join_seconds(world.world_size)
        self._world = world
        self._store: dist.Store | None = None
        self._place = f"{world.master_addr}:{world.master_port}"

    def set_join_timeout(self, seconds: float | None) -> None:
        """Wait at most this long for the other ranks from now on (None: the default for their number)."""
        self.join_seconds = (
            default_join_seconds(self._world.world_size) if seconds is None else seconds
        )

    @property
    def collective_seconds(self) -> float:
        """Longest wait in a collective, and for the connection of a group of ranks.

        A short JOIN_TIMEOUT does not shorten it: the other ranks wait in a collective while rank 0 writes a checkpoint.
        """
        return max(JOIN_SECONDS, self.join_seconds)

    def run_all(self, name: str, work: Callable[[], Result]) -> Result:
        """Call `work`, and return its result once it has returned on all ranks. It may set the join timeout.

        Raises:
            UserError: on rank 0, an error of any rank; the same error on several ranks is reported once.
            SystemExit: on the other ranks, with WRONG_INPUT and without a message.
        """
        if self._world.world_size == 1:
            return work()
        mistake = None
        try:
            raise_open_files_limit(
                self._world.world_size
            )  # before the first roll call connects anything
            result = work()
        except UserError as error:
            mistake = error
        self._call_roll(name, self.join_seconds, mistake)
        return result

    @contextlib.contextmanager
    def together(self, name: str) -> Iterator[None]:
        """Run a block of collectives for at most `collective_seconds`. The other ranks name a rank that hangs.

        Raises:
            UserError, SystemExit: as in `run_all`. If no rank is missing, the block's own error is raised.
        """
        if self._world.world_size == 1:
            yield
            return
        seconds, begun, failure = self.collective_seconds, time.monotonic(), None
        try:
            with self._deadline(seconds + 3 * GRACE_SECONDS):
                yield
        except (RuntimeError, OSError) as error:  # all failures of torch.distributed
            failure = error
        self._call_roll(name, max(seconds - (time.monotonic() - begun), 0.0) + GRACE_SECONDS)
        if failure is not None:
            raise failure

    def gather(self, name: str, text: str) -> list[str]:
        """Return the text of each rank, in rank order; the same list on every rank. Each name is for one use.

        Rank 0 reads the texts and publishes them as one value, so that each rank makes a constant number of requests.
        It returns last, because its process may hold the store and exit.
        """
        seconds = self.collective_seconds
        texts = dist.PrefixStore(f"mlbert/gather/{name}", self.store(seconds))
        texts.set(str(self._world.rank), text)
        if self._world.rank == 0:
            ranks = [str(rank) for rank in range(self._world.world_size)]
            texts.wait(ranks, timedelta(seconds=seconds))
            texts.set("all", json.dumps([one.decode() for one in texts.multi_get(ranks)]))
        texts.wait(["all"], timedelta(seconds=seconds))
        everyone = json.loads(texts.get("all"))
        if texts.add("readers", 1) == self._world.world_size:
            texts.set("end", "")
        if self._world.rank == 0:
            texts.wait(["end"], timedelta(seconds=seconds))
        return everyone

    def store(self, seconds: float) -> dist.Store:
        """Return the store over which the ranks find each other; it holds the host of each rank that joined."""
        if self._store is None:
            world = self._world
            self._store = dist.TCPStore(
                world.master_addr,
                world.master_port,
                world.world_size,
                is_master=world.rank == 0 and not world.has_agent,
                timeout=timedelta(seconds=seconds),
                wait_for_workers=False,
                multi_tenant=True,
            )
            self._store.set(_host_key(world.rank), world.host)
        return self._store

    def _call_roll(self, name: str, seconds: float, mistake: UserError | None = None) -> None:
        world, errors = self._world, None
        with self._deadline(seconds + GRACE_SECONDS):
            try:
                calls = dist.PrefixStore(f"mlbert/{name}", self.store(seconds))
                calls.set(str(world.rank), _serialized(mistake))
                calls.add("mistakes", int(mistake is not None))
                if (
                    calls.add("arrivals", 1) == world.world_size
                ):  # each rank waits for one key instead of one per rank
                    calls.compare_set("end", "", "mistakes" if calls.add("mistakes", 0) else "all")
                end, missing = self._wait(calls, seconds)
                if missing:
                    errors = [mistake or self._join_error(missing)]
                elif end == b"mistakes" and world.rank == 0:
                    errors = self._mistakes(calls)
            except dist.DistError as error:
                reason = f"rank {world.rank} of {world.world_size} could not join: {str(error).splitlines()[0]}"
                raise mistake or self._join_error(reason) from error
        if errors:
            time.sleep(HEAR_SECONDS)
            for other in errors[:-1]:
                print(f"mlbert: error: {other.as_line()}", file=sys.stderr)
            raise errors[-1]
        if end != b"all":
            # The launcher sends SIGTERM once the reporting rank has exited. Ignore it and exit with the same status.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(2 * HEAR_SECONDS)
            raise SystemExit(WRONG_INPUT)

    def _wait(self, calls: dist.Store, seconds: float) -> tuple[bytes, str]:
        """Return how the roll call ended. The first rank to time out ends it, and also gets the missing ranks."""
        try:
            calls.wait(["end"], timedelta(seconds=seconds))
        except dist.DistStoreError:
            if calls.add("reporters", 1) == 1:
                missing = self._missing(calls, seconds)
                end = calls.compare_set("end", "", "missing")
                return end, missing if end == b"missing" else ""
        return calls.get("end"), ""

    def _missing(self, calls: dist.Store, seconds: float) -> str:
        """Describe the ranks that have not answered the roll call."""
        missing = [rank for rank in range(self._world.world_size) if not calls.check([str(rank)])]
        hosts = {rank: self._host(rank) for rank in missing}
        absent = ", ".join(str(rank) for rank in missing if not hosts[rank])
        lost = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in missing if hosts[rank])
        parts = [f"rank {absent} did not join within {seconds:.0f} s"] if absent else []
        return "; ".join(
            [*parts, f"{lost} joined, then hung or died ({seconds:.0f} s)"] if lost else parts
        )

    def _host(self, rank: int) -> str:
        """Return a rank's host; empty if it has not joined."""
        store = self.store(GRACE_SECONDS)
        return (
            store.get(_host_key(rank)).decode(errors="replace")
            if store.check([_host_key(rank)])
            else ""
        )

    def _mistakes(self, calls: dist.Store) -> list[UserError]:
        """Return the errors of all ranks, each one once."""
        found: dict[str, UserError] = {}
        for rank in range(self._world.world_size):
            packed = calls.get(str(rank)).decode()
            if packed and packed not in found:
                code, subject, problem, remedy = json.loads(packed)
                place = f"rank {rank} on {self._host(rank)}: " if rank else ""
                found[packed] = UserError(code, place + subject, problem, remedy)
        return list(found.values())

    def _join_error(self, reason: str) -> UserError:
        return UserError(
            "distributed.join",
            self._place,
            reason,
            "Check that every rank runs, and that MASTER_ADDR and MASTER_PORT name a free port of rank 0's machine; if "
            "the ranks just start slowly, raise JOIN_TIMEOUT",
        )

    @contextlib.contextmanager
    def _deadline(self, seconds: float) -> Iterator[None]:
        """End this process if the block takes longer, because the store never answers."""
        timer = threading.Timer(seconds, self._give_up, (seconds,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self, seconds: float) -> NoReturn:
        # Without the store the ranks cannot agree on who reports it.
        if self._world.rank == 1 or self._world.local_rank == 0:
            error = self._join_error(
                f"rank 0 has not answered for {seconds:.0f} s: it hangs or its machine is cut off"
            )
            print(f"mlbert: error: {error.as_line()}", file=sys.stderr, flush=True)
        else:
            time.sleep(HEAR_SECONDS)
        os._exit(WRONG_INPUT)


def _host_key(rank: int) -> str:
    return f"mlbert/host_{rank}"


def _serialized(mistake: UserError | None) -> str:
    return (
        json.dumps([mistake.code, mistake.subject, mistake.problem, mistake.remedy])
        if mistake
        else ""
    )
