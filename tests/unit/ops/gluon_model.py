"""Run the source of a Gluon kernel in a model of Hopper's barriers, copies and products.

Gluon has no interpreter. The functions of `gluon_product` and `gluon_attention_*` in `mlbert.ops`
run here unchanged, on PyTorch tensors: `gl`, `tl`, the copies, `mbarrier` and the matrix products
are replaced. So do the functions that attention shares with the Triton kernels, but for those whose
uint32 PyTorch lacks or that are inline assembly. Each partition of the kernel is a thread. One of
them runs at a time, and at every operation on a barrier a random one of those that can continue is
chosen. Copies and matrix products end at random later times, read their sources only then, and a
matrix product's operands are noted until it is waited for.

An mbarrier is modeled by its phase, its pending arrivals and its pending bytes; a wait only knows
the phase's parity (PTX ISA, "mbarrier.test_wait").

Products must not read what ``cp.async`` has written without a fence between the proxies after it.

Not modeled: the threads of a partition, which Triton synchronizes, layouts, which Triton verifies,
other fences, and memory order.
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.language import constexpr as tl_constexpr
from triton.runtime.jit import KernelInterface

from mlbert.ops import dropout

COPY_THREADS = 32  # of a producer
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class ModelError(Exception):
    """The kernel has used the model in a way that the GPU does not allow."""


@dataclass
class Barrier:
    """An mbarrier, and the arrivals that it expects in a phase."""

    phase: int = 0
    expected: int = 1
    pending: int = 1
    bytes: int = 0

    def init(self, count: int) -> None:
        self.expected = self.pending = count

    def arrive(self, expected: int = 0, count: int = 1) -> None:
        self.bytes += expected
        if self.pending < count:
            raise ModelError("more arrivals in a phase than expected")
        self.pending -= count
        self._advance()

    def complete(self, count: int) -> None:
        self.bytes -= count
        self._advance()

    def is_over(self, parity: int) -> bool:
        return self.phase & 1 != parity

    def _advance(self) -> None:
        if not self.pending and not self.bytes:
            self.phase += 1
            self.pending = self.expected


@dataclass
class Tile:
    """Shared memory, with the number of unfinished operations that read it."""

    data: Tensor
    layout: Any = None
    readers: list[int] = field(default_factory=lambda: [0])
    # When ``cp.async`` wrote it last, in fences and such writes so far.
    written: list[int] = field(default_factory=lambda: [0])

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def permute(self, order: Sequence[int]) -> Tile:
        return Tile(self.data.permute(order), self.layout, self.readers, self.written)

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

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def read(self, mask: Any, other: float = 0) -> Tensor:
        """Return a copy of what is there, `other` where the mask is False. The memory must exist
        elsewhere.
        """
        if mask is None:
            return self.memory[self.offset].clone().as_subclass(Value)
        places, inside = torch.broadcast_tensors(torch.as_tensor(self.offset), mask)
        assert bool((places[inside] >= 0).all()), "a negative address"
        found = torch.where(inside, self.memory[torch.where(inside, places, 0)], other)
        return found.as_subclass(Value)


class Value(Tensor):
    """A tensor that is never changed in place. Converts to FP8 as the GPU does: what is too large
    becomes the largest number.
    """

    def __iadd__(self, other: Any) -> Tensor:
        return self + other

    def __isub__(self, other: Any) -> Tensor:
        return self - other

    def __imul__(self, other: Any) -> Tensor:
        return self * other

    def to(self, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        if dtype in FP8:
            largest = torch.finfo(dtype).max
            return self.clamp(-largest, largest).as_subclass(Tensor).to(dtype)
        return self.as_subclass(Tensor).to(dtype).as_subclass(Value)


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
        self._copies: dict[int, list[int]] = {}  # partition -> number of its unfinished copies
        self._next = 0
        self._arrivals: list[tuple[Barrier, list[int], set[int]]] = []
        self._clock = 0  # counts fences, and writes that need one
        self._fenced: dict[int, int] = {}  # partition -> time of its last fence
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
            self._copies[number] = []
            self._fenced[number] = 0
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
        self.until(lambda: True)
        barrier.arrive(count=count)

    def fence(self) -> None:
        if hasattr(self._local, "number"):
            self._clock += 1
            self._fenced[self._local.number] = self._clock

    def copy_rows(self, tile: Tile, source: Pointer, mask: Tensor) -> None:
        """Model ``cp.async``, which writes 0 where the mask is False."""
        copies = self._copies[self._local.number]
        number = self._next
        self._next += 1
        copies.append(number)

        def finish() -> None:
            if tile.readers[0]:
                raise ModelError("a copy overwrites a tile that is read")
            tile.data.copy_(source.read(mask))
            self._clock += 1
            tile.written[0] = self._clock
            copies.remove(number)
            self._arrive_for_copies()

        self._begin(finish)

    def arrive_after_copies(self, barrier: Barrier, increment_count: bool) -> None:
        """Let all threads of the producer arrive when their copies so far have ended."""
        assert not increment_count
        copies = self._copies[self._local.number]
        self._arrivals.append((barrier, copies, set(copies)))
        self._arrive_for_copies()

    def _arrive_for_copies(self) -> None:
        for entry in list(self._arrivals):
            barrier, copies, awaited = entry
            if not awaited & set(copies):
                self._arrivals.remove(entry)
                barrier.arrive(count=COPY_THREADS)

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

    def multiply(
        self, a: Tile | Tensor, b: Tile, total: Tensor, is_async: bool, use_acc: bool = True
    ) -> Tensor:
        assert is_async
        if not use_acc:
            total.fill_(torch.nan)  # until it is waited for
        factors = [a if isinstance(a, Tile) else Tile(a), b]
        for tile in factors:
            tile.readers[0] += 1
            if tile.written[0] > self._fenced[self._local.number]:
                raise ModelError("no fence between a copy and the product that reads it")
        # Products of a partition end in order.
        self._products[self._local.number].append([*factors, total, use_acc])
        return total

    def multiply_wait(self, num_outstanding: int, deps: tuple[Tensor, ...]) -> Any:
        self.until(lambda: True)
        begun = self._products[self._local.number]
        while len(begun) > num_outstanding:
            a, b, total, use_acc = begun.pop(0)
            product = a.data.float() @ b.data.float()
            total.copy_(total + product if use_acc else product)
            for tile in (a, b):
                tile.readers[0] -= 1
        return deps[0] if len(deps) == 1 else deps

    def _begin(self, finish: Callable[[], None]) -> None:
        self._later.append(finish)

    def allocate(self, dtype: Any, shape: Sequence[int], layout: Any) -> Any:
        if dtype == torch.int64:
            self.allocated += 8 * shape[0]
            barriers = [Barrier() for _ in range(shape[0])]
            return Parts(barriers) if len(shape) > 1 else barriers[0]
        count, *tile = shape
        # Not zeros, so that what is read too early shows.
        tiles = [Tile(torch.full(tile, 3.0).to(dtype), layout) for _ in range(count)]
        self.allocated += sum(part.data.nbytes for part in tiles)
        return Parts(tiles)

    def names(self, module: types.ModuleType) -> dict[str, Any]:
        """Return the globals of a kernel's module with what replaces them."""

        def constant(*_: Any, **__: Any) -> None:
            return None

        def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
            return pointer.read(mask, other)

        def store(pointer: Pointer, values: Any, mask: Any = None) -> None:
            if mask is None:
                pointer.memory[pointer.offset] = values
                return
            places, kept, inside = torch.broadcast_tensors(pointer.offset, values, mask)
            assert bool((places[inside] >= 0).all()), "a negative address"
            pointer.memory[places[inside]] = (
                kept[inside].as_subclass(Tensor).to(pointer.memory.dtype)
            )

        def raise_to(pointer: Pointer, value: Tensor, sem: str) -> None:
            del sem
            pointer.memory.copy_(torch.maximum(pointer.memory, value))

        def zeros(shape: Sequence[int], dtype: torch.dtype, layout: Any) -> Tensor:
            del layout
            return torch.zeros(*shape, dtype=dtype).as_subclass(Value)

        def where(keep: Any, value: Any, other: Any) -> Any:
            if isinstance(keep, bool):
                return value if keep else other
            return torch.where(keep, value, other).as_subclass(Value)

        def reduce_or(words: Tensor, axis: int) -> Tensor:
            return functools.reduce(torch.bitwise_or, words.unbind(axis))

        gl = types.SimpleNamespace(
            program_id=lambda _: torch.tensor(self._program).as_subclass(Value),
            num_programs=lambda _: self._programs,
            allocate_shared_memory=self.allocate,
            int64=torch.int64,
            int32=torch.int32,
            float32=torch.float32,
            bfloat16=torch.bfloat16,
            constexpr=int,
            static_range=range,
            warp_specialize=lambda functions, *_: self.partitions(functions),
            NVMMADistributedLayout=constant,
            SliceLayout=constant,
            DotOperandLayout=constant,
            arange=lambda first, last, _: torch.arange(first, last).as_subclass(Value),
            load=load,
            store=store,
            atomic_max=raise_to,
            zeros=zeros,
            where=where,
            sum=torch.sum,
            max=torch.amax,
            abs=torch.abs,
            exp2=torch.exp2,
            log2=torch.log2,
            maximum=torch.maximum,
            reshape=torch.reshape,
            broadcast=torch.broadcast_tensors,
            reduce_or=reduce_or,
            convert_layout=lambda x, *_, **__: x,
            thread_barrier=constant,
        )
        tl = types.SimpleNamespace(
            **{name: getattr(gl, name) for name in ("load", "where", "abs", "static_range")},
            uint32=torch.int64,
            int64=torch.int64,
            maximum=lambda a, b: max(a, b) if isinstance(a, int) else a.clamp(min=b),
            minimum=min,
        )
        replaced = {
            "gl": gl,
            "tl": tl,
            "mbarrier": types.SimpleNamespace(
                MBarrierLayout=constant,
                init=lambda barrier, count: barrier.init(count),
                wait=self.wait,
                expect=self.expect,
                arrive=self.arrive,
            ),
            "tma": types.SimpleNamespace(
                async_copy_global_to_shared=self.load_tile,
                async_copy_shared_to_global=self.store_tile,
                store_wait=self.store_wait,
            ),
            "async_copy": types.SimpleNamespace(
                async_copy_global_to_shared=self.copy_rows,
                mbarrier_arrive=self.arrive_after_copies,
            ),
            "fence_async_shared": self.fence,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.multiply_wait,
            "gelu_parts": gelu_parts,
            "mix32": mix32,
            "load_key": lambda key: key,
            "copied_signs": copied_signs,
            "select_pairs": select_pairs,
        }
        return _runnable(module, replaced, {})


def _runnable(
    module: types.ModuleType, replaced: dict[str, Any], known: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return a module's globals with Triton's constants as values and its functions as Python."""
    if module.__name__ in known:
        return known[module.__name__]
    names = known[module.__name__] = dict(vars(module))
    for name, value in vars(module).items():
        if name in replaced:
            names[name] = replaced[name]
        elif isinstance(value, tl_constexpr):
            names[name] = value.value
        elif isinstance(value, KernelInterface):
            home = _runnable(sys.modules[value.fn.__module__], replaced, known)
            names[name] = types.FunctionType(value.fn.__code__, home)
    return names


def mix32(words: Tensor) -> Tensor:
    """Return mix32 of `mlbert.ops.dropout` of the low 32 bits of int64 words."""
    return dropout._mix32_tensor(words & dropout.MASK32)


def copied_signs(words: Tensor, chosen: Tensor) -> Tensor:
    """Return `mask.copied_signs` of words in int64, in int64."""
    masks = torch.zeros_like(words)
    for byte in range(4):
        top = words >> (8 * (chosen >> (4 * byte) & 7) + 7) & 1
        masks |= top * (0xFF << (8 * byte))
    return masks


def select_pairs(weights: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Return `mask.select_pairs` of masks in int64."""
    half = torch.arange(weights.shape[1]) % 2 * 16
    return torch.where(masks >> half & 0xFFFF != 0, weights, 0.0), masks


def gelu_parts(y: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    """Return GELU and its derivative in the tanh form."""
    assert not exact
    y = y.as_subclass(Tensor)
    slope = torch.ops.aten.gelu_backward(torch.ones_like(y), y, approximate="tanh")
    return (
        F.gelu(y, approximate="tanh").as_subclass(Value),
        slope.as_subclass(Value),
    )


def run_kernel(
    kernel: KernelInterface,
    arguments: Sequence[Any],
    programs: int,
    seed: int,
    left_out: tuple[str, str] | None = None,
) -> int:
    """Run all programs, one after the other, and return the bytes of shared memory of one.

    ``left_out``: name of a function of the kernel, and a line of it that does not run.
    """
    module = sys.modules[kernel.fn.__module__]
    allocated = 0
    for program in range(programs):
        model = Model(seed + program, program, programs)
        names = model.names(module)
        if left_out is not None:
            name, line = left_out
            exec(_without(inspect.getsource(getattr(module, name).fn), line), names)
        names[kernel.fn.__name__](*arguments)
        allocated = model.allocated
    return allocated


def _without(source: str, line: str) -> str:
    """Return the source of a function without its decorator and a line."""
    lines = source[source.index("def ") :].splitlines()
    kept = [text for text in lines if text.strip() != line]
    assert len(kept) == len(lines) - 1, f"not one line {line!r}"
    return "\n".join(kept)
