"""Copies of device values that the host reads later, without waiting for work queued after them."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor's current values, taken in stream order.

    Args:
        values: any shape and dtype, on any device; may change afterwards.
    """

    def __init__(self, values: Tensor) -> None:
        self._done = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
        else:
            self._values = values.clone()

    def read(self) -> Tensor:
        """Wait until the device has computed the values, and return them on the host."""
        if self._done is not None:
            self._done.synchronize()
        return self._values
