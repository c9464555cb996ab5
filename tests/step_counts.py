"""Count the memory passes that forward and backward make between kernels,
so that tests can limit them.

Counts these operations of PyTorch's dispatcher, including autograd's,
if the result has at least `least` elements:

    fills   zeros, zeros_like, new_zeros, zero_, fill_, full, full_like, new_full
    adds    add and add_ of two tensors of that size: sums of gradients
    casts   _to_copy and copy_ that change the type

Triton kernels are skipped, so that their interpreter is not counted;
their outputs are uninitialized.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {
    **dict.fromkeys(
        ("zeros", "zeros_like", "new_zeros", "zero_", "fill_", "full", "full_like", "new_full"),
        "fills",
    ),
    **dict.fromkeys(("add", "add_"), "adds"),
    **dict.fromkeys(("_to_copy", "copy_"), "casts"),
}

# (kind, type of the result) -> number of operations
Counts = Counter[tuple[str, str]]


class _Counting(TorchDispatchMode):
    def __init__(self, least: int) -> None:
        super().__init__()
        self._least = least
        self.counts = Counts()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        source = None
        if args:
            source = args[-1] if name == "copy_" else args[0]
        before = source.dtype if isinstance(source, Tensor) else None
        out = func(*args, **(kwargs or {}))
        kind = KINDS.get(name)
        if kind is None or not isinstance(out, Tensor) or out.numel() < self._least:
            return out
        is_sum = all(isinstance(x, Tensor) and x.numel() >= self._least for x in args[:2])
        if (
            kind == "fills"
            or (kind == "adds" and is_sum)
            or (kind == "casts" and out.dtype != before)
        ):
            self.counts[kind, str(out.dtype).removeprefix("torch.")] += 1
        return out


@contextmanager
def counted(least: int) -> Iterator[Counts]:
    """Count the operations in the block with results of at least `least` elements."""
    with pytest.MonkeyPatch.context() as patch, _Counting(least) as mode:
        if os.environ.get("TRITON_INTERPRET") == "1":
            from triton.runtime.interpreter import GridExecutor

            patch.setattr(GridExecutor, "__call__", lambda *arguments, **options: None)
        yield mode.counts
