"""Simulate a CUDA device: programs take their CUDA code paths,
but nothing is computed or allocated.

Tensors of the simulated device are PyTorch's "meta" tensors that claim to be on `DEVICE`. PyTorch's
fake tensors would work too, but a CPU build of PyTorch cannot run their backward pass, because its
engine requires an accelerator.

These raise an error: operands on two devices, reading a value or a size that depends on one
(`.item()`, `bool(tensor)`, `nonzero`), and blocking copies to the host. A non-blocking copy goes to
page-locked memory and copies nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from counted.gpus import Gpu
from mlbert.data import batches
from mlbert.ops import forms
from mlbert.ops.triton import device

DEVICE = torch.device("cuda", 0)
_META = torch.device("meta")
_PAGE = 1 << 40  # distance between the simulated addresses of two storages


class HostAccess(RuntimeError):
    """The program waits for the device or mixes devices."""


class PretendedCuda(TorchFunctionMode):
    """Replace the device by "meta" in arguments, and "meta" by the device in attributes."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        if name == "__get__":
            return _attribute(func, args[0])
        if name == "data_ptr" and _is_pretended(args[0]):
            return _address(args[0])
        if name == "pin_memory":
            return args[0]
        if name in ("cpu", "numpy", "tolist") and _is_pretended(args[0]):
            raise HostAccess(f".{name}() waits for the device")
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        return func(*map(_to_meta, args), **{key: _to_meta(value) for key, value in kwargs.items()})


def _is_pretended(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _attribute(func: Any, tensor: Tensor) -> Any:
    owner = getattr(func, "__self__", None)
    value = func(tensor)
    if owner is torch.Tensor.device and value == _META:
        return DEVICE
    return tensor.is_meta if owner is torch.Tensor.is_cuda else value


def _address(tensor: Tensor) -> int:
    """Return the simulated address of the first element;
    address ranges of storages do not overlap.
    """
    place = tensor.untyped_storage()._cdata * _PAGE
    return place + tensor.storage_offset() * tensor.element_size()


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _META if value.type == "cuda" else value
    return _META if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


class _Stream:
    """A CUDA stream, an event, or a context that makes a stream current."""

    cuda_stream = 0
    device = DEVICE

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


@contextlib.contextmanager
def pretended(gpu: Gpu, dispatch: TorchDispatchMode) -> Iterator[None]:
    """Make PyTorch see one such GPU in the block, and pass its operations to ``dispatch``."""
    properties = SimpleNamespace(
        multi_processor_count=gpu.multiprocessors, total_memory=gpu.memory_bytes
    )
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: divmod(gpu.capability, 10),
        "get_device_name": lambda device=None: gpu.name,
        "get_device_properties": lambda device=None: properties,
        "current_stream": _Stream,
        "stream": _Stream,
        "Stream": _Stream,
        "Event": _Stream,
        "empty_cache": lambda: None,
    }
    with contextlib.ExitStack() as context:
        for name, function in functions.items():
            context.enter_context(mock.patch.object(torch.cuda, name, function))
        # A simulated stream does not reach the modes.
        context.enter_context(mock.patch.object(Tensor, "record_stream"))
        mode = context.enter_context(PretendedCuda())
        engine = torch.autograd._engine_run_backward

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            # PyTorch turns the mode off while it calls the engine, so turn it on again.
            with mode:
                return engine(*args, **kwargs)

        context.enter_context(
            mock.patch.object(torch.autograd, "_engine_run_backward", run_backward)
        )
        context.enter_context(dispatch)
        for cached in (batches._copy_stream, forms.fastest_exact, device.multiprocessors):
            cached.cache_clear()
            context.callback(cached.cache_clear)
        yield
