"""Record a program's launches on a simulated device, the bytes that each moves,
and the memory in use.

Bytes read and written count every tensor once per operation, however often the kernel accesses it.
A multiply-add is 2 FLOPs. Views and allocations move nothing. Operations are PyTorch's (one launch
each), Triton kernels and cublasLt products. Memory is that of tensors, rounded up to `BLOCK` bytes
as in PyTorch's allocator; a recorded graph keeps its peak memory.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from counted.access import access, bind_launch
from counted.gpus import Gpu
from counted.pretend import DEVICE, HostAccess, pretended
from mlbert.ops import api as ops
from mlbert.ops import cublaslt
from mlbert.ops.cublaslt_library import WORKSPACE_BYTES, Epilogue
from mlbert.training import step

BLOCK = 512
WORKSPACE_STREAMS = 2  # the stream of the run and the stream that captures
_WRITE_ONLY = ("copy_", "zero_", "fill_", "uniform_", "normal_")
_UNMOVED = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "set_",
    "_unsafe_view",
)
_MAY_COPY = ("reshape", "contiguous", "to")  # return a view or a copy
_PRODUCTS = ("mm", "addmm", "bmm", "_scaled_mm")
_COLLECTIVES = (
    "all_reduce",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_gather_into_tensor",
    "all_gather_single",
)
_WRITING_EPILOGUES = (Epilogue.DGELU_BGRAD, Epilogue.BGRADB)
# These move data between devices; all others require operands on one device.
_MOVES = ("copy_", "_to_copy", "_copy_from")


@dataclass(frozen=True)
class Operand:
    """A tensor of an operation.

    ``buffer`` is the name that `Recorder.name` gave its memory, or empty.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    buffer: str

    @property
    def size(self) -> int:
        """Return the size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Operation:
    """A launch.

    Attributes:
        kind: "torch", "triton", "cublaslt" or "collective".
        name: name of the operation or kernel.
        module: module of a Triton kernel.
        reads, writes: operands that the launch moves.
        arguments: operands and numbers of a Triton kernel, by name.
        flops: FLOPs of a product.
    """

    kind: str
    name: str
    module: str = ""
    reads: tuple[Operand, ...] = ()
    writes: tuple[Operand, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    flops: int = 0

    @property
    def moved(self) -> int:
        """Return the bytes read and written."""
        return sum(operand.size for operand in (*self.reads, *self.writes))


@dataclass
class Memory:
    """Bytes of live tensors by buffer name, the graph pools, and the peak of both together."""

    live: Counter[str] = field(default_factory=Counter)
    pools: list[Memory] = field(default_factory=list)
    peak: int = 0

    def add(self, name: str, size: int) -> None:
        """Add allocated memory."""
        self.live[name] += size
        self.peak = max(self.peak, self.live.total() + sum(pool.peak for pool in self.pools))

    def keep(self, pool: Memory) -> None:
        """Add a pool that is new or has grown."""
        if not any(pool is known for known in self.pools):
            self.pools.append(pool)
        self.add("", 0)


class Recorder(TorchDispatchMode):
    """Records operations and memory; use `recording`.

    Attributes:
        operations: operations in order; clear the list to start counting again.
        memory: memory outside graphs, and the pools.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.memory = Memory()
        self._stores: dict[
            int, tuple[str, int, Memory]
        ] = {}  # name, size and owner of each live storage
        self._home = self.memory
        self._values_are_read = False

    def name(self, tensor: Tensor, name: str) -> None:
        """Give the tensor's memory a name, under which it is counted from then on."""
        with torch._C.DisableTorchFunction():
            key = tensor.untyped_storage()._cdata
        old, size, home = self._stores[key]
        home.live[old] -= size
        home.live[name] += size
        self._stores[key] = name, size, home

    @contextlib.contextmanager
    def start_up(self) -> Iterator[None]:
        """Allow the host to read values, which are 0, in the block but not inside graphs."""
        self._values_are_read = True
        try:
            yield
        finally:
            self._values_are_read = False

    @contextlib.contextmanager
    def graph(self, pool: Memory) -> Iterator[list[Operation]]:
        """Record the block as a graph: operations go to the returned list,
        and allocations to the pool.
        """
        outside = self.operations
        self.operations = []
        self._home = pool
        may_read = self._values_are_read
        self._values_are_read = False
        inside = self.operations
        try:
            yield inside
        finally:
            self._home = self.memory
            self.operations = outside
            self._values_are_read = may_read
            self.memory.keep(pool)

    def operand(self, tensor: Tensor) -> Operand:
        """Return the operand of a tensor; an expanded tensor counts with its size in memory."""
        shape = tuple(
            n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or n == 1
        )
        name = self._stores.get(tensor.untyped_storage()._cdata, ("", 0, self.memory))[0]
        return Operand(shape, tensor.dtype, name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            kind = _kind(func)
            tensors = list(_tensors((*args, *kwargs.values())))
            if not kind.is_view:
                _check_devices(kind.name, tensors)
            if kind.name == "copy_" and args[1].is_meta and not args[0].is_meta:
                return self._copy_to_host(*args, **kwargs)
            if kind.name == "_local_scalar_dense" and args[0].is_meta:
                if not self._values_are_read:
                    raise HostAccess("a value is read: the host waits for the device")
                return 0.0 if args[0].is_floating_point() else 0
            # PyTorch's FP8 product with `out` does not support meta tensors.
            is_given = kind.name == "_scaled_mm" and "out" in kwargs
            out = kwargs["out"] if is_given else func(*args, **kwargs)
            if not kind.is_view:
                results = [result for result in _tensors((out,)) if result.is_meta]
                fresh = [result for result in results if self._keep(result)]
                if kind.moves and (results or any(tensor.is_meta for tensor in tensors)):
                    changed = list(_tensors(kind.written(args, kwargs)))
                    self._note(kind, tensors, changed, fresh)
            return out

    def launch(self, kernel: JITFunction[Any], bound: dict[str, Any]) -> None:
        """Record a Triton kernel with its arguments."""
        bound = {
            name: value.base if isinstance(value, TensorDescriptor) else value
            for name, value in bound.items()
        }
        with torch._C.DisableTorchFunction():
            tensors = {name: value for name, value in bound.items() if isinstance(value, Tensor)}
            if strays := [name for name, value in tensors.items() if not value.is_meta]:
                raise HostAccess(
                    f"arguments of {kernel.fn.__name__} are on the host: {', '.join(strays)}"
                )
            constexprs = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
            known = {
                name: value for name, value in bound.items() if value is None or name in constexprs
            }
            found = access(kernel, tuple(known.items()))
            # An update's launch for its last blocks touches a few elements of buffers
            # that another launch has covered.
            whole = {} if bound.get("first_block") else tensors
            reads = tuple(
                self.operand(value) for name, value in whole.items() if name in found.reads
            )
            writes = tuple(
                self.operand(value) for name, value in whole.items() if name in found.writes
            )
            arguments = {
                name: self.operand(value) if name in tensors else value
                for name, value in bound.items()
            }
        module = kernel.fn.__module__.removeprefix("mlbert.")
        self.operations.append(
            Operation("triton", kernel.fn.__name__, module, reads, writes, arguments)
        )

    def product(self, out: Tensor, left: Tensor, right: Tensor, **settings: Any) -> bool:
        """Record a call of `mlbert.ops.cublaslt_library.Library.product`."""
        with torch._C.DisableTorchFunction():
            operands = {
                name: value for name, value in settings.items() if isinstance(value, Tensor)
            }
            _check_devices("product", [out, left, right, *operands.values()])
            epilogue = settings.get("epilogue", Epilogue.NONE)
            written = {"amax_out"} | ({"bias"} if epilogue in _WRITING_EPILOGUES else set())
            written |= {"aux"} if epilogue == Epilogue.GELU_AUX_BIAS else set()
            reads = [
                left,
                right,
                *(value for name, value in operands.items() if name not in written),
            ]
            if settings.get("adds"):
                reads.append(out)
            writes = [out, *(value for name, value in operands.items() if name in written)]
            inner = left.shape[0 if settings.get("left_transposed") else 1]
            read = tuple(map(self.operand, reads))
            written_operands = tuple(map(self.operand, writes))
        flops = 2 * out.numel() * inner
        self.operations.append(
            Operation("cublaslt", epilogue.name, "", read, written_operands, {}, flops)
        )
        return True

    def collective(self, name: str, buffer: Tensor) -> None:
        """Record a collective of torch.distributed on this buffer."""
        with torch._C.DisableTorchFunction():
            if buffer.is_meta:
                self.operations.append(Operation("collective", name, "", (self.operand(buffer),)))

    def _copy_to_host(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not non_blocking:
            raise HostAccess("a copy to the host waits for the device")
        self.operations.append(Operation("torch", "copy to the host", "", (self.operand(source),)))
        return target

    def _keep(self, tensor: Tensor) -> bool:
        """Return True if the tensor's memory is new, and count it until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._stores:
            return False
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self._stores[key] = "", size, self._home
        self._home.add("", size)
        weakref.finalize(storage, self._free, key).atexit = False
        return True

    def _free(self, key: int) -> None:
        name, size, home = self._stores.pop(key)
        home.live[name] -= size

    def _note(
        self, kind: _Kind, tensors: list[Tensor], changed: list[Tensor], fresh: list[Tensor]
    ) -> None:
        if not (changed or fresh):
            return
        reads = [
            x for x in tensors if x.is_meta and not (kind.is_blind and any(x is y for y in changed))
        ]
        flops = 0
        if kind.name in _PRODUCTS:
            factors = [x for x in reads if x.ndim >= 2]
            flops = 2 * (fresh or changed)[0].numel() * factors[-2].shape[-1]
        read = tuple(map(self.operand, reads))
        written = tuple(map(self.operand, (*changed, *fresh)))
        self.operations.append(Operation("torch", kind.name, "", read, written, {}, flops))


@dataclass(frozen=True)
class _Kind:
    """Facts from the schema of a PyTorch operation.

    Attributes:
        places: position and name of each written argument.
        is_view: the result shares memory with an argument, and nothing is written.
        is_blind: written arguments are not read before.
    """

    name: str
    places: tuple[tuple[int, str], ...]
    is_view: bool
    is_blind: bool

    @property
    def moves(self) -> bool:
        """Return True if the operation moves memory."""
        return self.name not in _UNMOVED

    def written(self, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
        """Return the written arguments."""
        return [
            args[place] if place < len(args) else kwargs.get(name) for place, name in self.places
        ]


@functools.cache
def _kind(func: Any) -> _Kind:
    arguments = list(enumerate(func._schema.arguments))
    places = tuple(
        (i, x.name) for i, x in arguments if x.alias_info is not None and x.alias_info.is_write
    )
    shares = any(result.alias_info is not None for result in func._schema.returns)
    name = func._schema.name.partition("::")[2]
    is_blind = name in _WRITE_ONLY or any(x.is_out for _, x in arguments)
    return _Kind(name, places, shares and not places and name not in _MAY_COPY, is_blind)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _check_devices(name: str, tensors: list[Tensor]) -> None:
    """Raise an error for mixed devices; as in PyTorch, host scalars are allowed."""
    on_host = any(not tensor.is_meta and tensor.ndim for tensor in tensors)
    if name not in _MOVES and on_host and any(tensor.is_meta for tensor in tensors):
        raise HostAccess(f"{name} of tensors on the device and on the host")


class _Library:
    """Replaces cublasLt."""

    version = 0

    def __init__(self, recorder: Recorder) -> None:
        self.product = recorder.product
        self._workspace = torch.empty(
            WORKSPACE_STREAMS * WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE
        )


class _Work:
    """A collective that completes immediately."""

    def wait(self) -> None: ...


def _collective(recorder: Recorder, name: str) -> Callable[..., Any]:
    def begin(tensor: Tensor, *args: Any, **kwargs: Any) -> _Work:
        recorder.collective(name, tensor)
        return _Work()

    return begin


class RecordedCapture:
    """A `mlbert.distributed.capture.Capture` whose graphs are lists of launches."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._pool = Memory()

    def warm_up(self, function: Callable[[], None]) -> None:
        """Run the function once."""
        function()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run the function, record its launches, and return a function that replays them."""
        with self._recorder.graph(self._pool) as inside:
            function()
        return lambda: self._recorder.operations.extend(inside)


@contextlib.contextmanager
def recording(gpu: Gpu, choice: str = "auto") -> Iterator[Recorder]:
    """Simulate the GPU in the block, and record its operations, with this choice of OPS."""
    recorder = Recorder()

    def launch(
        kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any
    ) -> None:
        arguments, options = bind_launch(kernel, args, kwargs)
        recorder.launch(kernel, arguments | options)

    def capture(device: torch.device) -> RecordedCapture:
        return RecordedCapture(recorder)

    with contextlib.ExitStack() as context:
        context.enter_context(pretended(gpu, recorder))
        context.enter_context(mock.patch.object(JITFunction, "run", launch))
        context.enter_context(mock.patch.object(step, "CudaCapture", capture))
        for name in _COLLECTIVES:
            if hasattr(dist, name):
                context.enter_context(mock.patch.object(dist, name, _collective(recorder, name)))
        context.enter_context(mock.patch.object(dist, "new_group", return_value=None))
        cublaslt.use(_Library(recorder))  # type: ignore[arg-type]
        context.callback(cublaslt.use, None)
        context.callback(ops.select, "auto")
        ops.select(choice, DEVICE)
        yield recorder
