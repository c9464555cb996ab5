"""Rendezvous of the ranks before any collective works: roll calls and shared errors.

A failed collective does not name the rank it waited for, and torch's rendezvous only counts the
ranks that joined. So the ranks take a roll call over a store: at the deadline, the first rank to
time out names the missing ones. A mistake that several ranks make is reported once. Rank 0's
process (or torchrun's agent) holds the store. If it is suspended, no call to the store returns, and
a timer ends the other ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NoReturn, TextIO, TypeVar

import torch.distributed as dist

from mlbert.distributed.address import (
    HeadAddress,
    address_towards,
    interface_of,
    is_loopback,
)
from mlbert.distributed.open_files import raise_open_files_limit
from mlbert.distributed.place import LOOPBACK, RankPlace
from mlbert.host.errors import UserError
from mlbert.host.exit_statuses import (
    FAILED,
    LOST_RANK,
    WRONG_INPUT,
    leave_report,
    quiet_on_signal,
)
from mlbert.host.standard_error import hold_back

# How long a few ranks wait for each other at start-up,
# and the number of ranks that wait twice as long.
JOIN_SECONDS = 120.0
DOUBLE_WAIT_RANKS = 1024
# A rank whose connection fails reports it at most this long after the deadline.
GRACE_SECONDS = 10.0
# How long rank 0 tries to reach its own address. Name servers may repeat for 30 s
# that a new name does not exist.
HEAD_SECONDS = 40.0
# Share of their wait after which the other ranks report that they cannot reach rank 0,
# before it reports them missing.
REACH_SHARE = 0.9
# Time for every rank to learn that one reports the error:
# launchers end all ranks when the first one exits.
HEAR_SECONDS = 1.0
# Lines about one roll call, however many ranks have different mistakes.
MOST_ERRORS = 2
_DEFECT = "distributed.failed"  # of an exception that is no `UserError`
# Between two looks at the store of a rank that waits for rank 0's work: the first, and the longest.
LOOK_SECONDS = (0.02, 2.0)
# How rank 0's work ended, in the store: it returned or made a mistake, or rank 0 is lost.
_DONE = "done"
_LOST = "lost"
# How a roll call ends if two processes have one rank, and the key of the error.
_DUPLICATE = "duplicate"
# With the number of the process, which another machine's may have, too, its name.
_PROCESS = secrets.token_hex(8)
# The key in the store of an address of a machine from which a rank reached rank 0.
_OUTSIDE = "mlbert/outside"

Result = TypeVar("Result")


class _ReportsDefect(Exception):
    """This rank is the first one that failed otherwise than by a mistake, and reports that."""


def default_join_seconds(world_size: int) -> float:
    """Return how long ranks wait for each other at start-up if JOIN_TIMEOUT is none.

    Rank 0's work, and the load on a file system from which all ranks import at once,
    grow with the number of ranks.
    """
    return JOIN_SECONDS * (1 + world_size / DOUBLE_WAIT_RANKS)


class Rendezvous:
    """One rank's side of the rendezvous. All ranks call each method together, with the same name.

    Attributes:
        join_seconds: longest wait for the other ranks in a roll call.
        read_seconds: longest wait in a collective for a rank that reads data.
    """

    def __init__(self, place: RankPlace) -> None:
        self.join_seconds = default_join_seconds(place.world_size)
        self.read_seconds = 0.0
        self._place = place
        self._store: dist.Store | None = None
        self._head = HeadAddress(place.master_addr, place.master_port)
        self._has_claimed = False  # its rank, which no other process has then
        self._own_address = ""  # of this machine, on the connection to rank 0's
        self._address = f"{place.master_addr}:{place.master_port}"
        self._stderr: TextIO | None = None  # while `hold_back` redirects the process's own

    def set_join_timeout(self, seconds: float | None) -> None:
        """Wait at most this long for the other ranks from now on (None: the default for their
        number).
        """
        self.join_seconds = (
            default_join_seconds(self._place.world_size) if seconds is None else seconds
        )

    @property
    def collective_seconds(self) -> float:
        """Longest wait in a collective, and for the connection of a group of ranks.

        A short JOIN_TIMEOUT does not shorten it: the other ranks wait in a collective while rank 0
        writes a checkpoint.
        """
        return max(JOIN_SECONDS, self.join_seconds)

    def run_all(self, name: str, work: Callable[[], Result]) -> Result:
        """Call `work`, and return its result once it has returned on all ranks.

        It may set the join timeout.

        Raises:
            UserError: on rank 0, an error of any rank;
                the same error on several ranks is reported once.
            Exception: another exception of `work`, on the first rank that has one.
            SystemExit: on the other ranks, with the same status and without a message.
        """
        place = self._place
        if place.world_size == 1:
            return work()
        mistake = None
        defect = None
        try:
            # Before the first roll call connects anything.
            raise_open_files_limit(place.world_size)
            result = work()
        except UserError as error:
            mistake = error
        except Exception as error:
            defect = error
            mistake = UserError(
                _DEFECT, f"rank {place.rank} on {place.host}", f"{type(error).__name__}: {error}"
            )
        try:
            self._call_roll(name, self.join_seconds, mistake)
        except _ReportsDefect:
            assert defect is not None, "only a rank that has one reports it"
            print(f"mlbert: error: {mistake}", file=sys.stderr, flush=True)
            raise defect from None
        return result

    def run_on_rank_0(self, name: str, work: Callable[[], Result]) -> Result:
        """Call `work` on rank 0, however long it takes, and return its JSON-able result on all
        ranks.

        Rank 0 returns last, because its process may hold the store and exit. Each name is for one
        use.

        Raises:
            UserError, SystemExit: as in `run_all`.
                The other ranks exit with LOST_RANK if rank 0 is lost or interrupted.
        """
        if self._place.world_size == 1:
            return work()
        text = self.run_all(name, lambda: self._work_or_wait(f"mlbert/work/{name}", work))
        result: Result = json.loads(self.gather(name, text)[0])
        return result

    def _work_or_wait(self, key: str, work: Callable[[], object]) -> str:
        """Return the result of rank 0's work as JSON; on the other ranks, wait until it is done and
        return an empty text.
        """
        store = self.store(self.join_seconds)
        if self._place.rank == 0:
            end = _LOST
            try:
                text = json.dumps(work())
                end = _DONE
            except Exception:
                end = _DONE  # the ranks learn of it in the roll call
                raise
            finally:
                store.set(key, end)
            return text
        try:
            with self._native_messages():
                end = _wait_for(store, key)
        except dist.DistError:  # rank 0 held the store
            end = _LOST
        if end == _LOST:
            raise SystemExit(LOST_RANK)
        return ""

    @contextlib.contextmanager
    def together(self, name: str, mistake: UserError | None = None) -> Iterator[None]:
        """Run a block of collectives for at most `collective_seconds`.

        The other ranks name a rank that hangs.

        Args:
            mistake: what a failure of torch.distributed means.
                One rank reports it, and nothing else is printed.

        Raises:
            UserError, SystemExit: as in `run_all`.
                If no rank is missing, the mistake or the block's own error is raised.
        """
        if self._place.world_size == 1:
            yield
            return
        seconds = self.collective_seconds
        begun = time.monotonic()
        failure = None
        try:
            with self._deadline(seconds + 3 * GRACE_SECONDS), self._native_messages():
                yield
        except (RuntimeError, OSError) as error:  # all failures of torch.distributed
            failure = error
        left = max(seconds - (time.monotonic() - begun), 0.0)
        try:
            self._call_roll(name, left + GRACE_SECONDS, mistake if failure is not None else None)
        except (UserError, SystemExit) as end:
            if failure is not None:
                _end_now(end)
            raise
        if failure is not None:
            raise failure

    @contextlib.contextmanager
    def _native_messages(self) -> Iterator[None]:
        """Print what native code writes to standard error after the block, and not if
        torch.distributed fails in it.
        """
        with hold_back() as held:
            self._stderr = held.terminal
            try:
                yield
            except (RuntimeError, OSError):
                held.drop()
                raise
            finally:
                self._stderr = None

    def is_first(self, name: str) -> bool:
        """Return True on the first rank that calls this with a name: the one that prints a warning
        which other ranks may have, too. Any number of ranks may call it, once all have joined.
        """
        if self._place.world_size == 1:
            return True
        rank = str(self._place.rank)
        try:
            firsts = dist.PrefixStore("mlbert/first", self.store(GRACE_SECONDS))
            return firsts.compare_set(name, "", rank) == rank.encode()
        except dist.DistError:  # rank 0 has gone, so the run ends
            return False

    def gather(self, name: str, text: str) -> list[str]:
        """Return the text of each rank, in rank order; the same list on every rank.

        Each name is for one use.

        Rank 0 reads the texts and publishes them as one value, so that each rank makes a constant
        number of requests. It returns last, because its process may hold the store and exit.
        """
        seconds = self.collective_seconds
        texts = dist.PrefixStore(f"mlbert/gather/{name}", self.store(seconds))
        texts.set(str(self._place.rank), text)
        if self._place.rank == 0:
            ranks = [str(rank) for rank in range(self._place.world_size)]
            texts.wait(ranks, timedelta(seconds=seconds))
            texts.set("all", json.dumps([one.decode() for one in texts.multi_get(ranks)]))
        texts.wait(["all"], timedelta(seconds=seconds))
        everyone = json.loads(texts.get("all"))
        if texts.add("readers", 1) == self._place.world_size:
            texts.set("end", "")
        if self._place.rank == 0:
            texts.wait(["end"], timedelta(seconds=seconds))
        return everyone

    def store(self, seconds: float) -> dist.Store:
        """Return the store over which the ranks find each other;
        it holds the host of each rank that joined.

        Raises:
            UserError: rank 0's address is wrong.
            SystemExit: the same, and another rank reports it.
        """
        if self._store is None:
            is_head = self._place.rank == 0 and not self._place.has_agent
            self._store = self._open_own(seconds) if is_head else self._join_head(seconds)
            self._store.set(_host_key(self._place.rank), self._place.host)
            if not is_loopback(self._own_address):
                self._store.compare_set(_OUTSIDE, "", self._own_address)
        return self._store

    def text_of_rank_0(self, name: str, text: str) -> str:
        """Return rank 0's text on every rank. Within the work of `run_all`, where rank 0 calls it
        first, each name for one use.

        If rank 0 is lost, return this rank's own, since the roll call names rank 0.
        """
        place = self._place
        if place.world_size == 1:
            return text
        store = self.store(self.join_seconds)
        key = f"mlbert/rank_0/{name}"
        if place.rank == 0:
            store.set(key, text)
            return text
        try:
            store.wait([key], timedelta(seconds=self.join_seconds))
            return store.get(key).decode()
        except dist.DistError:
            return text

    def address(self) -> str | None:
        """Return this machine's address at which the other ranks reach it; None without a route to
        them. All ranks have joined.

        A host's own name may resolve to an address that the others cannot reach. Then rank 0's
        machine uses the route to another one that did reach it.
        """
        store = self.store(GRACE_SECONDS)
        if is_loopback(self._own_address) and store.check([_OUTSIDE]):
            return address_towards(store.get(_OUTSIDE).decode())
        return self._own_address

    def interface(self) -> str | None:
        """Return the network interface that leads to the other ranks; None if it has no name.

        All ranks have joined.
        """
        address = self.address()
        return None if address is None else interface_of(address)

    def _open_own(self, seconds: float) -> dist.Store:
        """Open rank 0's store, and check that the address at which the other ranks look for it
        leads here.
        """
        try:
            store = self._connect_store(LOOPBACK, seconds, is_master=True)
        except dist.DistError as error:
            raise self._head.port_error() from error
        own_address = self._head.reach(min(seconds, HEAD_SECONDS))
        if own_address is None:
            raise self._head.wrong_address()
        self._own_address = own_address
        return store

    def _join_head(self, seconds: float) -> dist.Store:
        """Connect to the store that rank 0, or torchrun's agent, holds."""
        place = self._place
        with quiet_on_signal():
            own_address = self._head.reach(REACH_SHARE * seconds)
        if own_address is not None:
            self._own_address = own_address
            with self._native_messages():
                return self._connect_store(place.master_addr, seconds)
        # Rank 0 reports what it notices itself: anything but its own absence.
        is_on_its_node = 0 < place.rank < place.local_world_size
        is_absent = place.rank == 1 and self._head.is_local()
        if is_absent or (place.local_rank == 0 and not is_on_its_node):
            time.sleep(HEAR_SECONDS if place.rank > 1 else 0)
            raise self._join_error(f"rank {place.rank} on {place.host}: {self._head.obstacle}")
        return leave_report(2 * HEAR_SECONDS)

    def _connect_store(self, host: str, seconds: float, is_master: bool = False) -> dist.Store:
        return dist.TCPStore(
            host,
            self._place.master_port,
            self._place.world_size,
            is_master=is_master,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )

    def _call_roll(self, name: str, seconds: float, mistake: UserError | None = None) -> None:
        place = self._place
        errors: list[UserError] = []
        with self._deadline(seconds + GRACE_SECONDS):
            try:
                calls = dist.PrefixStore(f"mlbert/{name}", self.store(seconds))
                self._claim_rank(calls)
                is_defect = mistake is not None and mistake.code == _DEFECT
                calls.set(str(place.rank), _serialized(mistake))
                calls.add("mistakes", int(mistake is not None))
                is_first_defect = calls.add("defects", int(is_defect)) == 1 and is_defect
                if (
                    calls.add("arrivals", 1) == place.world_size
                ):  # each rank waits for one key instead of one per rank
                    kinds = [kind for kind in ("defects", "mistakes") if calls.add(kind, 0)]
                    calls.compare_set("end", "", kinds[0] if kinds else "all")
                end, missing = self._wait(calls, seconds)
                if missing:
                    # A connection that failed is the consequence of a missing rank.
                    is_cause = mistake is not None and mistake.code != "distributed.join"
                    errors = [mistake if mistake and is_cause else self._join_error(missing)]
                elif end == b"mistakes" and place.rank == 0:
                    errors = self._mistakes(calls)
                elif end == _DUPLICATE.encode() and place.rank == 0:
                    errors = [_parsed(calls.get(_DUPLICATE).decode())]
                elif end == b"defects" and is_first_defect:
                    raise _ReportsDefect
            except dist.DistError as error:
                if not self._reports_alone:
                    leave_report(2 * HEAR_SECONDS)
                reason = (
                    f"rank {place.rank} of {place.world_size} could not join: "
                    f"{str(error).splitlines()[0]}"
                )
                raise mistake or self._join_error(reason) from error
        if errors:
            time.sleep(HEAR_SECONDS)
            for other in errors[:-1]:
                print(f"mlbert: error: {other.as_line()}", file=sys.stderr)
            errors[-1].is_agreed = True
            raise errors[-1]
        if end != b"all":
            leave_report(2 * HEAR_SECONDS, FAILED if end == b"defects" else WRONG_INPUT)

    def _claim_rank(self, calls: dist.Store) -> None:
        """Let rank 0 report it if another process has joined with this rank, and end this one.

        Raises:
            UserError: the same, after the roll call has ended.
            SystemExit: rank 0 reports it.
        """
        if self._has_claimed:
            return
        place = self._place
        own = f"{_PROCESS}-{os.getpid()} {place.host}"
        first = self.store(GRACE_SECONDS).compare_set(_process_key(place.rank), "", own).decode()
        self._has_claimed = first == own
        if self._has_claimed:
            return
        _, _, host = first.partition(" ")
        problem = f"is the rank of two processes, on {host} and on {place.host}"
        remedy = "Give each process a different rank, from 0 to their number minus 1"
        mistake = UserError("distributed.identity", f"rank {place.rank}", problem, remedy)
        calls.set(_DUPLICATE, _serialized(mistake))
        if calls.compare_set("end", "", _DUPLICATE).decode() != _DUPLICATE:
            raise mistake
        leave_report(2 * HEAR_SECONDS)

    def _wait(self, calls: dist.Store, seconds: float) -> tuple[bytes, str]:
        """Return how the roll call ended.

        The first rank to time out ends it, and also gets the missing ranks.
        """
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
        missing = [rank for rank in range(self._place.world_size) if not calls.check([str(rank)])]
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
        """Return the errors of all ranks, each one once, and at most `MOST_ERRORS`: the last one
        then says how many ranks have others.
        """
        ranks = [str(rank) for rank in range(self._place.world_size)]
        packed = [content.decode() for content in calls.multi_get(ranks)]
        found: dict[str, UserError] = {}
        others = list[int]()  # ranks
        for rank, content in enumerate(packed):
            if not content:
                continue
            error = _parsed(content)
            # Ranks that cannot connect to each other describe one failure, each from its own side.
            kind = error.code if error.code == "distributed.join" else content
            if kind in found:
                continue
            if len(found) == MOST_ERRORS:
                others.append(rank)
                continue
            place = f"rank {rank} on {self._host(rank)}: " if rank else ""
            found[kind] = UserError(
                error.code, place + error.subject, error.problem, error.remedy, error.choices
            )
        *errors, last = found.values()
        if others:
            words = f"{last.problem}. Ranks with yet other errors: {len(others)}"
            last = UserError(last.code, last.subject, words, last.remedy, last.choices)
        return [*errors, last]

    def _join_error(self, reason: str) -> UserError:
        return UserError(
            "distributed.join",
            self._address,
            reason,
            "Check that every rank runs, and that MASTER_ADDR "
            "and MASTER_PORT name a free port of rank 0's machine; if "
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

    @property
    def _reports_alone(self) -> bool:
        """True on the ranks that report a failure if the ranks have no store,
        over which they agree on one.
        """
        return self._place.rank == 1 or self._place.local_rank == 0

    def _give_up(self, seconds: float) -> NoReturn:
        if self._reports_alone:
            reason = (
                f"rank 0 has not answered for {seconds:.0f} s: it hangs or its machine is cut off"
            )
            if self._store is None and not self._own_address:
                reason = f"rank {self._place.rank} on {self._place.host}: {self._head.obstacle}"
            error = self._join_error(reason)
            terminal = self._stderr or sys.stderr
            print(f"mlbert: error: {error.as_line()}", file=terminal, flush=True)
        else:
            time.sleep(HEAR_SECONDS)
        os._exit(WRONG_INPUT)


def _wait_for(store: dist.Store, key: str) -> str:
    """Return a value that the store gets later, however much later."""
    pause, longest = LOOK_SECONDS
    while not store.check([key]):
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return store.get(key).decode()


def _end_now(end: UserError | SystemExit) -> NoReturn:
    """End this process without destroying the group that failed to connect, which may hang."""
    if isinstance(end, UserError):
        print(f"mlbert: error: {end.as_line()}", file=sys.stderr, flush=True)
    os._exit(WRONG_INPUT)


def _host_key(rank: int) -> str:
    return f"mlbert/host_{rank}"


def _process_key(rank: int) -> str:
    return f"mlbert/process_{rank}"


def _parsed(content: str) -> UserError:
    """Return the error that `_serialized` wrote."""
    code, subject, problem, remedy, choices = json.loads(content)
    return UserError(code, subject, problem, remedy, choices)


def _serialized(mistake: UserError | None) -> str:
    """Return the parts of an error as JSON, or an empty text without one."""
    if mistake is None:
        return ""
    parts = [mistake.code, mistake.subject, mistake.problem, mistake.remedy, mistake.choices]
    return json.dumps(parts)
