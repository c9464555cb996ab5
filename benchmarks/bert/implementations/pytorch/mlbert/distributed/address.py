"""Rank 0's address: wait until it answers, and find the network interface that leads to it.

Does not import torch.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import time
from pathlib import Path

from mlbert.host.errors import UserError

CONNECT_SECONDS = 5.0
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 1.0
_ANY_PORT = 9  # connecting a UDP socket chooses a route and sends nothing
_GET_IPV4_ADDRESS = 0x8915  # SIOCGIFADDR
_INTERFACE_NAME_BYTES = 15
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


class HeadAddress:
    """The host name or IP address of rank 0's machine, and the port on which it listens.

    Attributes:
        obstacle: why the last attempt to connect failed.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.obstacle = ""

    def reach(self, seconds: float) -> str | None:
        """Connect within ``seconds``, and return this machine's IP address on the connection;
        None if that fails.

        A name may begin to resolve, and rank 0 begin to listen, while this rank waits.
        """
        deadline = time.monotonic() + seconds
        pause = FIRST_PAUSE_SECONDS
        while True:
            left = deadline - time.monotonic()
            own_address = self._connect(min(CONNECT_SECONDS, max(left, FIRST_PAUSE_SECONDS)))
            if own_address is not None or left <= 0:
                return own_address
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def listen_and_reach(self, seconds: float) -> None:
        """Check on rank 0's machine that its port is free,
        and that the address leads here within ``seconds``.

        Raises:
            UserError: it is not, or does not.
        """
        try:
            listener = socket.create_server(("", self.port))
        except OSError as error:
            raise self.port_error() from error
        with listener:
            if self.reach(seconds) is None:
                raise self.wrong_address()

    def wrong_address(self) -> UserError:
        """Return the error that rank 0's machine does not reach itself at this address."""
        return UserError(
            "distributed.join",
            f"MASTER_ADDR={self.host}",
            f"{self.obstacle}, where rank 0 runs",
            "Export the name or address of this machine on every node; "
            "for torchrun's own choice, --local-addr sets it",
        )

    def port_error(self) -> UserError:
        """Return the error that rank 0 cannot listen on this port."""
        return UserError(
            "distributed.join",
            f"MASTER_PORT={self.port}",
            f"is taken by another program on {socket.gethostname()}, where rank 0 runs, "
            "or reserved",
            "Export a free port on every node",
        )

    def is_local(self) -> bool:
        """Return whether the address belongs to this machine."""
        return any(_can_bind(address) for address in self._resolve())

    def _resolve(self) -> list[str]:
        """Return the IP addresses; none, and the reason in `obstacle`,
        if the name does not resolve.
        """
        before = self.obstacle
        # Until it is known: a name server that does not answer may outlast the caller's patience.
        self.obstacle = f"does not resolve on {socket.gethostname()}"
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a host name"
            self.obstacle += f" ({reason})"
            return []
        self.obstacle = before
        return [str(entry[4][0]) for entry in found]

    def _connect(self, seconds: float) -> str | None:
        for address in self._resolve():
            try:
                with socket.create_connection((address, self.port), seconds) as connection:
                    return str(connection.getsockname()[0])
            except OSError as error:
                reason = error.strerror or str(error)
                self.obstacle = (
                    f"port {self.port} of {address} does not answer "
                    f"{socket.gethostname()} ({reason})"
                )
        return None


def is_loopback(address: str) -> bool:
    """Return whether an IP address is only reachable on its own machine."""
    return _ip(address).is_loopback


def address_towards(peer: str) -> str | None:
    """Return this machine's IP address on the route to another one; None if there is no route."""
    family = socket.AF_INET if _ip(peer).version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, _ANY_PORT))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """Return the network interface that has this IP address; None if there is none."""
    wanted = _ip(address)
    for _, name in socket.if_nameindex():
        if wanted in _addresses(name):
            return name
    # All of 127.0.0.0/8 belongs to the loopback interface, which has one of these addresses.
    return interface_of("127.0.0.1") if wanted.is_loopback and address != "127.0.0.1" else None


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return parsed if mapped is None else mapped


def _addresses(interface: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the interface's first IPv4 address and all its IPv6 addresses."""
    found: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    request = struct.pack("256s", interface.encode()[:_INTERFACE_NAME_BYTES])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _GET_IPV4_ADDRESS, request)
            found.append(ipaddress.IPv4Address(answer[20:24]))
        except OSError:
            pass  # it has no IPv4 address
    try:
        lines = _IPV6_ADDRESSES.read_text().splitlines()
    except OSError:
        lines = []  # this kernel has no IPv6
    for line in lines:
        digits, *_, name = line.split()
        if name == interface:
            found.append(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return found


def _can_bind(address: str) -> bool:
    family = socket.AF_INET if _ip(address).version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
            return True
    except OSError:
        return False
