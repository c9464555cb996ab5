"""Ends the run on every rank soon after one of them dies or hangs, and says which one, where and after which step.

Collectives alone cannot tell: a dead peer is "connection closed" to its neighbours, a hanging one is silence. So each
rank keeps one connection to rank 0 on which a thread reports every second how far its main thread is:

* the connection breaks without a farewell: that process died; noticed at once;
* a rank says nothing for `HANG_SECONDS`: its machine is cut off, or the process stopped;
* nobody gets further for `HANG_SECONDS`: the rank that is furthest behind hangs, for the others wait for it;
* rank 0 itself is lost: the others notice, and the first of them, or of another machine, closes the log.

The main thread only writes two numbers (`mark`), so a step costs the same with and without.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeVar

from mlbert.core.errors import UserError
from mlbert.dist.world import World

PERIOD_SECONDS = 1.0
HANG_SECONDS = 25.0
# Rank 0 has the better view and speaks first: the others wait that much longer.
HEAD_START_SECONDS = 5.0
# A pause is a hang when it is this many times longer than any before it, at least HANG_SECONDS.
HANG_FACTOR = 10.0
# Before this process's first step is done (compilation, first touch of the data) and while rank 0 writes a checkpoint.
PATIENT_SECONDS = 600.0
# What a broken collective may be the consequence of shows up within this time.
CAUSE_SECONDS = 4.0
CONNECT_SECONDS = 30.0
EXIT_CODE = 3

Item = TypeVar("Item")


class Stage(IntEnum):
    """Where in a step a rank is, in order; in COUNT, REDUCE, SUM and COUNT_AHEAD it waits for the others.

    The last two but one are the next step's, which is made ready while the device evaluates.
    """

    SETUP = 0
    READ = 1
    COUNT = 2
    COMPUTE = 3
    REDUCE = 4
    UPDATE = 5
    EVALUATE = 6
    SUM = 7
    READ_AHEAD = 8
    COUNT_AHEAD = 9
    CHECKPOINT = 10


_PATIENT = (Stage.SETUP, Stage.CHECKPOINT)


@dataclass
class _Peer:
    """What rank 0 knows of a rank."""

    rank: int
    step: int = 0
    stage: int = Stage.SETUP
    ticks: int = -1
    changed: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    said_bye: bool = False
    unread: bytes = b""


@dataclass
class _Pauses:
    """The longest pause that has come to its end."""

    longest: float = 0.0
    current: float = 0.0

    def see(self, pause: float) -> None:
        """Takes a growing pause, or a smaller one: then the one before it is over."""
        if pause < self.current:
            self.longest = max(self.longest, self.current)
        self.current = pause


class Watch:
    """One rank's part of the watch.

    Args:
        world: the started world.
        close_log: called right before the process ends, with one sentence, by rank 0; when that is lost, by rank 1 and
            by the first rank of another machine.
        hang_seconds: see `HANG_SECONDS`.
    """

    def __init__(self, world: World, close_log: Callable[[str], None], hang_seconds: float = HANG_SECONDS) -> None:
        self.world, self._close_log, self._hang_seconds = world, close_log, hang_seconds
        self._step, self._stage, self._ticks = 0, Stage.SETUP, 0
        self._first_step: int | None = None
        self._hosts = [world.host]
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._to_head: socket.socket | None = None
        self._peers: dict[socket.socket, _Peer] = {}
        self._suspicion: tuple[float, str] | None = None

    def mark(self, step: int, stage: Stage) -> None:
        """The main thread is here now; `step` counts the steps that are done."""
        if self._first_step is None:
            self._first_step = step
        self._step, self._stage = step, stage
        self._ticks += 1

    def each(self, items: Iterable[Item], step: int, during: Stage, after: Stage) -> Iterator[Item]:
        """The items, with a mark for each and one when they are used up."""
        for item in items:
            self.mark(step, during)
            yield item
        self.mark(step, after)

    def start(self) -> None:
        """Connects every rank to rank 0; called on all ranks together."""
        if self.world.world_size == 1:
            return
        self._hosts = self.world.hosts()
        is_head = self.world.rank == 0
        listener = _listen(self.world.world_size) if is_head else None
        port = self.world.broadcast_int(listener.getsockname()[1] if listener else 0)
        token = self.world.broadcast_int(secrets.randbits(60))
        try:
            if listener is not None:
                self._accept(listener, token)
            else:
                self._to_head = socket.create_connection((self.world.master_addr, port), CONNECT_SECONDS)
                _send(self._to_head, {"rank": self.world.rank, "token": token})
        except OSError as error:
            reason = f"{self._name(self.world.rank)} cannot join the watch over the ranks ({error})"
            remedy = "Let the nodes open any port to each other, as gloo and NCCL need it too"
            raise UserError(f"{self.world.master_addr}:{port}", reason, remedy) from error
        target = self._watch_peers if is_head else self._watch_head
        self._thread = threading.Thread(target=target, name="rank-watch", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Starts the watch for a block and ends it; an exception that leaves the block is told to the other ranks."""
        self.start()
        try:
            yield
        except BaseException as error:
            self._tell(error)
            raise
        finally:
            self._stop()

    def _stop(self) -> None:
        """Says farewell, so that the end of this process means nothing to the others."""
        if self._thread is None:
            return
        self._stopping.set()
        for connection in [self._to_head] if self._to_head else list(self._peers):
            _send(connection, {"bye": True})
        self._thread.join(2 * PERIOD_SECONDS)

    def _tell(self, error: BaseException) -> None:
        """Tells rank 0 why this rank fails. A broken collective is rarely the cause: that one is waited for.

        So is a signal, for a moment: Slurm ends the others when one rank is lost.
        """
        if self._thread is None:
            return
        # Every failure of torch.distributed is a RuntimeError.
        is_consequence = isinstance(error, RuntimeError)
        words = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ").rstrip(".")
        sentence = f"{self._name(self.world.rank)} failed {_after(self._step)}: {words}"
        if self._to_head is not None:
            _send(self._to_head, {"failed": sentence, "cause": not is_consequence})
        elif is_consequence:
            self._suspicion = (time.monotonic() + CAUSE_SECONDS, sentence)
        else:
            if isinstance(error, Exception):
                self._stopping.set()  # no signal: whoever ends from now on is no cause
                self._report(sentence)
            self._announce(sentence)
        # The other thread ends the process when it knows.
        self._stopping.wait(CAUSE_SECONDS + 2 * PERIOD_SECONDS if is_consequence else PERIOD_SECONDS)

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}"

    def _accept(self, listener: socket.socket, token: int) -> None:
        listener.settimeout(CONNECT_SECONDS)
        with listener:
            while len(self._peers) < self.world.world_size - 1:
                connection, _ = listener.accept()
                connection.settimeout(5)
                # Whoever else knocks at a port sends something else, or nothing.
                with contextlib.suppress(OSError, ValueError):
                    hello = json.loads(_first_line(connection))
                    if isinstance(hello, dict) and hello.get("token") == token:
                        self._peers[connection] = _Peer(hello["rank"])
                        continue
                connection.close()

    # Rank 0

    def _watch_peers(self) -> None:
        own = _Peer(0)
        pauses = _Pauses()
        next_beat = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for connection in self._peers:
                selector.register(connection, selectors.EVENT_READ)
            while not self._stopping.is_set():
                for key, _ in selector.select(0.2):
                    if not self._hear(key.fileobj):
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                self._advance(own, {"step": self._step, "stage": self._stage, "ticks": self._ticks})
                if self._suspicion is not None and now > self._suspicion[0]:
                    self._end(self._suspicion[1])
                if now >= next_beat:
                    next_beat = now + PERIOD_SECONDS
                    self._announce(None)
                    self._check_hang([own, *self._peers.values()], pauses)

    def _hear(self, connection: socket.socket) -> bool:
        """Takes what a rank says; False when its connection is at its end."""
        peer = self._peers[connection]
        try:
            data = connection.recv(4096)
        except OSError:
            data = b""
        if not data:
            if not peer.said_bye:
                # Its own last word may be a second old; no rank is a step ahead of another for long.
                self._end(f"{self._name(peer.rank)} died {_after(max(peer.step, self._step))}")
            return False
        peer.heard = time.monotonic()
        *lines, peer.unread = (peer.unread + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "bye" in message:
                peer.said_bye = True
            elif message.get("cause"):
                self._end(message["failed"])
            elif "failed" in message:
                self._suspicion = self._suspicion or (time.monotonic() + CAUSE_SECONDS, message["failed"])
            else:
                self._advance(peer, message)
        return True

    @staticmethod
    def _advance(peer: _Peer, message: dict) -> None:
        if message["ticks"] != peer.ticks:
            peer.changed = time.monotonic()
        peer.step, peer.stage, peer.ticks = message["step"], message["stage"], message["ticks"]

    def _check_hang(self, peers: list[_Peer], pauses: _Pauses) -> None:
        """Ends the run when a rank is silent or nobody moves."""
        now = time.monotonic()
        for peer in peers:
            # Where this rank itself is past its set-up, so is every other one; what they said last may be old.
            is_silent = now - peer.heard > (PATIENT_SECONDS if self._stage == Stage.SETUP else self._hang_seconds)
            if peer.rank and not peer.said_bye and is_silent:
                self._end(
                    f"{self._name(peer.rank)} is silent {_after(max(peer.step, self._step))} ({now - peer.heard:.0f} s)"
                )
        behind = min((peer for peer in peers if not peer.said_bye), key=lambda p: (p.step, p.stage, p.changed))
        pause = now - max(peer.changed for peer in peers)
        patient = behind.step == self._first_step or any(peer.stage in _PATIENT for peer in peers)
        limit = PATIENT_SECONDS if patient else max(self._hang_seconds, HANG_FACTOR * pauses.longest)
        if pause > limit:
            stage = Stage(behind.stage).name
            self._end(f"{self._name(behind.rank)} hangs {_after(behind.step)} ({stage}, {pause:.0f} s)")
        pauses.see(0.0 if patient else pause)

    def _announce(self, verdict: str | None) -> None:
        for connection in self._peers:
            _send(connection, {"end": verdict})

    # The other ranks

    def _watch_head(self) -> None:
        head = self._to_head
        assert head is not None
        unread, heard, next_beat = b"", time.monotonic(), 0.0
        while not self._stopping.is_set():
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + PERIOD_SECONDS
                _send(head, {"step": self._step, "stage": self._stage, "ticks": self._ticks})
            if not select.select([head], [], [], PERIOD_SECONDS / 5)[0]:
                silence, limit = time.monotonic() - heard, self._hang_seconds + HEAD_START_SECONDS
                if silence > (PATIENT_SECONDS if self._stage in _PATIENT else limit):
                    self._end(f"{self._name(0)} is silent {_after(self._step)} ({silence:.0f} s)")
                continue
            try:
                data = head.recv(4096)
            except OSError:
                data = b""
            if not data:
                self._end(f"{self._name(0)} died {_after(self._step)}")
            heard = time.monotonic()
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "bye" in message:
                    return
                if message["end"]:
                    os._exit(EXIT_CODE)

    def _end(self, sentence: str) -> None:
        """Ends this process, and where it is rank 0 every other one; the story is told once."""
        if self._stopping.is_set():
            sys.exit()  # this thread; the run is at its end anyway
        if self.world.rank == 0:
            self._announce(sentence)
        other_machine = [rank for rank, host in enumerate(self._hosts) if host != self._hosts[0]]
        if self.world.rank in (0, 1, *other_machine[:1]):
            self._report(sentence)
        if self.world.rank == 0:
            # A connection that is closed with beats unread is reset, and the verdict on it lost.
            time.sleep(PERIOD_SECONDS)
        os._exit(EXIT_CODE)

    def _report(self, sentence: str) -> None:
        """Tells the story to people and closes the log with it."""
        print(f"mlbert: error: {sentence}. The run is aborted on every rank.", file=sys.stderr, flush=True)
        if self.world.rank > 1:
            time.sleep(PERIOD_SECONDS)  # rank 1 comes first, if it is alive
        # A full disk must not keep the process alive.
        with contextlib.suppress(Exception):
            self._close_log(sentence)


def _listen(backlog: int) -> socket.socket:
    """A port of this machine, for both families of addresses where there are two."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", 0), backlog=backlog)


def _first_line(connection: socket.socket, most_bytes: int = 200) -> bytes:
    """One line and not a byte of the next."""
    line = b""
    while len(line) < most_bytes and not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            break
        line += byte
    return line


def _after(step: int) -> str:
    return f"after step {step}"


def _send(connection: socket.socket, message: dict) -> None:
    """Sends one line; who cannot be reached any more is found out by the reader."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")
