"""Run the source of the Gluon product in a model of Hopper's barriers, copies and products.

Gluon has no interpreter. The functions of `mlbert.ops.triton.gluon_product` run here unchanged, on
PyTorch tensors: `gl`, `tma`, `mbarrier` and the matrix products are replaced. Each partition of the
kernel is a thread. One of them runs at a time, and at every operation on a barrier a random one of
those that can continue is chosen. Copies and matrix products end at random later times, read their
sources only then, and a matrix product's operands are noted until it is waited for.

An mbarrier is modeled by its phase, its pending arrivals and its pending bytes; a wait only knows
the phase's parity (PTX ISA, "mbarrier.test_wait").

Not modeled: the threads of a partition, which Triton synchronizes, the fences between proxies, and
memory order.
"""

from __future__ import annotations

import inspect
import random
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mlbert.ops.triton import gluon_product

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class ModelError(Exception):
    """The kernel has used the model in a way that the GPU does not allow."""


@dataclass
class Barrier:
    """An mbarrier with one expected arrival in a phase."""

    phase: int = 0
    pending: int = 1
    bytes: int = 0

    def arrive(self, expected: int = 0) -> None:
        self.bytes += expected
        if not self.pending:
            raise ModelError("a second arrival in a phase")
        self.pending -= 1
        self._advance()

    def complete(self, count: int) -> None:
        self.bytes -= count
        self._advance()

    def is_over(self, parity: int) -> bool:
        return self.phase & 1 != parity

    def _advance(self) -> None:
        if not self.pending and not self.bytes:
            self.phase += 1
            self.pending = 1


@dataclass
class Tile:
    """Shared memory, with the number of unfinished operations that read it."""

    data: Tensor
    layout: Any = None
    readers: list[int] = field(default_factory=lambda: [0])

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def permute(self, order: Sequence[int]) -> Tile:
        return Tile(self.data.permute(order), self.layout, self.readers)

    def store(self, value: Tensor) -> None:
        if self.readers[0]:
            raise ModelError("shared memory is overwritten while it is read")
        self.data.copy_(value)

    def load(self, layout: Any) -> Tensor:
        del layout
        return self.data.clone()


class Parts:
    """Shared memory, or barriers, selected by an index."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts

    def index(self, number: int) -> Any:
        return self._parts[number]


@dataclass
class Pointer:
    """An address in a one-dimensional tensor."""

    memory: Tensor
    offset: Any = 0

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)


class SaturatingTensor(Tensor):
    """Convert to FP8 as the GPU does: what is too large becomes the largest number."""

    def to(self, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        if dtype in FP8:
            largest = torch.finfo(dtype).max
            return self.clamp(-largest, largest).as_subclass(Tensor).to(dtype)
        return self.as_subclass(Tensor).to(dtype).as_subclass(SaturatingTensor)


@dataclass
class Descriptor:
    """A tensor in global memory of which TMA copies blocks."""

    memory: Tensor
    block: tuple[int, int]
    layout: Any = None

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    def bytes(self) -> int:
        return self.block[0] * self.block[1] * self.dtype.itemsize

    def read(self, row: int, column: int) -> Tensor:
        found = torch.zeros(self.block, dtype=self.dtype)
        part = self.memory[row : row + self.block[0], column : column + self.block[1]]
        found[: part.shape[0], : part.shape[1]] = part
        return found

    def write(self, row: int, column: int, values: Tensor) -> None:
        part = self.memory[row : row + self.block[0], column : column + self.block[1]]
        part.copy_(values[: part.shape[0], : part.shape[1]])


class Model:
    """One program: partitions, and operations that have begun.

    Args:
        seed: of the order.
        program, programs: which program this is, of how many.
    """

    def __init__(self, seed: int, program: int, programs: int) -> None:
        self._random = random.Random(seed)
        # Some copies must end late to show that no partition waits for them.
        self._ends_newest_first = self._random.random() < 0.5
        self._ending = self._random.choice((0.1, 0.5, 0.9))
        self._program = program
        self._programs = programs
        self._later: list[Callable[[], None]] = []
        self._stores: dict[int, list[int]] = {}  # partition -> number of its unread stores
        self._products: dict[int, list[list[Any]]] = {}
        self._condition = threading.Condition()
        self._alive = 0  # partitions that have not ended
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._running: int | None = None
        self._is_stopped = False
        self._error: BaseException | None = None
        self._local = threading.local()
        self.allocated = 0

    def partitions(self, functions: Sequence[tuple[Callable[..., None], Sequence[Any]]]) -> None:
        """Run each function in a thread, until all and what they have begun have ended."""
        self._alive = len(functions)
        threads = []
        for number, (function, given) in enumerate(functions):
            self._stores[number] = [0]
            self._products[number] = []
            threads.append(threading.Thread(target=self._run, args=(number, function, given)))
        for thread in threads:
            thread.start()
        try:
            while self._alive or self._later:
                self._continue_one()
        finally:
            with self._condition:
                self._is_stopped = True
                self._condition.notify_all()
            for thread in threads:
                thread.join()

    def _run(self, number: int, function: Callable[..., None], given: Sequence[Any]) -> None:
        self._local.number = number
        try:
            self.until(lambda: True)
            function(*given)
        except BaseException as error:
            self._error = self._error or error
        with self._condition:
            self._alive -= 1
            self._running = None
            self._condition.notify_all()

    def _continue_one(self) -> None:
        """Let a random partition run to its next operation, or end what has begun."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._running is None and len(self._waiting) == self._alive
            )
            if self._error is not None:
                raise self._error
            choices = [number for number, is_met in self._waiting.items() if is_met()]
            if self._later and (not choices or self._random.random() < self._ending):
                oldest = 0 if not self._ends_newest_first else len(self._later) - 1
                self._later.pop(self._random.randint(oldest, len(self._later) - 1))()
            elif choices:
                self._running = self._random.choice(choices)
                del self._waiting[self._running]
                self._condition.notify_all()
            elif self._alive:
                raise ModelError("deadlock")

    def until(self, is_met: Callable[[], bool]) -> None:
        """Let others run, and continue at some time when the condition is met."""
        number = self._local.number
        with self._condition:
            self._waiting[number] = is_met
            if self._running == number:
                self._running = None
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._running == number or self._is_stopped)
            if self._is_stopped:
                raise ModelError("stopped")

    # What the kernel calls.

    def wait(self, barrier: Barrier, parity: int) -> None:
        self.until(lambda: barrier.is_over(int(parity)))

    def expect(self, barrier: Barrier, count: int) -> None:
        self.until(lambda: True)
        barrier.arrive(count)

    def arrive(self, barrier: Barrier, count: int) -> None:
        assert count == 1
        self.until(lambda: True)
        barrier.arrive()

    def load_tile(self, source: Descriptor, place: list[int], barrier: Barrier, to: Tile) -> None:
        row, column = place

        def finish() -> None:
            if to.readers[0]:
                raise ModelError("a copy overwrites a tile that is read")
            to.data.copy_(source.read(row, column))
            barrier.complete(source.bytes())

        self._begin(finish)

    def store_tile(self, target: Descriptor, place: list[int], tile: Tile) -> None:
        row, column = place
        unread = self._stores[self._local.number]
        unread[0] += 1
        tile.readers[0] += 1

        def finish() -> None:
            target.write(row, column, tile.data)
            tile.readers[0] -= 1
            unread[0] -= 1

        self._begin(finish)

    def store_wait(self, pendings: int) -> None:
        unread = self._stores[self._local.number]
        self.until(lambda: unread[0] <= pendings)

    def multiply(self, a: Tile, b: Tile, total: Tensor, is_async: bool) -> Tensor:
        assert is_async
        a.readers[0] += 1
        # Products of a partition add to one accumulator, in order.
        self._products[self._local.number].append([a, b, total])
        return total

    def multiply_wait(self, num_outstanding: int, deps: tuple[Tensor]) -> Tensor:
        self.until(lambda: True)
        begun = self._products[self._local.number]
        while len(begun) > num_outstanding:
            a, b, total = begun.pop(0)
            total += a.data.float() @ b.data.float()
            a.readers[0] -= 1
        return deps[0]

    def _begin(self, finish: Callable[[], None]) -> None:
        self._later.append(finish)

    def allocate(self, dtype: Any, shape: Sequence[int], layout: Any) -> Any:
        if dtype == "barrier":
            self.allocated += 8 * shape[0]
            barriers = [Barrier() for _ in range(shape[0])]
            return Parts(barriers) if len(shape) > 1 else barriers[0]
        count, *tile = shape
        # Not zeros, so that what is read too early shows.
        tiles = [Tile(torch.full(tile, 3.0).to(dtype), layout) for _ in range(count)]
        self.allocated += sum(part.data.nbytes for part in tiles)
        return Parts(tiles)

    def names(self) -> dict[str, Any]:
        """Return what replaces the globals of the kernel's module."""

        def constant(*_: Any, **__: Any) -> None:
            return None

        def load(pointer: Pointer) -> Tensor:
            return pointer.memory[pointer.offset]

        def store(pointer: Pointer, values: Tensor) -> None:
            pointer.memory[pointer.offset] = values

        def raise_to(pointer: Pointer, value: Tensor, sem: str) -> None:
            del sem
            pointer.memory.copy_(torch.maximum(pointer.memory, value))

        def zeros(shape: Sequence[int], dtype: torch.dtype, layout: Any) -> Tensor:
            del layout
            return torch.zeros(*shape, dtype=dtype).as_subclass(SaturatingTensor)

        gl = types.SimpleNamespace(
            program_id=lambda _: self._program,
            num_programs=lambda _: self._programs,
            allocate_shared_memory=self.allocate,
            int64="barrier",
            float32=torch.float32,
            bfloat16=torch.bfloat16,
            constexpr=int,
            static_range=range,
            warp_specialize=lambda functions, *_: self.partitions(functions),
            NVMMADistributedLayout=constant,
            SliceLayout=constant,
            arange=lambda first, last, _: torch.arange(first, last),
            load=load,
            store=store,
            atomic_max=raise_to,
            zeros=zeros,
            where=lambda keep, value, other: torch.where(keep, value, other).as_subclass(
                SaturatingTensor
            ),
            sum=torch.sum,
            max=torch.amax,
            abs=torch.abs,
            thread_barrier=constant,
        )
        return {
            **vars(gluon_product),
            "gl": gl,
            "PAIR": gluon_product.CONSUMERS,
            "mbarrier": types.SimpleNamespace(
                MBarrierLayout=constant,
                init=constant,
                wait=self.wait,
                expect=self.expect,
                arrive=self.arrive,
            ),
            "tma": types.SimpleNamespace(
                async_copy_global_to_shared=self.load_tile,
                async_copy_shared_to_global=self.store_tile,
                store_wait=self.store_wait,
            ),
            "fence_async_shared": constant,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.multiply_wait,
            "gelu_parts": gelu_parts,
        }


def gelu_parts(y: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    """Return GELU and its derivative in the tanh form."""
    assert not exact
    y = y.as_subclass(Tensor)
    slope = torch.ops.aten.gelu_backward(torch.ones_like(y), y, approximate="tanh")
    return (
        F.gelu(y, approximate="tanh").as_subclass(SaturatingTensor),
        slope.as_subclass(SaturatingTensor),
    )


def run_kernel(
    arguments: Sequence[Any], programs: int, seed: int, left_out: tuple[str, str] | None = None
) -> int:
    """Run all programs, one after the other, and return the bytes of shared memory of one.

    ``left_out``: name of a function of the kernel, and a line of it that does not run.
    """
    allocated = 0
    for program in range(programs):
        model = Model(seed + program, program, programs)
        names = model.names()
        for name in ("produce", "consume", "gluon_product_kernel"):
            function = getattr(gluon_product, name).fn
            if left_out is not None and left_out[0] == name:
                exec(_without(inspect.getsource(function), left_out[1]), names)
            else:
                names[name] = types.FunctionType(function.__code__, names)
        names["gluon_product_kernel"](*arguments)
        allocated = model.allocated
    return allocated


def _without(source: str, line: str) -> str:
    """Return the source of a function without its decorator and a line."""
    lines = source[source.index("def ") :].splitlines()
    kept = [text for text in lines if text.strip() != line]
    assert len(kept) == len(lines) - 1, f"not one line {line!r}"
    return "\n".join(kept)
