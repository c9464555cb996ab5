"""The native (CPU, C) and Triton (CUDA) implementations that all optimizers share.

Adam's direction may be scaled per parameter (`mlbert.optim.adamw`), which takes two passes. The
other optimizers work element by element in one pass (`mlbert.optim.acclip`, `madgrad`, `sgd`).

`NativeUpdate` binds csrc/cpu/optim.c: the library, its argument types and its table of blocks.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mlbert.host import native
from mlbert.host.native import NativeUnavailable
from mlbert.optim.flat import MOST_STATES, Blocks, FlatParameters, Piece
from mlbert.optim.optimizer import Event, FlatOptimizer
from mlbert.optim.shared_weights import Layout

if TYPE_CHECKING:
    from mlbert.optim.triton_update import TritonUpdate

# Sums are computed per block and added in block order,
# so results do not depend on the thread count.
BLOCK_ELEMENTS = 8192
# Parameters are grouped until they hold this many elements: the second pass over a group finds
# weights and moments (12 bytes per element) still in the cache, and the threads synchronize once
# per group.
GROUP_ELEMENTS = 1 << 20
# A thread with fewer elements (0.25 MiB per buffer) costs more to wake and wait for than it saves.
MIN_ELEMENTS_PER_THREAD = 1 << 16


class Formulas(IntEnum):
    """The update rule that the kernels compute; values match csrc/cpu/optim.c
    and the Triton kernels.
    """

    ADAM = 0
    ACCLIP = 1
    MADGRAD = 2
    SGD = 3


class UpdateScaling(IntEnum):
    """How each parameter's update is scaled; values match csrc/cpu/optim.c
    and the Triton kernels.
    """

    NONE = 0
    TRUST_RATIO = 1
    RMS = 2


class Scalars(ctypes.Structure):
    """`struct scalars` of optim.c."""

    _fields_ = (
        ("beta_1", ctypes.c_double),
        ("beta_2", ctypes.c_double),
        ("lr", ctypes.c_float),
        ("grad_scale", ctypes.c_float),
        ("correction_1", ctypes.c_float),
        ("correction_2", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("weight_decay", ctypes.c_float),
        ("scaling", ctypes.c_int64),
    )


class BlockTable(ctypes.Structure):
    """`struct blocks` of optim.c."""

    _fields_ = (
        ("offset", ctypes.c_void_p),
        ("length", ctypes.c_void_p),
        ("owner", ctypes.c_void_p),
        ("decay", ctypes.c_void_p),
        ("owner_first_block", ctypes.c_void_p),
        ("group_first_block", ctypes.c_void_p),
        ("num_groups", ctypes.c_int64),
    )


def _declare(library: ctypes.CDLL) -> None:
    """Declare the argument types of the functions of optim.c."""
    buffer = ctypes.c_void_p
    sums = ctypes.c_void_p
    blocks = ctypes.POINTER(BlockTable)
    scalars = ctypes.POINTER(Scalars)
    integer = ctypes.c_int64
    threads = ctypes.c_int
    library.optim_sum_squares.argtypes = (buffer, integer, integer, sums, threads)
    library.optim_sum_squares.restype = ctypes.c_double
    library.optim_update.argtypes = (
        buffer,  # weights
        buffer,  # gradient
        buffer,  # first moment
        buffer,  # second moment
        blocks,
        scalars,
        sums,
        sums,
        threads,
    )
    library.optim_update.restype = None
    library.optim_first_pass.argtypes = (
        buffer,  # weights
        buffer,  # gradient
        buffer,  # first moment
        buffer,  # second moment
        blocks,
        scalars,
        integer,  # first block
        integer,  # end of the blocks
        sums,
        sums,
        threads,
    )
    library.optim_first_pass.restype = None
    library.optim_second_pass.argtypes = (
        buffer,  # weights
        buffer,  # first moment
        buffer,  # second moment
        blocks,
        scalars,
        integer,  # first block
        integer,  # end of the blocks
        sums,
        integer,  # number of parameters
        threads,
    )
    library.optim_second_pass.restype = None
    library.optim_one_pass.argtypes = (
        buffer,  # weights
        buffer,  # gradient
        buffer,  # state, up to MOST_STATES buffers
        buffer,
        buffer,
        blocks,
        scalars,
        integer,  # first block
        integer,  # end of the blocks
        ctypes.c_int,  # formulas
        threads,
    )
    library.optim_one_pass.restype = None


class NativeUpdate:
    """The compiled CPU kernels, bound to a shard.

    Args:
        pieces: pieces of the shard.
        num_owners: G, number of parameters of the model.
        layout: layout of the buffers.
        formulas, scaling: values of `Formulas` and `UpdateScaling`.

    Raises:
        native.NativeUnavailable: there is no compiler, or the library cannot be built or loaded.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        num_owners: int,
        layout: Layout,
        *,
        formulas: int,
        scaling: int,
    ) -> None:
        self._library = native.load("optim", ["optim.c"])
        _declare(self._library)
        self._layout = layout
        self._formulas = formulas
        self._is_scaled = scaling != 0
        self._cut = cut = Blocks.of(pieces, num_owners, BLOCK_ELEMENTS)
        self._numel = layout.spans[-1][1]
        if self._is_scaled:
            groups = _group_starts(cut)
        else:
            groups = np.array([0, len(cut.offsets)], dtype=np.int64)
        # The table points into these arrays.
        self._arrays = (cut.offsets, cut.lengths, cut.owners, cut.decays, cut.first, groups)
        self._table = BlockTable(*(array.ctypes.data for array in self._arrays), len(groups) - 1)
        # Two sums per block. The norm's blocks ignore the pieces,
        # so with much padding there are more of them.
        norm_blocks = -(-self._numel // BLOCK_ELEMENTS)
        self._sums = np.zeros((2, max(len(cut.offsets), norm_blocks)), dtype=np.float64)
        stops = [stop for _, stop in layout.spans]
        self._borders = [0, *np.searchsorted(cut.offsets, stops).tolist()]

    def _addresses(self, buffers: Sequence[Tensor]) -> list[int]:
        for buffer in buffers:
            assert buffer.dtype == torch.float32, f"float32 expected, not {buffer.dtype}"
            assert buffer.is_contiguous(), "contiguous buffers expected"
            assert buffer.numel() == self._numel, (
                f"{buffer.numel()} elements, the shard has {self._numel}"
            )
            assert buffer.device.type == "cpu", f"CPU expected, not {buffer.device}"
        return [buffer.data_ptr() for buffer in buffers]

    def _threads(self) -> int:
        return max(1, min(torch.get_num_threads(), self._numel // MIN_ELEMENTS_PER_THREAD))

    def sum_squares(self, buffer: Tensor) -> float:
        """Return the sum of squares of a float32 buffer [n], accumulated in float64."""
        (address,) = self._addresses([buffer])
        sums = self._sums.ctypes.data
        return float(
            self._library.optim_sum_squares(
                address, self._numel, BLOCK_ELEMENTS, sums, self._threads()
            )
        )

    def update(
        self, buffers: Sequence[Tensor], scalars: Scalars, after_block: Callable[[int], None]
    ) -> None:
        """Run one update in place on (weights, gradient, the optimizer's state), float32 [n] each.

        Args:
            buffers: all but the gradient are updated.
            scalars: numbers of this update.
            after_block: called in order with the index of each block of the layout once its weights
                are updated.
        """
        weight, grad, *state = self._addresses(buffers)
        blocks = ctypes.byref(self._table)
        numbers = ctypes.byref(scalars)
        threads = self._threads()
        borders = itertools.pairwise(self._borders)
        if self._formulas != Formulas.ADAM:
            padded: list[Any] = [*state]
            padded += [None] * (MOST_STATES - len(state))
            state_1, state_2, state_3 = padded
            for block, (first, end) in enumerate(borders):
                self._library.optim_one_pass(
                    weight,
                    grad,
                    state_1,
                    state_2,
                    state_3,
                    blocks,
                    numbers,
                    first,
                    end,
                    self._formulas,
                    threads,
                )
                after_block(block)
            return
        exp_avg, exp_avg_sq = state
        sums_1 = self._sums[0].ctypes.data
        sums_2 = self._sums[1].ctypes.data

        def first_pass(first: int, end: int) -> None:
            self._library.optim_first_pass(
                weight,
                grad,
                exp_avg,
                exp_avg_sq,
                blocks,
                numbers,
                first,
                end,
                sums_1,
                sums_2,
                threads,
            )

        alone = self._layout.size == 1
        if alone:
            self._library.optim_update(
                weight, grad, exp_avg, exp_avg_sq, blocks, numbers, sums_1, sums_2, threads
            )
        elif self._is_scaled:
            first_pass(0, self._borders[-1])
            totals = self._totals()
        for block, (first, end) in enumerate(borders):
            if not alone and self._is_scaled:
                self._library.optim_second_pass(
                    weight,
                    exp_avg,
                    exp_avg_sq,
                    blocks,
                    numbers,
                    first,
                    end,
                    totals.data_ptr(),
                    totals.shape[1],
                    threads,
                )
            elif not alone:
                first_pass(first, end)
            after_block(block)

    def _totals(self) -> Tensor:
        """Return both sums of each parameter over all ranks: float64 [2, G]."""
        cut = self._cut
        rows = [
            np.bincount(cut.owners, row[: len(cut.owners)], len(cut.first) - 1)
            for row in self._sums
        ]
        return self._layout.all_reduce_sum(torch.from_numpy(np.stack(rows)))


def _group_starts(cut: Blocks) -> np.ndarray:
    starts = [0]
    elements = 0
    for first, last in itertools.pairwise(cut.first):
        elements += int(cut.lengths[first:last].sum())
        if elements >= GROUP_ELEMENTS:
            starts.append(int(last))
            elements = 0
    if elements:
        starts.append(len(cut.owners))
    return np.array(starts, dtype=np.int64)


class CompiledOptimizer(FlatOptimizer):
    """An optimizer with native and Triton kernels.

    Args:
        flat, layout, **settings: as in `FlatOptimizer`.
        betas: decay rates of the first and second moment;
            SGD and MADGRAD use the first as their momentum.
        eps: added to a denominator; unused by SGD.
        weight_decay: applies to parameters whose segment has `decay`.
    """

    IMPLEMENTATIONS: ClassVar[tuple[str, ...]] = ("plain", "native", "triton")
    FORMULAS: ClassVar[Formulas]
    SCALING: ClassVar[UpdateScaling] = UpdateScaling.NONE
    LOGGED_AS: ClassVar[str]  # in the keys of the hyperparameters
    LOGGED: ClassVar[tuple[str, ...]] = ("epsilon", "beta_1", "beta_2", "weight_decay")

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
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self._decay_as_set = weight_decay
        self._native: NativeUpdate | None = None
        self._triton: TritonUpdate | None = None
        super().__init__(flat, layout, **settings)

    def hyperparameters(self, event: Event) -> None:
        """Log the hyperparameters under the benchmark's keys or keys like them,
        with the weight decay as configured.
        """
        values = {
            "epsilon": self.eps,
            "beta_1": self.betas[0],
            "momentum": self.betas[0],
            "beta_2": self.betas[1],
            "weight_decay": self._decay_as_set,
        }
        event("opt_name", self.name)
        for key in self.LOGGED:
            event(f"opt_{self.LOGGED_AS}_{key}", values[key])
        event("opt_gradient_clip_norm", self.max_grad_norm or 0.0)

    @property
    def _numbers(self) -> dict[str, Any]:
        """The update's hyperparameters, as keyword arguments of the Triton
        and apex implementations.
        """
        return {
            "betas": self.betas,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "max_grad_norm": self._limit,
        }

    def _load(self, form: str) -> None:
        device = self.flat.data.device
        owners = len(self.flat.segments)
        if form == "native":
            if device.type != "cpu":
                raise NativeUnavailable(f"it runs on the CPU only; the parameters are on {device}")
            self._native = NativeUpdate(
                self._pieces, owners, self._layout, formulas=self.FORMULAS, scaling=self.SCALING
            )
        elif form == "triton":
            from triton import knobs

            from mlbert.optim.triton_update import TritonUpdate

            if device.type != "cuda" and not knobs.runtime.interpret:
                raise NativeUnavailable(f"it needs a CUDA device; the parameters are on {device}")
            self._triton = TritonUpdate(
                self._pieces,
                owners,
                self._layout,
                device,
                formulas=self.FORMULAS,
                scaling=self.SCALING,
                known_norm=self._known_norm,
                **self._numbers,
            )
            self.grad_norm = self._triton.grad_norm
            self.can_capture = True

    @property
    def num_updates(self) -> int:
        """Number of updates so far, without skipped steps.

        With triton, reading it waits for the device.
        """
        return self._num_updates if self._triton is None else int(self._triton.updates)

    def _set_num_updates(self, number: int) -> None:
        self._num_updates = number
        if self._triton is not None:
            self._triton.updates.fill_(number)

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the next `launch`; triton only."""
        assert self._triton is not None, "triton only"
        self._triton.lr.fill_(lr)

    @torch.no_grad()
    def launch(self) -> None:
        """Queue one update and the exchange of weights without any decision on the host;
        triton only.
        """
        assert self._triton is not None, "triton only"
        grad = self._layout.take(self.flat.padded_grad)
        copy = self.weights.copy_to_write
        self._triton.launch(self._buffers(grad), after_block=self.weights.begin_sharing, copy=copy)
        self.weights.finish_sharing(copied=copy is not None)

    def _buffers(self, grad: Tensor) -> tuple[Tensor, ...]:
        """Return weights, gradient and state of the shard in the kernels' order."""
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
        beta_1, beta_2 = self.betas
        correction_1, correction_2 = self._corrections()
        scalars = Scalars(
            beta_1=beta_1,
            beta_2=beta_2,
            lr=lr,
            grad_scale=scale,
            correction_1=correction_1,
            correction_2=correction_2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            scaling=self.SCALING,
        )
        self._native.update(self._buffers(grad), scalars, after_block=self.weights.begin_sharing)

    def _corrections(self) -> tuple[float, float]:
        """Return the bias correction factors of the first and second moment at this update."""
        return 1.0, 1.0

    def _add_decay(self, values: Tensor, weight: Tensor) -> None:
        """Add weight decay x weight [n] to values [n] in place, for decayed parameters."""
        for piece in self._pieces:
            if piece.decay:
                part = slice(piece.start, piece.stop)
                values[part].add_(weight[part], alpha=self.weight_decay)
