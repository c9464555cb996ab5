"""Health monitors of several ranks in one process:
real threads and sockets, and processes that end only in name.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import NoReturn
from unittest.mock import Mock

import pytest

from mlbert.distributed import health
from mlbert.distributed.channel import Channel
from mlbert.distributed.health import HealthMonitor
from mlbert.distributed.stages import Stage
from mlbert.host.errors import UserError
from user_errors import user_error

WAIT_SECONDS = 30.0  # for what must happen
PERIOD = 0.1
CAUSE = 0.6
# `end` leaves a watching thread by an exception here, and no process.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
WRONG = UserError("data.damaged", "x.hdf5", "is damaged", "Restore it")
CLOSED = RuntimeError("connection closed")


class Ranks:
    """Ranks of one run as threads; rank 0 is on host h0.

    Attributes:
        reports: (rank, sentence, whether it is printed), in the order of the calls.
        ended, mistaken: the ranks whose watching thread has ended the process,
            and those of them with wrong input.
        times: of the reports.
    """

    def __init__(self, hosts: list[str], hang_seconds: float = 1000.0) -> None:
        self.reports: list[tuple[int, str, bool]] = []
        self.times: list[float] = []
        self.ended: set[int] = set()
        self.mistaken: set[int] = set()
        self.changed = threading.Condition()
        # Equal names are not the same object.
        self._hosts = [host.encode().decode() for host in hosts]
        self.monitors = [self._monitor(rank, hang_seconds) for rank in range(len(hosts))]
        for rank in range(1, len(hosts)):
            here, there = socket.socketpair()
            self.monitors[0].world.channels[rank] = Channel(here)
            self.monitors[rank].world.channels[0] = Channel(there)

    def _monitor(self, rank: int, hang_seconds: float) -> HealthMonitor:
        meeting = SimpleNamespace(together=lambda name: contextlib.nullcontext())
        size = len(self._hosts)
        world = SimpleNamespace(
            rank=rank, world_size=size, host=self._hosts[rank], rendezvous=meeting, channels={}
        )
        world.hosts = lambda: self._hosts
        return HealthMonitor(
            world,
            lambda *words: self._report(rank, *words),
            lambda is_mistake: self._end(rank, is_mistake),
            hang_seconds,
        )

    def _report(self, rank: int, sentence: str, aloud: bool) -> None:
        with self.changed:
            self.reports.append((rank, sentence, aloud))
            self.times.append(time.monotonic())

    def _end(self, rank: int, is_mistake: bool) -> NoReturn:
        with self.changed:
            self.ended.add(rank)
            self.mistaken |= {rank} if is_mistake else set()
            self.changed.notify_all()
        self.die(rank)
        raise SystemExit

    def die(self, rank: int) -> None:
        """Close a rank's connections as the end of its process would, without a farewell."""
        monitor = self.monitors[rank]
        monitor._stopping.set()
        if monitor._thread is not None and threading.current_thread() is not monitor._thread:
            monitor._thread.join()
        for channel in monitor._channels.values():
            channel._connection.close()

    def connected_head(self) -> HealthMonitor:
        """Return the monitor of rank 0 after step 4, connected, without a watching thread."""
        head = self.monitors[0]
        head._hosts = head.world.hosts()
        head._channels = head.world.channels
        head.mark(4, Stage.REDUCE)
        return head

    def wait_for_end(self, rank: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: rank in self.ended, WAIT_SECONDS), (
                self.ended,
                self.reports,
            )

    def run(
        self, bodies: dict[int, Callable[[], object]], absent: int | None = None
    ) -> dict[int, BaseException]:
        """Run each rank's main thread after step 4, and return what left them.

        Without a body, it waits for its end.
        """
        together = threading.Barrier(len(self._hosts) - (absent is not None))
        left = {}

        def be_rank(rank: int) -> None:
            monitor = self.monitors[rank]
            try:
                with monitor.guard():
                    monitor.mark(3, Stage.READ)
                    monitor.mark(4, Stage.REDUCE)
                    together.wait(WAIT_SECONDS)
                    bodies.get(rank, lambda: self.wait_for_end(rank))()
            except BaseException as error:
                left[rank] = error
            self.die(rank)

        threads = [
            threading.Thread(target=be_rank, args=[n])
            for n in range(len(self._hosts))
            if n != absent
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_SECONDS)
        assert not any(
            isinstance(error, AssertionError | threading.BrokenBarrierError)
            for error in left.values()
        )
        return left


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (
        ("PERIOD", PERIOD),
        ("LOOK", 0.02),
        ("CAUSE", CAUSE),
        ("HEAD_START", 0.2),
    ):
        monkeypatch.setattr(health, f"{name}_SECONDS", seconds)
    monkeypatch.setattr(health, "connect", lambda world: world.channels)


def fail(error: BaseException) -> Mock:
    return Mock(side_effect=error)


def test_a_dead_rank_is_reported_once_by_rank_0():
    ranks = Ranks(["h0", "h0", "h1", "h2"])
    assert ranks.run({2: lambda: ranks.die(2)}) == {}
    assert ranks.reports == [(0, "rank 2 on h1 died after step 4", True)]
    assert ranks.ended == {0, 1, 3}


def test_a_dead_rank_0_is_reported_by_rank_1_and_then_by_another_machine():
    ranks = Ranks(["h0", "h0", "h0", "h1", "h1"])
    ranks.run({0: lambda: ranks.die(0)})
    assert ranks.reports == [(rank, "rank 0 on h0 died after step 4", True) for rank in (1, 3)]
    assert ranks.times[1] - ranks.times[0] > PERIOD / 2
    assert ranks.ended == {1, 2, 3, 4}


def test_of_what_arrives_at_once_a_death_is_the_cause():
    ranks = Ranks(["h0", "h1", "h2"])
    head = ranks.connected_head()
    _, failing, dying = ranks.monitors
    failing.world.channels[0].send(
        failed="rank 1 on h1 failed: reset", is_cause=True, is_mistake=False
    )
    dying.world.channels[0]._connection.close()
    with pytest.raises(SystemExit):
        head._watch_ranks()
    assert ranks.reports == [(0, "rank 2 on h2 died after step 4", True)]


def test_no_rank_is_silent_or_hangs_while_a_failure_waits_for_its_cause():
    ranks = Ranks(["h0", "h1"], hang_seconds=0.0)
    head = ranks.connected_head()
    head._suspicion = (time.monotonic() + PERIOD, "rank 1 on h1 failed", False)
    with pytest.raises(SystemExit):
        head._watch_ranks()
    assert ranks.reports == [(0, "rank 1 on h1 failed", True)]


def test_a_suspended_rank_0_calls_nobody_silent(monkeypatch):
    ranks = Ranks(["h0", "h1"], hang_seconds=0.3)
    head = ranks.connected_head()

    def look(_: health._OwnPresence) -> bool:
        time.sleep(0.5)
        head._stopping.set()  # this cycle is the last one
        return True

    monkeypatch.setattr(health._OwnPresence, "look", look)
    head._watch_ranks()
    assert ranks.reports == []


@pytest.mark.parametrize(
    ("rank", "error", "cause", "aloud"),
    [
        (0, ValueError("record 17 is\ndamaged."), "ValueError: record 17 is damaged", True),
        (1, ValueError(), "ValueError", True),
        (0, WRONG, WRONG.as_line(), False),  # the command line prints it
        (1, WRONG, None, True),  # rank 0 makes the same mistake
        (0, CLOSED, None, True),
        (1, CLOSED, None, True),
        (1, SystemExit(143), None, True),
    ],
)
def test_a_failure_that_another_rank_probably_caused_waits_for_the_cause(rank, error, cause, aloud):
    ranks = Ranks(["h0", "h1", "h2"])
    left = ranks.run({rank: fail(error), 2: lambda: (time.sleep(CAUSE / 4), ranks.die(2))})
    assert left[rank] is error
    story = (
        f"rank {rank} on h{rank} failed after step 4: {cause}"
        if cause
        else "rank 2 on h2 died after step 4"
    )
    assert ranks.reports == [(0, story, aloud)]


@pytest.mark.parametrize(("rank", "error"), [(0, CLOSED), (1, CLOSED), (1, WRONG)])
def test_a_failed_collective_or_mistake_without_another_cause_is_reported(rank, error):
    ranks = Ranks(["h0", "h1", "h2"])
    ranks.run({rank: fail(error)})
    words = WRONG.as_line() if error is WRONG else "RuntimeError: connection closed"
    assert ranks.reports == [(0, f"rank {rank} on h{rank} failed after step 4: {words}", True)]
    # The main thread of the rank that failed prints its traceback, so its other thread does not end
    # the process.
    printing = {rank} - {0} if error is not WRONG else set()
    assert ranks.ended == {0, 1, 2} - printing
    assert ranks.mistaken == (ranks.ended if error is WRONG else set())


def test_a_failure_before_the_first_step():
    ranks = Ranks(["h0", "h1"])
    ranks.monitors[1].mark = lambda step, stage: None
    ranks.run({1: fail(ValueError())})
    assert ranks.reports == [(0, "rank 1 on h1 failed after step 0: ValueError", True)]


@pytest.mark.parametrize(("error", "times"), [(CLOSED, 2), (WRONG, 1)])
def test_a_signal_during_the_wait_for_a_cause_is_reported_too(error, times):
    monitor = Ranks(["h0"]).monitors[0]
    monitor._report_failure = Mock(side_effect=[KeyboardInterrupt, None])
    with pytest.raises(KeyboardInterrupt), monitor.guard():
        raise error
    assert monitor._report_failure.call_count == times


def test_monitoring_that_cannot_start(monkeypatch):
    monkeypatch.setattr(health, "connect", fail(OSError("refused")))
    with user_error("distributed.join", "rank 1 on h1"), Ranks(["h0", "h1"]).monitors[1].guard():
        pass


def test_a_signal_to_rank_0_ends_the_others_without_a_report():
    ranks = Ranks(["h0", "h1", "h2"])
    ranks.run({0: fail(KeyboardInterrupt())})
    assert (ranks.reports, ranks.ended) == ([], {1, 2})


@pytest.mark.parametrize("seconds", [0.0, CAUSE / 2])
def test_ranks_that_fail_because_of_the_same_signal_exit_once_rank_0_has_logged_it(seconds):
    """Nothing is reported. Launchers kill rank 0 when another rank exits."""
    ranks = Ranks(["h0", "h1", "h2"])
    early = set[int]()

    def log_signal() -> None:
        time.sleep(seconds)
        early.update(ranks.ended)
        ranks.monitors[0].take_signal()
        ranks.wait_for_end(2)
        time.sleep(CAUSE)

    ranks.run({0: log_signal, 1: fail(RuntimeError("closed"))})
    assert (early, ranks.ended, ranks.reports) == (set(), {1, 2}, [])


def test_ranks_that_finish_are_not_reported():
    ranks = Ranks(["h0", "h1", "h2"])
    done = {rank: lambda rank=rank: time.sleep(rank * 2 * PERIOD) for rank in range(3)}
    assert ranks.run(done) == {}
    assert (ranks.reports, ranks.ended) == ([], set())


def test_a_rank_alone_is_not_monitored():
    alone = Ranks(["h0"])
    error = ValueError()
    assert alone.run({0: fail(error)}) == {0: error}
    assert (alone.monitors[0].joined, alone.reports) == (False, [])


def test_a_hanging_rank_is_reported():
    ranks = Ranks(["h0", "h1", "h2"], hang_seconds=2.0)
    ranks.run({1: lambda: (ranks.monitors[1].mark(4, Stage.COMPUTE), ranks.wait_for_end(1))})
    ((rank, story, _),) = ranks.reports
    assert (rank, story[: story.index(",")]) == (0, "rank 1 on h1 hangs after step 4 (COMPUTE")


@pytest.mark.parametrize("stage", [Stage.READ, Stage.CHECKPOINT])
def test_a_silent_rank_0_is_reported_unless_this_rank_is_in_a_long_stage(stage):
    ranks = Ranks(["h0", "h1"], hang_seconds=0.3)
    ranks.run({1: lambda: (ranks.monitors[1].mark(5, stage), time.sleep(1.5))}, absent=0)
    expected = ["rank 0 on h0 is silent after step 5 (1 s)"] if stage == Stage.READ else []
    assert [story for _, story, _ in ranks.reports] == expected


@pytest.mark.parametrize(
    ("stages", "pause", "longest", "heard", "story"),
    [
        ("REDUCE COMPUTE REDUCE", 24, 0, 0, None),
        ("REDUCE COMPUTE REDUCE", 26, 0, 0, "rank 1 on h1 hangs after step 5 (COMPUTE, 26 s)"),
        ("REDUCE COMPUTE REDUCE", 39, 4, 0, None),
        ("REDUCE COMPUTE REDUCE", 41, 4, 0, "rank 1 on h1 hangs after step 5 (COMPUTE, 41 s)"),
        ("READ READ READ", 899, 0, 0, None),
        ("COMPUTE READ REDUCE", 899, 0, 0, None),
        (
            "COMPUTE READ REDUCE",
            901,
            0,
            0,
            "no data for 901 s after step 5: rank 1 on h1 waits in READ",
        ),
        (
            "READ READ_AHEAD REDUCE",
            901,
            0,
            0,
            "no data for 901 s after step 5: rank 0 on h0, rank 1 on h1 wait in READ",
        ),
        ("COMPUTE PREPARE_EPOCH REDUCE", 599, 0, 0, None),
        ("COMPUTE READ CHECKPOINT", 599, 0, 0, None),
        (
            "COMPUTE READ CHECKPOINT",
            601,
            0,
            0,
            "rank 2 on h2 hangs after step 5 (CHECKPOINT, 601 s)",
        ),
        ("COMPUTE READ REDUCE", 0, 0, 24, None),
        ("COMPUTE READ REDUCE", 0, 0, 26, "rank 2 on h2 is silent after step 5 (26 s)"),
        ("SETUP READ REDUCE", 0, 0, 599, None),
        ("SETUP READ REDUCE", 0, 0, 601, "rank 2 on h2 is silent after step 5 (601 s)"),
    ],
)
@pytest.mark.parametrize("in_first_step", [False, True])
def test_limits(stages, pause, longest, heard, story, in_first_step):
    ranks = Ranks(["h0", "h1", "h2"], health.HANG_SECONDS)
    monitor = ranks.monitors[0]
    now = time.monotonic()
    monitor._hosts = ["h0", "h1", "h2"]
    monitor.mark(5 if in_first_step else 4, Stage.READ)
    peers = [
        health._Peer(n, health._Place(5, Stage[name]), now - pause)
        for n, name in enumerate(stages.split())
    ]
    peers[2].heard = now - heard
    with contextlib.suppress(SystemExit):
        monitor._check_hang(peers[0], peers[1:], health._Pauses(longest))
    expected = [] if story is None or (in_first_step and 25 < pause < 600) else [(0, story, True)]
    assert ranks.reports == expected


def test_a_stall_of_the_storage_is_printed_once_at_its_begin_and_end():
    warnings: list[str] = []
    monitor = Ranks(["h0", "h1"], health.HANG_SECONDS).monitors[0]
    monitor._warn = warnings.append
    monitor._hosts = ["h0"] + ["h1"] * 6
    monitor.mark(4, Stage.READ)
    begun = time.monotonic() - 30
    peers = [health._Peer(n, health._Place(5, Stage.READ), begun) for n in range(7)]
    pauses = health._Pauses()
    for _ in range(3):
        monitor._check_hang(peers[0], peers[1:], pauses)
    others = "rank 0 on h0, rank 1 on h1, rank 2 on h1, rank 3 on h1, 3 more wait in READ"
    begin = (
        f"no data for 30 s after step 5: {others}. "
        "The run waits for up to 15 minutes (READ_TIMEOUT)"
    )
    assert warnings == [begin]
    for peer in peers:
        peer.is_at(health._Place(5, Stage.COMPUTE))
    monitor._check_hang(peers[0], peers[1:], pauses)
    monitor._check_hang(peers[0], peers[1:], pauses)
    assert warnings == [begin, "data again after 30 s; the run continues"]
    assert pauses.longest == 0, "a stall is no measure of how long steps take"


def places_of_reading(monitor: HealthMonitor) -> list[health._Place]:
    places = [monitor._current_place() for _ in monitor.each("ab", 7, Stage.READ, Stage.COMPUTE)]
    return [*places, monitor._current_place()]


def test_pauses_and_stages():
    pauses = health._Pauses()
    for pause, longest in ((1, 0), (2, 0), (2, 0), (0, 2), (1, 2), (0, 2), (3, 2), (0, 3)):
        pauses.see(pause)
        assert pauses.longest == longest
    assert [int(stage) for stage in Stage] == list(range(10))
    monitor = Ranks(["h0"]).monitors[0]
    places = places_of_reading(monitor)
    assert [(place.step, place.stage) for place in places] == [
        (7, Stage.READ),
        (7, Stage.READ),
        (7, Stage.COMPUTE),
    ]
    assert len({place.marks for place in places[:2]}) == 2  # progress within one stage
    monitor._own = 3.0
    monitor._own_since = 4
    assert monitor.own_seconds(8) == 0.75
    monitor.expect_long_reads(lambda: True)
    assert [place.stage for place in places_of_reading(monitor)] == [Stage.PREPARE_EPOCH] * 2 + [
        Stage.COMPUTE
    ]


@pytest.mark.parametrize("clock", ["looked", "looked_at_clock"])
@pytest.mark.parametrize("seconds", [4.5, 5.5])
def test_a_rank_that_was_suspended_reports_itself(clock, seconds):
    ranks = Ranks(["h0"])
    presence = health._OwnPresence()
    setattr(presence, clock, getattr(presence, clock) - seconds)
    assert presence.look() == presence.is_doubtful == (seconds > 5)
    assert not presence.look()
    monitor = ranks.monitors[0]
    monitor.mark(4, Stage.READ)
    with pytest.raises(SystemExit):
        monitor.report_lost("rank 1 on h1 died after step 4", presence)
    doubtful = "rank 0 on h0 stood still for 6 s after step 4, and the others went on without it"
    assert ranks.reports == [
        (0, doubtful if seconds > 5 else "rank 1 on h1 died after step 4", True)
    ]
