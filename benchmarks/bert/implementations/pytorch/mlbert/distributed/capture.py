"""Captures queued device work once and queues it again as a whole: CUDA graphs, and the same interface without them.

A graph repeats its kernels with the same arguments on the same addresses. So what changes from one replay to the next
is written into tensors beforehand, the captured function never looks at a value on the host, and whatever it allocates
stays in the graph's own pool of memory. Collectives of NCCL are captured like kernels; all ranks capture and replay
alike.

    capture = CudaCapture(device)
    capture.warm_up(function)            on the side stream: compiles kernels, starts communicators
    replay = capture.record(function)    queues nothing
    replay()                             queues all of it; its results are where the function left them
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

WARM_UPS = 2  # the second one runs with everything that the first one built


class Capture(Protocol):
    """How functions that queue device work are captured."""

    def warm_up(self, function: Callable[[], None]) -> None:
        """Runs the function, as often as capturing needs."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Captures the function; what is returned repeats it."""


class CudaCapture:
    """CUDA graphs that share one pool of memory: replay them in the order in which they were recorded.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], None]) -> None:
        """Runs the function on the stream that captures, as PyTorch asks for."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                function()
        current.wait_stream(self._stream)

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Captures the function; the returned one queues the graph on the current stream."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as the one that pins batches, may meanwhile do what this one must not.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            function()
        return graph.replay


class NoCapture:
    """The same steps without graphs: replaying calls the function."""

    def warm_up(self, function: Callable[[], None]) -> None:
        """Nothing to warm up."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """The function itself."""
        return function
