"""Measure the all-reduce bandwidth of all ranks and find the node that slows it down.

An all-reduce is as fast as its slowest link. To find that link, the first ranks of neighboring
nodes swap messages in a ring. A node's speed is that of the better of its two links, so that a slow
node is not blamed on its neighbors.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mlbert.distributed.world import World

REPEATS = 5
SLOW_SHARE = 0.7  # of the median node's bandwidth


@dataclass(frozen=True)
class NetworkReport:
    """Bandwidths in GB/s.

    Attributes:
        reduce: message size in bytes to bus bandwidth of an all-reduce over all ranks.
        nodes: host name to bandwidth of the better of its two links; empty for a single node.
    """

    reduce: dict[int, float]
    nodes: dict[str, float]

    @property
    def slow(self) -> list[str]:
        """Hosts clearly below the median, slowest first."""
        if not self.nodes:
            return []
        median = sorted(self.nodes.values())[len(self.nodes) // 2]
        ordered = sorted(self.nodes, key=lambda host: self.nodes[host])
        return [host for host in ordered if self.nodes[host] < SLOW_SHARE * median]

    def lines(self) -> list[str]:
        """Return the report as text lines; the last one is the verdict."""
        text = [
            f"all-reduce of {size / 2**20:g} MiB: {speed:.2f} GB/s"
            for size, speed in self.reduce.items()
        ]
        text += [f"{host}: {speed:.2f} GB/s to a neighbor" for host, speed in self.nodes.items()]
        if self.nodes:
            slowest = min(self.nodes, key=lambda host: self.nodes[host])
            word = (
                f"slow: {', '.join(self.slow)}" if self.slow else "no node is far below the others"
            )
            text.append(f"slowest node: {slowest} ({self.nodes[slowest]:.2f} GB/s); {word}")
        return text


def measure(world: World, sizes_mib: list[int]) -> NetworkReport:
    """Run the test on all ranks of a started world; every rank gets the same report."""
    reduce = {size * 2**20: _all_reduce_speed(world, size * 2**20) for size in sizes_mib}
    hosts = world.hosts()
    heads = [i for i, host in enumerate(hosts) if hosts.index(host) == i]
    nodes: dict[str, float] = {}
    if len(heads) > 1:
        links = _link_speeds(world, heads, sizes_mib[-1] * 2**20)
        nodes = {hosts[head]: max(links[i], links[i - 1]) for i, head in enumerate(heads)}
    return NetworkReport(reduce, nodes)


def _all_reduce_speed(world: World, size: int) -> float:
    tensor = torch.ones(size // 4, device=world.device)
    best = float("inf")
    for _ in range(REPEATS + 1):
        world.barrier()
        started = time.monotonic()
        world.all_reduce_sum(tensor)
        _finish(tensor)
        best = min(best, time.monotonic() - started)
        tensor.fill_(1)
    slowest = world.all_reduce_max(torch.tensor(best, dtype=torch.float64))
    # Each rank sends and receives 2 (n - 1) / n of the message:
    # the usual all-reduce "bus bandwidth".
    return size * 2 * (world.world_size - 1) / world.world_size / float(slowest) / 1e9


def _link_speeds(world: World, heads: list[int], size: int) -> list[float]:
    """Return the GB/s between nodes i and i + 1 of the ring, for each i."""
    n = len(heads)
    speeds = torch.zeros(n, dtype=torch.float64)
    # No node has two partners in a round. An odd ring needs a third round for its last link.
    last = [n - 1] if n % 2 else []
    for links in (range(0, n - 1, 2), range(1, n if n % 2 == 0 else n - 1, 2), last):
        world.barrier()
        for i in links:
            pair = heads[i], heads[(i + 1) % n]
            if world.rank in pair:
                speed = _swap_speed(world, pair[world.rank == pair[0]], size)
                # Both ends measure; only one reports.
                speeds[i] = speed if world.rank == pair[0] else 0
    return world.all_reduce_sum(speeds).tolist()


def _swap_speed(world: World, other: int, size: int) -> float:
    sent = torch.ones(size // 4, device=world.device)
    received = torch.empty_like(sent)
    best = float("inf")
    for _ in range(REPEATS):
        started = time.monotonic()
        swap = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
        for request in dist.batch_isend_irecv(swap):
            request.wait()
        _finish(received)
        best = min(best, time.monotonic() - started)
    return size / best / 1e9


def _finish(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
