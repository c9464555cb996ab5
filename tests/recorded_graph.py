"""Emulate CUDA graphs without a GPU: record every operation and replay it on the same memory.

As in a graph, Python numbers are baked in, tensors are found by address, and it is an error to read
device values on the host or to copy host data to the device. Interpreted Triton kernels and
collectives are one operation each. Memory that a recorded function allocates is kept, as in a
graph's pool.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations that wait for the device (the host needs a size or value) or copy host data to it.
HOST_OPERATIONS = {
    **dict.fromkeys(("_local_scalar_dense", "item", "is_nonzero", "equal"), "reads a value"),
    **dict.fromkeys(
        (
            "nonzero",
            "masked_select",
            "unique_consecutive",
            "_unique2",
            "bincount",
            "repeat_interleave",
        ),
        "has a size that depends on values",
    ),
    "lift_fresh": "copies data of the host",
}
HOST_METHODS = (
    "tolist",
    "numpy",
    "item",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
)
COLLECTIVES = (
    "all_to_all_single",
    "all_reduce",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_gather_into_tensor",
    "all_gather_single",
)
UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


class HostAccess(AssertionError):
    """The recorded function did something that is not allowed during capture."""


class _Recorder(TorchDispatchMode):
    """Run each operation and record it with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple, dict, Any]] = []
        self.paused = False

    def run_as_one(
        self,
        call: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        again: Callable[..., None] | None = None,
    ) -> Any:
        """Run a call without recording its operations;
        replay calls `again` (default: the same call).
        """
        self.paused = True
        try:
            result = call(*args, **kwargs)
        finally:
            self.paused = False
        self.calls.append((again or call, args, kwargs, None))
        return result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in HOST_OPERATIONS:
            raise HostAccess(f"{func} {HOST_OPERATIONS[name]}")
        if name == "index" and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        ):
            raise HostAccess(f"{func} with a mask has a size that depends on values")
        out = func(*args, **kwargs)
        if name not in UNWRITTEN:
            self.calls.append((func, args, kwargs, out))
        return out


class _Watcher(TorchFunctionMode):
    """Raise an error for host reads that bypass the dispatcher."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in HOST_METHODS and not self._recorder.paused:
            raise HostAccess(f"Tensor.{name} reads values on the host")
        return func(*args, **(kwargs or {}))


class RecordedGraph:
    """A `mlbert.distributed.capture.Capture` that records operations.

    Attributes:
        num_operations: number of operations in the last recorded function.
    """

    def __init__(self) -> None:
        self.num_operations = 0

    def warm_up(self, function: Callable[[], None]) -> None:
        """Run the function once, as required before a capture."""
        function()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run and record the function (unlike a capture);
        the returned function replays its operations.
        """
        recorder = _Recorder()
        with (
            _kernels_as_operations(recorder),
            _collectives_as_operations(recorder),
            recorder,
            _Watcher(recorder),
        ):
            function()
        self.num_operations = len(recorder.calls)

        def replay() -> None:
            with torch.no_grad():
                for call, args, kwargs, before in recorder.calls:
                    _keep(before, call(*args, **kwargs))

        return replay


def _keep(before: Any, after: Any) -> None:
    """Copy new results to the memory of the old ones."""
    for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
        if (
            isinstance(old, Tensor)
            and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr()
        ):
            old.copy_(new)


@contextlib.contextmanager
def _kernels_as_operations(recorder: _Recorder) -> Iterator[None]:
    """Record each interpreted Triton kernel in the block as one operation."""
    try:
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        yield
        return
    launch = GridExecutor.__call__

    def recorded(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        recorder.run_as_one(lambda *a, **k: launch(executor, *a, **k), args, kwargs)

    GridExecutor.__call__ = recorded
    try:
        yield
    finally:
        GridExecutor.__call__ = launch


@contextlib.contextmanager
def _collectives_as_operations(recorder: _Recorder) -> Iterator[None]:
    """Record each collective in the block as one operation; replay waits for it."""
    originals = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}

    def recorded(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return recorder.run_as_one(originals[name], args, kwargs, again=again(name))

        return call

    def again(name: str) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            if (work := originals[name](*args, **kwargs)) is not None:
                work.wait()

        return call

    for name in originals:
        setattr(dist, name, recorded(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
