"""Detect quickly which rank died, hangs or failed, where, and after which step.

Collectives cannot show this: a dead peer looks like a closed connection to its neighbors, a
hanging one like silence. So each rank keeps one connection to rank 0, on which a thread reports the
main thread's progress every second, or less often with more than 1,024 ranks. Rank 0 answers each
report:

* the connection breaks without a farewell: that process died; detected at once;
* a rank sends nothing for `HANG_SECONDS`: its machine is cut off, or the process is suspended;
* no rank makes progress for `HANG_SECONDS`: the rank furthest behind hangs,
  because the others wait for it;
* the same while that rank is alive and reads data: the storage has stalled. The run waits for
  `READ_SECONDS` (the setting READ_TIMEOUT), says so once, and names no rank as lost;
* rank 0 itself is lost: the other ranks notice, and rank 1
  or the first rank of another machine reports it.

A rank that was suspended does not know what happened meanwhile,
so it reports no other rank as lost.

The main thread only records its position (`mark`), so monitoring does not slow a step.
`mlbert.distributed.lifecycle` describes what happens when a rank is lost.
"""

from __future__ import annotations

import contextlib
import selectors
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeVar

from mlbert.distributed.channel import Channel, connect
from mlbert.distributed.stages import Stage
from mlbert.distributed.world import World
from mlbert.host.errors import UserError

PERIOD_SECONDS = 1.0
# Limits the work of rank 0's thread, which competes with its main thread.
MOST_REPORTS_PER_SECOND = 1024.0
LOOK_SECONDS = 0.2
HANG_SECONDS = 25.0
READ_SECONDS = 900.0
# The other ranks wait this much longer than rank 0, which knows more and should report first.
HEAD_START_SECONDS = 5.0
# A pause is a hang if it is this many times longer than any before it, and at least HANG_SECONDS.
HANG_FACTOR = 10.0
# Limit until this process's first step is done (compilation, first data access), while a rank's
# source prepares an epoch, and while rank 0 writes a checkpoint.
PATIENT_SECONDS = 600.0
# The cause of a failed collective shows up within this time.
CAUSE_SECONDS = 4.0
SIGNALLED = "a signal ends the run"  # the verdict on failures that followed one
# The watching thread runs five times a second. If it did not run for this long,
# this process was suspended.
ABSENCE_SECONDS = 5.0
MOST_NAMED_RANKS = 4  # in a sentence
_READING = (Stage.READ, Stage.READ_AHEAD)
# Stages in which a rank waits for no other.
_OWN = (*_READING, Stage.COMPUTE)
# Stages that may take `PATIENT_SECONDS`.
_PATIENT = (Stage.SETUP, Stage.PREPARE_EPOCH, Stage.CHECKPOINT)

Item = TypeVar("Item")


class _Place(NamedTuple):
    """Position of a main thread.

    `marks` counts its reports, since it may make progress within one stage.
    """

    step: int = 0
    stage: int = Stage.SETUP
    marks: int = 0


@dataclass
class _Peer:
    """What rank 0 knows about a rank, including itself."""

    rank: int
    place: _Place = field(default_factory=_Place)
    changed: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    said_bye: bool = False

    def is_at(self, place: _Place) -> None:
        if place != self.place:
            self.place = place
            self.changed = time.monotonic()


@dataclass
class _Pauses:
    """The longest completed pause, and the current one."""

    longest: float = 0.0
    current: float = 0.0

    def see(self, pause: float) -> None:
        """Update the current pause. A smaller value means that the previous pause is over."""
        if pause < self.current:
            self.longest = max(self.longest, self.current)
        self.current = pause


@dataclass
class _OwnPresence:
    """Detects if this process was suspended: by a signal, a debugger, or an overloaded machine."""

    looked: float = field(default_factory=time.monotonic)
    looked_at_clock: float = field(default_factory=time.time)
    gap: float = 0.0
    returned: float = float("-inf")

    def look(self) -> bool:
        """Call in every cycle of the watching thread.

        Return True if it is late, so that all it has heard is stale.
        """
        now = time.monotonic()
        # Keeps running while a virtual machine sleeps; the monotonic clock may not.
        clock = time.time()
        gap = max(now - self.looked, clock - self.looked_at_clock)
        self.looked = now
        self.looked_at_clock = clock
        if gap > ABSENCE_SECONDS:
            self.gap = gap
            self.returned = now
        return gap > ABSENCE_SECONDS

    @property
    def is_doubtful(self) -> bool:
        """True shortly after a suspension, when connections may be broken because this process was
        silent.
        """
        return time.monotonic() - self.returned < CAUSE_SECONDS


class HealthMonitor:
    """One rank's part of the health monitoring.

    Args:
        world: the started world.
        report: called with one sentence, and whether to print it, when a rank is lost. Rank 0 calls
            it. If rank 0 is lost, rank 1 and the first rank of another machine do, and the first
            call counts.
        end: ends this process at once; its argument says if a `UserError` ended the run. Called by
            the watching thread, since the main thread may hang in a collective.
        hang_seconds: see `HANG_SECONDS`.
        read_seconds: see `READ_SECONDS`.
        warn: prints a sentence on rank 0 about a run that continues. Called by the watching thread.

    Attributes:
        is_mistake: rank 0 has announced that a `UserError` ends the run.
    """

    def __init__(
        self,
        world: World,
        report: Callable[[str, bool], None],
        end: Callable[[bool], NoReturn],
        hang_seconds: float,
        read_seconds: float = READ_SECONDS,
        warn: Callable[[str], object] = lambda sentence: None,
    ) -> None:
        self.world = world
        self._report = report
        self._end_process = end
        self._hang_seconds = hang_seconds
        self._read_seconds = read_seconds
        self._warn = warn
        self._stalled_since: float | None = None  # of a stall that rank 0 has reported
        self._period = max(PERIOD_SECONDS, world.world_size / MOST_REPORTS_PER_SECOND)
        # Replaced atomically, so that the watching thread never sees the step of one mark
        # and the stage of another.
        self._place = _Place()
        self._first_step: int | None = None
        self._marked = self._own = 0.0  # time of the last mark; seconds in the stages of `_OWN`
        self._is_preparing: Callable[[], bool] = lambda: False
        self._hosts = [world.host]
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._channels: dict[int, Channel] = {}
        # A failure that another one probably caused: the time from which it counts after all, its
        # description, and whether it is a `UserError`.
        self._suspicion: tuple[float, str, bool] | None = None
        # Rank 0 has announced that a signal ends the run, so the other ranks are expected to exit.
        self._leaving = self.is_mistake = False
        self._is_signalled = False
        self._own_failure = ""  # the sentence in which this rank has reported why it fails

    def take_signal(self) -> None:
        """Record that a signal ends this process, and that the log says so.

        The main thread may hang in a collective.

        Other ranks may get the signal too. They wait until rank 0 has recorded it, since launchers
        kill all ranks when the first one exits.
        """
        self._is_signalled = True

    def mark(self, step: int, stage: Stage) -> None:
        """Record the main thread's position; `step` counts completed steps."""
        if self._first_step is None:
            self._first_step = self._own_since = step
        now = time.monotonic()
        if self._place.stage in _OWN:
            self._own += now - self._marked
        self._marked = now
        self._place = _Place(step, stage, self._place.marks + 1)

    def own_seconds(self, step: int) -> float:
        """Return this rank's seconds per step since the last call, without its waits for other
        ranks. On a GPU, they are the host's.
        """
        seconds = self._own
        steps = max(step - self._own_since, 1)
        self._own = 0.0
        self._own_since = step
        return seconds / steps

    def expect_long_reads(self, is_preparing: Callable[[], bool]) -> None:
        """Allow long reads while ``is_preparing()``, called by the watching thread, is true."""
        self._is_preparing = is_preparing

    def _current_place(self) -> _Place:
        place = self._place
        if place.stage in _READING and self._is_preparing():
            return place._replace(stage=Stage.PREPARE_EPOCH)
        return place

    def each(self, items: Iterable[Item], step: int, during: Stage, after: Stage) -> Iterator[Item]:
        """Yield the items; mark ``during`` before each and ``after`` at the end."""
        for item in items:
            self.mark(step, during)
            yield item
        self.mark(step, after)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Monitor a block, and report an exception that leaves it to the other ranks.

        All ranks enter together.
        """
        self._start()
        try:
            yield
        except BaseException as error:
            try:
                self._report_failure(error)
            except (
                BaseException
            ) as interruption:  # a signal, while it waits for the cause of the failure
                if not isinstance(error, UserError):
                    self._report_failure(interruption)
                raise
            raise
        finally:
            self.say_farewell()

    @property
    def joined(self) -> bool:
        """True if this rank has reported, or can report, to the others why it fails."""
        return self._thread is not None

    def say_farewell(self) -> None:
        """Tell the other ranks that this process is exiting on purpose."""
        if self._thread is None:
            return
        # Before the farewell: the other ranks close their connections in response,
        # which must not look like deaths.
        self._stopping.set()
        for channel in self._channels.values():
            channel.send(bye=True)
        self._thread.join(2 * PERIOD_SECONDS)

    def _start(self) -> None:
        if self.world.world_size == 1:
            return
        try:
            with self.world.rendezvous.together("watch"):
                self._hosts = self.world.hosts()
                self._channels = connect(self.world)
        except OSError as error:
            reason = f"cannot connect to the ranks' health monitor ({error})"
            remedy = "Allow connections between the nodes on any port; gloo and NCCL need this too"
            raise UserError(
                "distributed.join", self._name(self.world.rank), reason, remedy
            ) from error
        target = self._watch_ranks if self.world.rank == 0 else self._watch_head
        self._thread = threading.Thread(target=target, name="rank-watch", daemon=True)
        self._thread.start()

    def _report_failure(self, error: BaseException) -> None:
        """Report to rank 0 why this rank fails.

        A failed collective is rarely the cause, so wait for the cause first.

        The same holds for a signal: a canceled job sends it to all ranks,
        and Slurm ends the others if one is lost.
        """
        if not self.joined or self._stopping.is_set():
            return
        # Every failure of torch.distributed is a RuntimeError.
        is_signal = not isinstance(error, Exception)
        # Rank 0 reports a mistake that it makes as well.
        is_mistake = isinstance(error, UserError)
        is_consequence = (
            is_signal or isinstance(error, RuntimeError) or (is_mistake and self.world.rank != 0)
        )
        text = (
            error.as_line() if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        )
        words = " ".join(text.split()).removesuffix(":").rstrip(".")
        sentence = f"{self._name(self.world.rank)} failed {_after(self._place.step)}: {words}"
        if self.world.rank != 0:
            self._own_failure = "" if is_signal else sentence
            self._channels[0].send(
                failed=sentence, is_cause=not is_consequence, is_mistake=is_mistake
            )
        elif is_signal:
            self._stopping.wait(PERIOD_SECONDS)  # a lost rank that caused it shows up by then
            self._leaving = True
            self._announce(sentence)
        elif is_consequence:
            self._suspicion = (time.monotonic() + CAUSE_SECONDS, sentence, False)
        else:
            # Before the others hear of it: a rank that ends from now on is not the cause.
            self._stopping.set()
            self._report(sentence, not is_mistake)  # the command line prints that one
            self._announce(sentence, is_mistake)
        # Meanwhile the watching thread ends the process once it knows the cause: of many ranks that
        # fail alike, only the one that rank 0 names prints its traceback.
        waits_for_cause = (is_consequence or self.world.rank != 0) and not self._leaving
        self._stopping.wait(
            CAUSE_SECONDS + 2 * PERIOD_SECONDS if waits_for_cause else PERIOD_SECONDS
        )

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}"

    # Rank 0's thread

    def _watch_ranks(self) -> None:
        own = _Peer(0)
        others = [_Peer(rank) for rank in self._channels]
        pauses = _Pauses()
        presence = _OwnPresence()
        next_check = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for peer in others:
                selector.register(self._channels[peer.rank], selectors.EVENT_READ, peer)
            # Poll: with many ranks, it costs more to wake up for each report than to read it.
            while not self._stopping.wait(LOOK_SECONDS):
                ready = selector.select(0)
                if (
                    presence.look()
                ):  # first: ready connections may belong to ranks that gave this one up
                    for peer in (own, *others):
                        peer.heard = peer.changed = time.monotonic()
                received = [
                    (key.fileobj, key.data, self._channels[key.data.rank].receive())
                    for key, _ in ready
                ]
                for connection, peer, messages in sorted(
                    received, key=lambda one: one[2] is not None
                ):
                    # First: Slurm signals the others when a rank dies, and they report the signal.
                    if messages is None:
                        selector.unregister(connection)
                        self._take_end(peer, presence)
                    else:
                        self._hear(peer, messages, presence)
                own.is_at(self._current_place())
                if self._suspicion is not None and self._is_signalled:
                    self._leaving = True
                    # The others exit, and so end a collective that may hang. None of them reports.
                    self._announce(SIGNALLED)
                    self._suspicion = None
                elif self._suspicion is not None and time.monotonic() > self._suspicion[0]:
                    self._end(*self._suspicion[1:])
                # Not during a suspicion: ranks that wait for the failed one would look like a hang.
                if time.monotonic() >= next_check and self._suspicion is None:
                    next_check = time.monotonic() + self._period
                    self._check_hang(own, others, pauses)

    def _take_end(self, peer: _Peer, presence: _OwnPresence) -> None:
        """Handle a closed connection."""
        if not peer.said_bye and not self._leaving:
            # Its last report may be a second old, but no rank is a step ahead of another for long.
            step = max(peer.place.step, self._place.step)
            self.report_lost(f"{self._name(peer.rank)} died {_after(step)}", presence)

    def _hear(
        self, peer: _Peer, messages: Sequence[dict[str, Any]], presence: _OwnPresence
    ) -> None:
        """Handle a rank's messages."""
        peer.heard = time.monotonic()
        for message in messages:
            if "bye" in message:
                peer.said_bye = True
            elif "failed" not in message:
                peer.is_at(_Place(*message["place"]))
                self._channels[peer.rank].send(verdict=None)
            elif message["is_cause"] or presence.is_doubtful:
                self.report_lost(message["failed"], presence)
            else:
                deadline = time.monotonic() + CAUSE_SECONDS
                suspicion = (deadline, message["failed"], message["is_mistake"])
                self._suspicion = self._suspicion or suspicion

    def _check_hang(self, own: _Peer, others: Sequence[_Peer], pauses: _Pauses) -> None:
        """End the run if a rank is silent or no rank makes progress."""
        now = time.monotonic()
        present = [peer for peer in others if not peer.said_bye]
        # If this rank is past its set-up, so is every other one; their last reports may be old.
        limit = PATIENT_SECONDS if own.place.stage == Stage.SETUP else self._hang_seconds
        for peer in present:
            if (silence := now - peer.heard) > limit:
                step = max(peer.place.step, own.place.step)
                self._end(f"{self._name(peer.rank)} is silent {_after(step)} ({silence:.0f} s)")
        behind = min(
            (own, *present), key=lambda peer: (peer.place.step, peer.place.stage, peer.changed)
        )
        progress = max(peer.changed for peer in (own, *others))
        pause = now - progress
        patient = behind.place.step == self._first_step or any(
            p.place.stage in _PATIENT for p in (own, *others)
        )
        limit = (
            PATIENT_SECONDS if patient else max(self._hang_seconds, HANG_FACTOR * pauses.longest)
        )
        # A rank that reads and still reports is alive: the storage is slow, for however many ranks.
        is_reading = behind.place.stage in _READING
        if is_reading:
            readers = [peer for peer in (own, *present) if peer.place.stage in _READING]
            self._follow_stall(progress, behind.place.step, readers)
            limit = max(limit, self._read_seconds)
        elif self._stalled_since is not None:
            self._end_stall(progress)
        if pause > limit:
            self._end(self._standstill(behind, pause, readers if is_reading else []))
        pauses.see(0.0 if patient or is_reading else pause)

    def _follow_stall(self, progress: float, step: int, readers: Sequence[_Peer]) -> None:
        """Print once that ranks wait for data, and once that they have it.

        ``progress``: the time of the last.
        """
        if self._stalled_since is not None and progress > self._stalled_since:
            self._end_stall(progress)
        pause = time.monotonic() - progress
        if self._stalled_since is None and pause > self._hang_seconds:
            self._stalled_since = progress
            self._warn(
                f"no data for {pause:.0f} s {_after(step)}: {self._names(readers)}. "
                "The run waits for up "
                f"to {self._read_seconds / 60:.0f} minutes (READ_TIMEOUT)"
            )

    def _end_stall(self, progress: float) -> None:
        assert self._stalled_since is not None
        self._warn(f"data again after {progress - self._stalled_since:.0f} s; the run continues")
        self._stalled_since = None

    def _standstill(self, behind: _Peer, pause: float, readers: Sequence[_Peer]) -> str:
        """Describe why the run ends.

        Launchers exclude the node of a rank that hangs, but not those that read.
        """
        if readers:
            return f"no data for {pause:.0f} s {_after(behind.place.step)}: {self._names(readers)}"
        stage = Stage(behind.place.stage).name
        return (
            f"{self._name(behind.rank)} hangs {_after(behind.place.step)} ({stage}, {pause:.0f} s)"
        )

    def _names(self, readers: Sequence[_Peer]) -> str:
        """Describe the ranks that read."""
        named = [self._name(peer.rank) for peer in readers[:MOST_NAMED_RANKS]]
        if len(readers) > MOST_NAMED_RANKS:
            named.append(f"{len(readers) - MOST_NAMED_RANKS} more")
        verb = "waits" if len(readers) == 1 else "wait"
        return f"{', '.join(named)} {verb} in READ"

    def _announce(self, verdict: str, is_mistake: bool = False) -> None:
        """Send every rank how the run ends."""
        for channel in self._channels.values():
            channel.send(verdict=verdict, is_mistake=is_mistake)

    # The other ranks' thread

    def _watch_head(self) -> None:
        head = self._channels[0]
        presence = _OwnPresence()
        heard = time.monotonic()
        # Spread over the period.
        next_report = heard + self._period * self.world.rank / self.world.world_size
        while not self._stopping.is_set():
            if time.monotonic() >= next_report:
                next_report = time.monotonic() + self._period
                head.send(place=self._current_place())
            has_news = head.has_news(LOOK_SECONDS)
            if presence.look():
                heard = time.monotonic()
            if has_news:
                heard = time.monotonic()
                messages = head.receive()
                if messages is None:
                    self.report_lost(f"{self._name(0)} died {_after(self._place.step)}", presence)
                for message in messages:
                    if "bye" in message:
                        return
                    if message["verdict"] and self._take_verdict(message):
                        return
            is_patient = self._current_place().stage in _PATIENT
            limit = PATIENT_SECONDS if is_patient else self._hang_seconds + HEAD_START_SECONDS
            if (silence := time.monotonic() - heard) > limit:
                self._end(f"{self._name(0)} is silent {_after(self._place.step)} ({silence:.0f} s)")

    def _take_verdict(self, message: dict[str, Any]) -> bool:
        """End this process after rank 0 has said how the run ends, or return True if the cause is
        this rank's own failure, whose traceback the main thread prints.

        Rank 0 has reported it, or prints a mistake and exits within a second.
        """
        self.is_mistake = message["is_mistake"]
        if message["verdict"] == self._own_failure and not self.is_mistake:
            self._stopping.set()
            return True
        time.sleep(2 * PERIOD_SECONDS * self.is_mistake)
        return self._end_process(self.is_mistake)

    # Either thread

    def report_lost(self, sentence: str, presence: _OwnPresence) -> NoReturn:
        """End the run over a lost or failed rank.

        If this process was suspended, report that as the cause.
        """
        if presence.is_doubtful:
            name = self._name(self.world.rank)
            step = self._place.step
            sentence = (
                f"{name} stood still for {presence.gap:.0f} s {_after(step)}, "
                "and the others went on without it"
            )
        self._end(sentence)

    def _end(self, sentence: str, is_mistake: bool = False) -> NoReturn:
        """End this process and, on rank 0, every other one. The reason is reported once."""
        if self._stopping.is_set():
            sys.exit()  # this thread only; the run is ending anyway
        if self.world.rank == 0:
            self._announce(sentence, is_mistake)
        other_machine = [rank for rank, host in enumerate(self._hosts) if host != self._hosts[0]]
        if self.world.rank in (0, 1, *other_machine[:1]):
            if self.world.rank > 1:
                time.sleep(PERIOD_SECONDS)  # rank 1 reports first, if it is alive
            self._report(sentence, True)
        if self.world.rank == 0:
            # Closing a connection with unread heartbeats resets it, and the verdict would be lost.
            time.sleep(PERIOD_SECONDS)
        self._end_process(is_mistake)


def _after(step: int) -> str:
    return f"after step {step}"
