"""JSON-line messages between rank 0 and every other rank,
which still work when a collective hangs or fails.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import socket
from typing import Any

from mlbert.distributed.world import World

CONNECT_SECONDS = 30.0
GREETING_SECONDS = 5.0
MOST_GREETING_BYTES = 200


class Channel:
    """One connection.

    Two threads may send on it: each short line is one system call, so lines do not mix.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unread = b""

    def fileno(self) -> int:
        """Return the descriptor for `poll` and `selectors`."""
        return self._connection.fileno()

    def send(self, **message: Any) -> None:
        """Send a message. Errors are ignored: a lost peer is detected by the reader."""
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def has_news(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until `receive` would not block. Return True if it would not."""
        # select.select fails for descriptors above 1,023, which occur with a thousand ranks.
        poll = select.poll()
        poll.register(self, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the complete messages so far, possibly none; None if the connection is closed."""
        try:
            data = self._connection.recv(4096)
        except OSError:
            data = b""  # reset: the other process ended before reading all our lines
        if not data:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _greeting(self, token: int) -> int | None:
        """Return the rank that connected, or None (and close)
        if the peer does not send the token.
        """
        self._connection.settimeout(GREETING_SECONDS)
        with contextlib.suppress(OSError, ValueError):
            while b"\n" not in self._unread and len(self._unread) < MOST_GREETING_BYTES:
                data = self._connection.recv(MOST_GREETING_BYTES)
                if not data:
                    break
                self._unread += data
            # Data after the greeting is handled with the next message, a second later.
            line, _, self._unread = self._unread.partition(b"\n")
            greeting = json.loads(line)
            if isinstance(greeting, dict) and greeting.get("token") == token:
                return int(greeting["rank"])
        self._connection.close()
        return None


def connect(world: World) -> dict[int, Channel]:
    """Connect every rank to rank 0. All ranks call it together.

    Returns:
        On rank 0 a channel to each other rank, by rank; on the other ranks {0: channel}.

    Raises:
        OSError: a connection was not made within 30 s.
    """
    listener = _listen(world.world_size) if world.rank == 0 else None
    # The port is open to the network: a peer without this token is not a rank.
    own = f"{listener.getsockname()[1]} {secrets.randbits(60)}" if listener else ""
    port, token = map(int, world.rendezvous.gather("watch", own)[0].split())
    if listener is None:
        try:
            channel = Channel(socket.create_connection((world.master_addr, port), CONNECT_SECONDS))
        except OSError as error:
            raise OSError(f"{world.master_addr}:{port}: {error}") from error
        channel.send(rank=world.rank, token=token)
        return {0: channel}
    channels: dict[int, Channel] = {}
    with listener:
        listener.settimeout(CONNECT_SECONDS)
        while len(channels) < world.world_size - 1:
            try:
                channel = Channel(listener.accept()[0])
            except TimeoutError:
                missing = [str(rank) for rank in range(1, world.world_size) if rank not in channels]
                raise OSError(f"no connection from rank {', '.join(missing)}") from None
            rank = channel._greeting(token)
            if rank is not None:
                channels[rank] = channel
    return channels


def _listen(backlog: int) -> socket.socket:
    """Listen on a free port of this machine, for IPv4 and IPv6 if available."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
        )
    return socket.create_server(("", 0), backlog=backlog)
