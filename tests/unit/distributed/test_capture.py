"""What surrounds a CUDA graph's capture, with PyTorch's graphs replaced: there is no GPU."""

import contextlib
import weakref
from unittest import mock

import torch

from mlbert.distributed.capture import CudaCapture


def test_nothing_of_a_warm_up_is_alive_in_the_capture(monkeypatch):
    """A cycle, such as a traceback and its frame, keeps a backward graph alive until it is
    collected.
    """
    for name in ("Stream", "CUDAGraph", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, mock.Mock())
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **kwargs: contextlib.nullcontext())
    overridden: list[bool] = []
    monkeypatch.setattr(
        torch.autograd.graph, "set_override_stale_capture_stream", overridden.append, raising=False
    )
    node = torch.ones((), requires_grad=True).exp()
    cycle = [node]
    cycle.append(cycle)
    left = weakref.ref(node)
    alive = []
    del node, cycle
    CudaCapture(torch.device("cuda")).record(lambda: alive.append(left() is not None))
    assert alive == [False]
    assert overridden == [True]
