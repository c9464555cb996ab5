"""Values of the device that the host reads later, waiting for nothing that is queued behind them."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """The values that a tensor has now, in stream order.

    Args:
        values: any shape and type, on any device; may change afterwards.
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
        """The values on the host; waits until the device has computed them."""
        if self._done is not None:
            self._done.synchronize()
        return self._values
