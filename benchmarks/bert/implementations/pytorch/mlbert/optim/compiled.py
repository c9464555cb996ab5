"""The native and the Triton form that every method has beside its plain one; who calls the kernels and with what.

Adam's direction may be scaled for each parameter (`mlbert.optim.adam`), which takes two passes. The other methods work
element by element in one pass (`mlbert.optim.acclip`, `madgrad`, `sgd`).
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from mlbert.host.native import NativeUnavailable
from mlbert.optim import native_update
from mlbert.optim.base import FlatOptimizer
from mlbert.optim.flat import FlatParameters
from mlbert.optim.shared_weights import Layout

if TYPE_CHECKING:
    from mlbert.optim.triton_update import TritonUpdate


class Formulas(IntEnum):
    """Which formulas the kernels compute; the numbers are those of csrc/cpu/optim.c and the Triton kernels."""

    ADAM = 0
    ACCLIP = 1
    MADGRAD = 2
    SGD = 3


class Scaling(IntEnum):
    """What a parameter's update is scaled by; the numbers are those of csrc/cpu/optim.c and the Triton kernels."""

    NONE = 0
    TRUST_RATIO = 1
    RMS = 2


class CompiledOptimizer(FlatOptimizer):
    """An optimizer with kernels.

    Args:
        flat, layout, **settings: as in `FlatOptimizer`.
        betas: decay rates of the first and second moment; SGD and MADGRAD read the first, as their momentum.
        eps: added to a denominator; SGD has none.
        weight_decay: for parameters whose segment has `decay`.
    """

    FORMULAS: ClassVar[Formulas]
    SCALING: ClassVar[Scaling] = Scaling.NONE

    def __init__(
        self,
        flat: FlatParameters,
        layout: Layout,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        **settings: Any,
    ) -> None:
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self._native: native_update.NativeUpdate | None = None
        self._triton: TritonUpdate | None = None
        super().__init__(flat, layout, **settings)

    @property
    def _numbers(self) -> dict[str, Any]:
        """The numbers of the update, as other programs' forms take them."""
        own = {"betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}
        return {**own, "max_grad_norm": self._limit}

    def _load(self, form: str) -> None:
        device, owners = self.flat.data.device, len(self.flat.segments)
        kinds: dict[str, Any] = {"formulas": self.FORMULAS, "scaling": self.SCALING}
        if form == "native":
            if device.type != "cpu":
                raise NativeUnavailable(f"it is for the CPU, the parameters are on {device}")
            self._native = native_update.NativeUpdate(self._pieces, owners, self._layout, **kinds)
        elif form == "triton":
            from triton import knobs

            from mlbert.optim.triton_update import TritonUpdate

            if device.type != "cuda" and not knobs.runtime.interpret:
                raise NativeUnavailable(f"it is for CUDA devices, the parameters are on {device}")
            shard, numbers = (self._pieces, owners, self._layout, device), self._numbers | kinds
            self._triton = TritonUpdate(*shard, known_norm=self._known_norm, **numbers)
            self.grad_norm, self.can_capture = self._triton.grad_norm, True
        else:
            super()._load(form)

    @property
    def num_updates(self) -> int:
        """Updates made so far; a skipped step does not count. With triton, reading it waits for the device."""
        return self._num_updates if self._triton is None else int(self._triton.updates)

    def _set_num_updates(self, number: int) -> None:
        self._num_updates = number
        if self._triton is not None:
            self._triton.updates.fill_(number)

    def set_learning_rate(self, lr: float) -> None:
        """The rate of the next `launch`; with triton only."""
        assert self._triton is not None, "triton only"
        self._triton.lr.fill_(lr)

    @torch.no_grad()
    def launch(self) -> None:
        """Queues one update, exchange of weights included, and decides nothing on the host; with triton only."""
        assert self._triton is not None, "triton only"
        grad = self._layout.take(self.flat.padded_grad)
        copy = self.weights.copy_to_write
        self._triton.launch(self._buffers(grad), after_block=self.weights.begin_sharing, copy=copy)
        self.weights.finish_sharing(copied=copy is not None)

    def _buffers(self, grad: Tensor) -> tuple[Tensor, ...]:
        """Weights, gradient and state of the shard, as the kernels take them."""
        return (self.weights.shard, grad, *(getattr(self, key) for key in self.STATE))

    def _norm(self, grad: Tensor) -> float:
        if self._native is None:
            return super()._norm(grad)
        squares = torch.tensor(self._native.sum_squares(grad), dtype=torch.float64)
        return float(self._layout.all_reduce_sum(squares).sqrt())

    def _update(self, grad: Tensor, lr: float, scale: float) -> None:
        if self._native is None:
            super()._update(grad, lr, scale)
            return
        corrections, decay = self._corrections(), self.weight_decay
        scalars = native_update.Scalars(*self.betas, lr, scale, *corrections, self.eps, decay, self.SCALING)
        self._native.update(self._buffers(grad), scalars, after_block=self.weights.begin_sharing)

    def _corrections(self) -> tuple[float, float]:
        """Factors of the first and the second moment at this update."""
        return 1.0, 1.0

    def _add_decay(self, values: Tensor, weight: Tensor) -> None:
        """values [n] += weight decay x weight [n], in place, where there is decay."""
        for piece in self._pieces:
            if piece.decay:
                part = slice(piece.start, piece.stop)
                values[part].add_(weight[part], alpha=self.weight_decay)
