"""The ranks that train together, and the few collectives that training needs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mlbert.distributed.place import RankPlace
from mlbert.distributed.rendezvous import Rendezvous

MOST_HOST_BYTES = 64


def nccl_options(timeout: timedelta) -> Any:
    """How a new group of ranks uses NCCL, where there are GPUs: on streams that go before the kernels they overlap."""
    if not torch.cuda.is_available():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # else torch warns that the group's own wins
    return options


@dataclass(frozen=True)
class World(RankPlace):
    """The ranks that train together, and this process's place among them."""

    @property
    def device(self) -> torch.device:
        """This rank's GPU, or the CPU where there is none. A rank that sees one GPU only takes that one."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())

    @cached_property
    def rendezvous(self) -> Rendezvous:
        """Over which the ranks find each other, before and while they are connected."""
        return Rendezvous(self)

    @property
    def collective_timeout(self) -> timedelta:
        """Longest wait of any one collective, and for the connection of a group of ranks."""
        return timedelta(seconds=self.rendezvous.collective_seconds)

    def start(self, backend: str | None = None, timeout_s: float | None = None) -> None:
        """Connects the ranks. A rank that dies or hangs makes the others raise within `timeout_s`.

        Args:
            backend: of torch.distributed; None: gloo for CPU tensors and, where there are GPUs, NCCL for theirs.
                Barriers and single numbers go over the CPU, so gloo must be among them.
            timeout_s: longest wait of any one collective, seconds (None: `collective_timeout`).

        Raises:
            UserError, SystemExit: not all ranks came together in time (one rank names those that did not), the port
                is taken, or the limit on open files is too low; see `Rendezvous`.
        """
        if self.world_size == 1:
            return
        backends = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(self.device)
            backends = "cpu:gloo,cuda:nccl"
        timeout = self.collective_timeout if timeout_s is None else timedelta(seconds=timeout_s)
        self.rendezvous.run_all("arrival", lambda: None)
        with self.rendezvous.together("connection"):
            dist.init_process_group(
                backend or backends,
                store=self.rendezvous.store(self.rendezvous.join_seconds),
                rank=self.rank,
                world_size=self.world_size,
                timeout=timeout,
                pg_options=nccl_options(timeout),
            )

    def barrier(self) -> None:
        """Returns once every rank is here."""
        self.all_reduce_sum(torch.zeros(1))

    def warm_up(self, device: torch.device) -> None:
        """Connects all ranks, over the host and between their devices; all ranks call it together."""
        self.barrier()
        self.all_reduce_max(self.all_reduce_sum(torch.zeros(1, device=device)))

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sums the tensor over all ranks, in place on each; returns it."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Raises the tensor to the largest values over all ranks, in place on each; returns it."""
        if self.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def gather_rows(self, rows: Tensor) -> Tensor:
        """The rows of every rank, rank by rank: [n, columns] of any n on each -> [N, columns] on all; on the host."""
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(rows)
        self.all_reduce_sum(sizes)
        first = int(sizes[: self.rank].sum())
        gathered = torch.zeros(int(sizes.sum()), *rows.shape[1:], dtype=rows.dtype)
        gathered[first : first + len(rows)] = rows
        return self.all_reduce_sum(gathered)

    def begin_all_reduce_sum(self, tensor: Tensor) -> dist.Work | None:
        """Starts such a sum and returns at once; `wait()` on the result before use. None for a single process."""
        return dist.all_reduce(tensor, async_op=True) if self.world_size > 1 else None

    def broadcast_int(self, value: int) -> int:
        """Rank 0's number on every rank (64 bits, signed)."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64)
        dist.broadcast(tensor, src=0)
        return int(tensor.item())

    def hosts(self) -> list[str]:
        """The machine of each rank, as its launcher calls it; the same list on every rank."""
        if self.world_size == 1:
            return [self.host]
        names = torch.zeros(self.world_size, MOST_HOST_BYTES, dtype=torch.uint8)
        own = self.host.encode()[:MOST_HOST_BYTES]
        names[self.rank, : len(own)] = torch.tensor(list(own), dtype=torch.uint8)
        self.all_reduce_sum(names)
        return [bytes(row[row > 0].tolist()).decode(errors="replace") for row in names]

    def stop(self) -> None:
        """Leaves the group; harmless where `start` did not happen."""
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()
