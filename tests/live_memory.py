"""Count the bytes of live tensors, and measure the memory that captured graphs need."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Count the live bytes, and their peak, of tensors created while this mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._paused = False
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        old = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves((args, kwargs)) if _counts(tensor)}
        for tensor in tree_leaves(out):
            if _counts(tensor) and not self._paused and (storage := tensor.untyped_storage()).data_ptr() not in old:
                self._storages[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.now())
        return out

    def now(self) -> int:
        """Return the number of live bytes."""
        self._storages = {key: value for key, value in self._storages.items() if not value[0].expired()}
        return sum(size for _, size in self._storages.values())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing within the block: its memory belongs to a graph's pool."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False


class MeasuredPool:
    """A `mlbert.distributed.capture.Capture` without graphs, whose recorded functions allocate no memory on replay.

    Attributes:
        sizes: peak bytes of each recorded function.
        alive: bytes alive before the first warm-up and before each recording.
    """

    def __init__(self, memory: LiveMemory) -> None:
        self._memory = memory
        self.sizes: list[int] = []
        self.alive: list[int] = []

    def warm_up(self, function: Callable[[], None]) -> None:
        self.alive = self.alive or [self._memory.now()]
        function()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        self.alive.append(self._memory.now())
        self._memory.most = 0
        function()
        self.sizes.append(self._memory.most - self.alive[-1])

        def replay() -> None:
            with self._memory.paused():
                function()

        return replay


def _counts(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type != "meta"
