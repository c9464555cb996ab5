"""Capture queued device work once and replay it: CUDA graphs, and the same interface without them.

A graph repeats its kernels with the same arguments at the same addresses. So data that changes
between replays must be written into tensors before a replay, the captured function must not read
values on the host, and its allocations stay in the graph's memory pool. NCCL collectives are
captured like kernels; all ranks must capture and replay them alike.

    capture = CudaCapture(device)
    capture.warm_up(function)            on the side stream: compiles kernels, starts communicators
    replay = capture.record(function)    queues nothing
    replay()                             queues all of it; results are where the function wrote them
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Protocol

import torch

WARM_UPS = 2  # the second run uses what the first one built


class Capture(Protocol):
    """Captures functions that queue device work."""

    def warm_up(self, function: Callable[[], None]) -> None:
        """Run the function as often as capturing needs."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Capture the function and return a function that replays it."""


class CudaCapture:
    """Captures CUDA graphs that share one memory pool.

    Replay them in the order in which they were recorded.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], None]) -> None:
        """Run the function on the capture stream, as PyTorch requires."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                function()
        current.wait_stream(self._stream)

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Capture the function and return a function
        that queues the graph on the current stream.
        """
        # A warm-up's autograd graph that is still alive, in a cycle such as a traceback's, refers
        # to another stream, and the capture would wait for it.
        gc.collect()
        if override := getattr(
            torch.autograd.graph, "set_override_stale_capture_stream", None
        ):  # since PyTorch 2.13
            override(True)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads, such as the one that pins batches,
        # may make calls that are illegal in a capture.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            function()
        return graph.replay


class NoCapture:
    """The same interface without graphs: a replay calls the function."""

    def warm_up(self, function: Callable[[], None]) -> None:
        """Do nothing."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Return the function itself."""
        return function
