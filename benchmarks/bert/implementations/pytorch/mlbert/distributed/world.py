"""The ranks that train together, and the few collectives that training needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from mlbert.distributed.place import RankPlace
from mlbert.distributed.rank_table import RankSite
from mlbert.distributed.rendezvous import Rendezvous, Result
from mlbert.host.environment import environment
from mlbert.host.errors import UserError

LAZY_CONNECTIONS = "TORCH_GLOO_LAZY_INIT"
# How much longer than for data ranks wait in a collective,
# so that the watch reports the stall first.
READ_MARGIN = 60.0
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
# Between collectives of `World.wait_for_all`, far less than any of them may take.
ROUND_SECONDS = 10.0
# Of one message of `World.broadcast`, and of the device's memory that it takes.
BROADCAST_BYTES = 64 << 20


def nccl_options(timeout: timedelta) -> Any:
    """Return NCCL options for a new group of ranks, or None without GPUs.

    Its streams have priority over kernels.
    """
    if not torch.cuda.is_available():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # else torch warns that the group's timeout takes precedence
    return options


@dataclass(frozen=True)
class World(RankPlace):
    """The ranks that train together, with this process's rank and sizes."""

    @property
    def device(self) -> torch.device:
        """This rank's GPU, or the CPU if there is none.

        A rank that sees only one GPU uses that one.
        """
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())

    @cached_property
    def rendezvous(self) -> Rendezvous:
        """Used by the ranks to find each other, before and while they are connected."""
        return Rendezvous(self)

    @property
    def collective_timeout(self) -> timedelta:
        """Longest wait in any one collective, also for a rank that reads data.

        Whole seconds: NCCL's options drop microseconds,
        and torch warns if its own time limit differs from theirs.
        """
        longest = max(self.rendezvous.collective_seconds, self.rendezvous.read_seconds)
        return timedelta(seconds=round(longest))

    def start(self, backend: str | None = None, timeout_s: float | None = None) -> None:
        """Connect the ranks. If a rank dies or hangs, the others raise within `timeout_s`.

        Args:
            backend: torch.distributed backend. The default is gloo for CPU tensors and NCCL for GPU
                tensors. It must include gloo, because barriers and single numbers use CPU tensors.
            timeout_s: longest wait in any one collective, seconds (default `collective_timeout`).

        Raises:
            UserError, SystemExit: not all ranks joined in time (one rank names the missing ones),
                the port is taken, or the limit on open files is too low; see `Rendezvous`.
        """
        if self.world_size == 1:
            return
        backends = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(self.device)
            backends = "cpu:gloo,cuda:nccl"
        timeout = self.collective_timeout if timeout_s is None else timedelta(seconds=timeout_s)
        # gloo connects two ranks when they first communicate,
        # instead of each rank to every other one here.
        os.putenv(LAZY_CONNECTIONS, environment().get(LAZY_CONNECTIONS, "1"))
        self.rendezvous.run_all("arrival", lambda: None)
        # gloo would use the interface to which this host's own name resolves.
        interface = environment().get(GLOO_INTERFACE) or self.rendezvous.interface()
        if interface is not None:
            os.putenv(GLOO_INTERFACE, interface)
        with self.rendezvous.together("connection", self._connection_mistake(interface)):
            dist.init_process_group(
                backend or backends,
                store=self.rendezvous.store(self.rendezvous.join_seconds),
                rank=self.rank,
                world_size=self.world_size,
                timeout=timeout,
                pg_options=nccl_options(timeout),
            )
            # Connect the ranks that `all_reduce_sum` uses.
            # If one dies meanwhile, gloo itself may wait forever.
            dist.all_reduce(torch.zeros(1), async_op=True).wait(timeout)

    def _connection_mistake(self, interface: str | None) -> UserError:
        """Return what it means if torch.distributed cannot connect the ranks,
        which have all joined.
        """
        bound = f" bound to {interface}" if interface is not None else ""
        return UserError(
            "distributed.join",
            f"the ranks on {self.world_size // self.local_world_size} nodes",
            f"all joined, but gloo{bound} cannot connect them to each other",
            f"Export {GLOO_INTERFACE} on each node, "
            "as the network interface that the other nodes can reach (see: ip "
            "address), and allow connections on any port",
        )

    def wait_for_data(self, seconds: float) -> None:
        """Let the ranks wait in a collective for one that reads data for this long.

        Call before new groups are made.
        """
        self.rendezvous.read_seconds = seconds + READ_MARGIN
        if self.world_size > 1:
            _set_pg_timeout(self.collective_timeout)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.all_reduce_sum(torch.zeros(1))

    def wait_for_all(self, work: Future[Result] | None) -> Result | None:
        """Wait until the work of every rank (None: it has none) is done,
        and return this rank's result.

        All ranks call it together. Unlike a barrier, which has a time limit, it waits for as long
        as the health monitor permits.
        """
        busy = torch.ones(1)
        while busy:
            busy[0] = work is not None and bool(wait([work], ROUND_SECONDS).not_done)
            self.all_reduce_max(busy)
        return work.result() if work is not None else None

    def on_rank_0(self, name: str, work: Callable[[], Result]) -> Result | None:
        """Do work on rank 0, in a thread with this name, while the others wait; return its result
        there, and None on the others.

        All ranks call it together. Raises on rank 0 what the work raises.
        """
        with ThreadPoolExecutor(1, name) as thread:
            return self.wait_for_all(thread.submit(work) if self.rank == 0 else None)

    def warm_up(self, device: torch.device) -> None:
        """Connect all ranks, through the host and between their devices.

        All ranks call it together.
        """
        self.barrier()
        self.all_reduce_max(self.all_reduce_sum(torch.zeros(1, device=device)))

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum the tensor over all ranks, in place on each, and return it."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Take the element-wise maximum over all ranks, in place on each, and return it."""
        if self.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Gather rows [n, columns], with any n on each rank, to [N, columns] on all,
        in rank order, on the host.
        """
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(rows)
        self.all_reduce_sum(sizes)
        first = int(sizes[: self.rank].sum())
        gathered = torch.zeros(int(sizes.sum()), *rows.shape[1:], dtype=rows.dtype)
        gathered[first : first + len(rows)] = rows
        return self.all_reduce_sum(gathered)

    def begin_all_reduce_sum(self, tensor: Tensor) -> dist.Work | None:
        """Start a sum and return without waiting; `wait()` on the result before use.

        None for a single process.
        """
        return dist.all_reduce(tensor, async_op=True) if self.world_size > 1 else None

    def broadcast_int(self, value: int) -> int:
        """Return rank 0's number (64-bit signed) on every rank."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64)
        dist.broadcast(tensor, src=0)
        return int(tensor.item())

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Copy rank 0's tensor, contiguous on the host or on the rank's device, to all ranks, in
        place on each, and return it.
        """
        if self.world_size == 1:
            return tensor
        content = tensor.view(-1).view(torch.uint8)
        for first in range(0, content.numel(), BROADCAST_BYTES):
            part = content[first : first + BROADCAST_BYTES]
            sent = part.to(self.device)
            dist.broadcast(sent, src=0)
            if self.rank and sent is not part:
                part.copy_(sent)
        return tensor

    def broadcast_bytes(self, content: bytes) -> bytes:
        """Return rank 0's bytes on every rank."""
        size = self.broadcast_int(len(content))
        if not size:
            return b""
        mine = bytearray(content if self.rank == 0 else size)
        return self.broadcast(torch.frombuffer(mine, dtype=torch.uint8)).numpy().tobytes()

    def hosts(self) -> list[str]:
        """Return the machine of each rank, under its launcher's name;
        the same list on every rank.
        """
        return [self.host] if self.world_size == 1 else self.rendezvous.gather("hosts", self.host)

    def sites(self) -> list[RankSite]:
        """Return where each rank runs; the same list on every rank. All ranks call it together,
        once, after `start`.
        """
        device = str(self.device)
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            device = f"{device} {properties.name} {getattr(properties, 'uuid', '')}".rstrip()
        if self.world_size == 1:
            return [RankSite(self.host, "", "", device)]
        given = environment().get(GLOO_INTERFACE)
        address = self.rendezvous.address() or ""
        interface = given or self.rendezvous.interface() or ""
        site = RankSite(self.host, address, interface, device)
        texts = self.rendezvous.gather("sites", site.to_text())
        return [RankSite.from_text(text) for text in texts]

    def stop(self) -> None:
        """Leave the group. Does nothing if `start` was not called."""
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()
