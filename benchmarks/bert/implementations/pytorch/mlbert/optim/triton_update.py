"""The optimizers as Triton kernels.

Nothing waits for the host, so a CUDA graph can capture a complete update.

    sum_squares     the gradient's sum of squares per `SQUARED_BLOCKS` blocks, in float64; summed
                    over ranks
    begin           one program adds these sums in order: norm, clip factor, update count, bias
                    corrections; if the norm is not finite, the count is unchanged and the passes
                    below return at once
    one_pass        optimizers other than Adam's: state and weights; done
    first_pass      moments; with scaling: both sums of the parameter's scale per block;
                    without: the weights as well; done
    owner_sums      one program per parameter adds its blocks in order; summed over ranks
    second_pass     recompute the update from the moments, scale it and update the weights

Every sum has a fixed order, so runs are bit-equal. Learning rate, betas, count and everything
derived from them are on the device. LAMB moves 44 bytes per parameter, the same as storing the
update between the passes would. Formulas: `mlbert.optim.adamw`, `acclip`, `madgrad`, `sgd`.

Legend: B blocks, each within one parameter; G parameters; n elements of the shard.
"""

# mypy: disallow-untyped-defs=False
# (Triton converts the kernels' arguments; their docstrings give the types)

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from mlbert.optim.flat import MOST_STATES, Blocks, Piece
from mlbert.optim.shared_weights import Layout

BLOCK = 4096  # elements
# That one program squares. With one, `begin` had 82,080 sums of BERT-large to add, in 0.14 ms on
# an H200.
SQUARED_BLOCKS = 16
SUM_BLOCK = 1024  # block sums added at a time
NUM_WARPS = 8
MAX_ALIGNMENT = 16  # elements
# Of mlbert.optim.compiled.UpdateScaling.
RMS = tl.constexpr(2)
# Of mlbert.optim.compiled.Formulas.
ADAM = tl.constexpr(0)
ACCLIP = tl.constexpr(1)
MADGRAD = tl.constexpr(2)


class TritonUpdate:
    """The update of one shard on the device.

    Args:
        pieces: pieces of the shard.
        num_owners: G.
        layout: layout of the buffers.
        device: device of the buffers.
        betas, eps, weight_decay, max_grad_norm, formulas, scaling: as in
            `mlbert.optim.compiled.CompiledOptimizer`.
        bias_correction: as in `mlbert.optim.adamw.Adam`.
        known_norm: as in `mlbert.optim.optimizer.FlatOptimizer`.

    Attributes:
        lr: float32 scalar on the device, read by `launch`.
        grad_norm: float64 scalar on the device, from the last `launch`;
            if not finite, that launch changed nothing.
        updates: int64 scalar on the device, number of updates so far.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        num_owners: int,
        layout: Layout,
        device: torch.device,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_grad_norm: float | None,
        formulas: int,
        scaling: int,
        bias_correction: bool = False,
        known_norm: Tensor | None = None,
    ) -> None:
        self._layout = layout
        self._formulas = int(formulas)
        self._scaling = int(scaling)
        self._numel = layout.spans[-1][1]
        self._known_norm = known_norm
        self._fill_tables(Blocks.of(pieces, num_owners, BLOCK), device)
        self.lr = torch.zeros((), dtype=torch.float32, device=device)
        self.grad_norm = torch.zeros((), dtype=torch.float64, device=device)
        self.updates = torch.zeros((), dtype=torch.int64, device=device)
        # The device computes exp(t log beta); log 0 is -inf.
        # A tensor, because kernels receive host floats as float32.
        logs = [-math.inf, -math.inf]
        if bias_correction:
            logs = [math.log(beta) if beta > 0 else -math.inf for beta in betas]
        self._constants = torch.tensor(
            [*logs, max_grad_norm or 0.0], dtype=torch.float64, device=device
        )
        self._scalars = torch.zeros(3, dtype=torch.float32, device=device)
        numbers = (betas[0], 1.0 - betas[0], betas[1], 1.0 - betas[1], eps, weight_decay)
        self._numbers = torch.tensor(numbers, dtype=torch.float32, device=device)

    def _fill_tables(self, cut: Blocks, device: torch.device) -> None:
        def table(values: np.ndarray, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(values).to(device=device, dtype=dtype, copy=True)

        def tables(first: int, last: int) -> _Tables:
            return _Tables(
                offsets=table(cut.offsets[first:last], torch.int64),
                lengths=table(cut.lengths[first:last], torch.int32),
                decays=table(cut.decays[first:last], torch.int32),
                owners=table(cut.owners[first:last], torch.int32),
                runs=aligned_runs(cut.offsets[first:last], cut.lengths[first:last]),
            )

        # Each block of the layout has separate tables: a slice's address may be less aligned than a
        # tensor's, and Triton would recompile.
        stops = [stop for _, stop in self._layout.spans]
        borders = [0, *np.searchsorted(cut.offsets, stops).tolist()]
        self._by_block = [tables(first, last) for first, last in itertools.pairwise(borders)]
        self._all = self._by_block[0] if len(self._by_block) == 1 else tables(0, len(cut.offsets))
        self._first_blocks = table(cut.first, torch.int32)
        num_owners = len(cut.first) - 1
        self._grad_sums = torch.empty(
            triton.cdiv(self._numel, SQUARED_BLOCKS * BLOCK), dtype=torch.float64, device=device
        )
        self._block_sums = torch.empty(
            2, max(1, len(cut.offsets)), dtype=torch.float32, device=device
        )
        self._sums = torch.zeros(2, num_owners, dtype=torch.float64, device=device)

    def launch(
        self,
        buffers: Sequence[Tensor],
        after_block: Callable[[int], None],
        copy: Tensor | None = None,
    ) -> None:
        """Queue one update.

        Args:
            buffers: weights, gradient and the optimizer's state, float32 [n] each;
                all but the gradient change in place.
            after_block: called in order with the index of each of the layout's blocks once the
                kernels that write its weights are queued.
            copy: [n] of another dtype that also receives the new weights, rounded.
        """
        for buffer in buffers:
            assert buffer.dtype == torch.float32, f"float32 expected, not {buffer.dtype}"
            assert buffer.numel() == self._numel, (
                f"{buffer.numel()} elements, the shard has {self._numel}"
            )
        data, grad, *state = buffers
        options = {"BLOCK": BLOCK, "num_warps": NUM_WARPS}
        if self._known_norm is not None:
            sums = self._known_norm.square().reshape(1)
        else:
            sum_squares_kernel[(len(self._grad_sums),)](
                grad, self._grad_sums, self._numel, BLOCKS=SQUARED_BLOCKS, **options
            )
            sums = self._grad_sums
            if self._layout.size > 1:
                sums = self._layout.all_reduce_sum(sums.sum().reshape(1))
        begin_kernel[(1,)](
            sums,
            len(sums),
            self._constants,
            self.updates,
            self.grad_norm,
            self._scalars,
            BLOCK=SUM_BLOCK,
        )
        adam = options | {"SCALING": self._scaling}
        block_sums_1, block_sums_2 = self._block_sums
        sums_1, sums_2 = self._sums
        if self._scaling:
            exp_avg, exp_avg_sq = state
            self._all.launch(
                first_pass_kernel,
                data,
                grad,
                exp_avg,
                exp_avg_sq,
                None,
                block_sums_1,
                block_sums_2,
                self._all.offsets,
                self._all.lengths,
                self._all.decays,
                self.grad_norm,
                self._scalars,
                self.lr,
                self._numbers,
                **adam,
            )
            owner_sums_kernel[(len(sums_1),)](
                block_sums_1, block_sums_2, self._first_blocks, sums_1, sums_2, BLOCK=SUM_BLOCK
            )
            self._layout.all_reduce_sum(self._sums)
        for index, tables in enumerate(self._by_block):
            if self._formulas != ADAM.value:
                padded: list[Any] = [*state]
                padded += [None] * (MOST_STATES - len(state))
                state_1, state_2, state_3 = padded
                tables.launch(
                    one_pass_kernel,
                    data,
                    grad,
                    state_1,
                    state_2,
                    state_3,
                    copy,
                    self.updates,
                    tables.offsets,
                    tables.lengths,
                    tables.decays,
                    self.grad_norm,
                    self._scalars,
                    self.lr,
                    self._numbers,
                    FORMULAS=self._formulas,
                    **options,
                )
            elif self._scaling:
                exp_avg, exp_avg_sq = state
                tables.launch(
                    second_pass_kernel,
                    data,
                    exp_avg,
                    exp_avg_sq,
                    copy,
                    sums_1,
                    sums_2,
                    tables.offsets,
                    tables.lengths,
                    tables.decays,
                    tables.owners,
                    self.grad_norm,
                    self._scalars,
                    self.lr,
                    self._numbers,
                    **adam,
                )
            else:
                exp_avg, exp_avg_sq = state
                tables.launch(
                    first_pass_kernel,
                    data,
                    grad,
                    exp_avg,
                    exp_avg_sq,
                    copy,
                    None,
                    None,
                    tables.offsets,
                    tables.lengths,
                    tables.decays,
                    self.grad_norm,
                    self._scalars,
                    self.lr,
                    self._numbers,
                    **adam,
                )
            after_block(index)


def aligned_runs(offsets: np.ndarray, lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (first block, number of blocks, common divisor of their elements) of the blocks before
    the first that is not a multiple of `MAX_ALIGNMENT`, and of the others. One odd parameter must
    not slow down those before it.
    """
    units = np.gcd(np.gcd(offsets, lengths), MAX_ALIGNMENT)
    first_odd = int(np.argmax(np.append(units, 0) < MAX_ALIGNMENT))
    runs = (
        (0, first_odd, MAX_ALIGNMENT),
        (first_odd, len(units) - first_odd, int(np.gcd.reduce(units[first_odd:]))),
    )
    return [run for run in runs if run[1]]


@dataclass(frozen=True)
class _Tables:
    """Offsets, lengths, decays and owners of some blocks on the device,
    and their `aligned_runs`.
    """

    offsets: Tensor
    lengths: Tensor
    decays: Tensor
    owners: Tensor
    runs: list[tuple[int, int, int]]

    def launch(self, kernel: Any, *arguments: Any, **options: Any) -> None:
        """Queue the kernel for all blocks; none if a part consists of padding only."""
        for first, count, alignment in self.runs:
            kernel[(count,)](*arguments, first, ALIGNMENT=alignment, **options)


@triton.jit
def sum_squares_kernel(grad, sums, numel: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sums of squares of BLOCKS blocks each, float64, of grad float32 [N].

    Grid: N / (BLOCKS * BLOCK).
    """
    first = tl.program_id(0).to(tl.int64) * (BLOCKS * BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for number in range(BLOCKS):
        place = first + number * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(grad + place, mask=place < numel, other=0.0).to(tl.float64)
        total += value * value
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def begin_kernel(sums, num_sums, constants, updates, grad_norm, scalars, BLOCK: tl.constexpr):
    """Compute norm, update count and the scalars derived from them, in one program.

    sums: float64 [num_sums]; constants: float64 [3] = log beta_1, log beta_2, norm to clip to (0:
    no clipping); updates: int64; grad_norm: float64; scalars: float32 [3] = clip factor,
    corrections of both moments.
    """
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    start = 0
    while start < num_sums:
        total += tl.load(sums + start + lanes, mask=start + lanes < num_sums, other=0.0)
        start += BLOCK
    norm = tl.sqrt(tl.sum(total, 0))
    tl.store(grad_norm, norm)
    if norm < float("inf"):
        count = tl.load(updates) + 1
        tl.store(updates, count)
        limit = tl.load(constants + 2)
        tl.store(
            scalars, tl.where(limit > 0.0, limit / tl.maximum(norm, limit), 1.0).to(tl.float32)
        )
        time = count.to(tl.float64)
        correction_1 = 1.0 / (1.0 - tl.exp(time * tl.load(constants)))
        correction_2 = 1.0 / (1.0 - tl.exp(time * tl.load(constants + 1)))
        tl.store(scalars + 1, correction_1.to(tl.float32))
        tl.store(scalars + 2, correction_2.to(tl.float32))


@triton.jit
def _block_places(offsets, lengths, block, BLOCK: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Return the elements of a block, int64 [BLOCK], and the mask of those that exist."""
    lanes = tl.arange(0, BLOCK)
    # Known alignment lets a thread move 16 bytes at once.
    offset = tl.multiple_of(tl.load(offsets + block), ALIGNMENT)
    length = tl.multiple_of(tl.load(lengths + block), ALIGNMENT)
    return offset + lanes, lanes < length


@triton.jit
def _direction(weight, m, v, scalars, numbers, is_decayed):
    """Return Adam's direction with decay, before any scaling."""
    root = tl.sqrt_rn(v * tl.load(scalars + 2)) + tl.load(numbers + 4)
    update = tl.div_rn(m * tl.load(scalars + 1), root)
    return tl.where(is_decayed, update + tl.load(numbers + 5) * weight, update)


@triton.jit
def _store_weight(data, copy, place, inside, weight):
    tl.store(data + place, weight, mask=inside)
    if copy is not None:
        tl.store(copy + place, weight.to(copy.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_block"])
def first_pass_kernel(
    data, grad, exp_avg, exp_avg_sq, copy, sums_1, sums_2, offsets, lengths, decays, grad_norm,
    scalars, lr, numbers, first_block, BLOCK: tl.constexpr, SCALING: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Update the moments of one block, then write its two sums (with scaling) or its new weights.

    Grid: blocks.

    data, grad, exp_avg, exp_avg_sq: float32 [n]; copy: [n] or None, also receives new weights;
    sums_1, sums_2: float32 [B], None if SCALING is 0; offsets: int64 [B]; lengths, decays: int32
    [B]; lr: float32; numbers: float32 [6] = beta_1, 1 - beta_1, beta_2, 1 - beta_2, eps, weight
    decay; first_block: of this launch.
    """
    if tl.load(grad_norm) < float("inf"):
        block = first_block + tl.program_id(0)
        place, inside = _block_places(offsets, lengths, block, BLOCK, ALIGNMENT)
        g = tl.load(grad + place, mask=inside, other=0.0) * tl.load(scalars)
        m = (
            tl.load(exp_avg + place, mask=inside, other=0.0) * tl.load(numbers)
            + tl.load(numbers + 1) * g
        )
        v = tl.load(exp_avg_sq + place, mask=inside, other=0.0) * tl.load(numbers + 2) + tl.load(
            numbers + 3
        ) * (g * g)
        tl.store(exp_avg + place, m, mask=inside)
        tl.store(exp_avg_sq + place, v, mask=inside)
        if SCALING == RMS:
            eps = tl.load(numbers + 4)
            share = g * g / tl.maximum(v * tl.load(scalars + 2), eps * eps)
            # Masked elements have g = 0 and v = 0, which gives NaN if eps is 0.
            tl.store(sums_1 + block, tl.load(lengths + block).to(tl.float32))
            tl.store(sums_2 + block, tl.sum(tl.where(inside, share, 0.0), 0))
        else:
            weight = tl.load(data + place, mask=inside, other=0.0)
            is_decayed = tl.load(decays + block) != 0
            # Likewise: masked elements have an update of 0 / eps.
            update = tl.where(inside, _direction(weight, m, v, scalars, numbers, is_decayed), 0.0)
            if SCALING:
                tl.store(sums_1 + block, tl.sum(weight * weight, 0))
                tl.store(sums_2 + block, tl.sum(update * update, 0))
            else:
                _store_weight(data, copy, place, inside, weight - tl.load(lr) * update)


@triton.jit
def _cube_root(x):
    """Return the cube root of x >= 0, computed as in csrc/cpu/optim.c."""
    root = (x.to(tl.int32, bitcast=True) // 3 + 0x2A5119F2).to(tl.float32, bitcast=True)
    for _ in tl.static_range(3):
        root -= (root - x / (root * root)) * (1.0 / 3.0)
    return tl.where(x < float("inf"), root, x)


@triton.jit(do_not_specialize=["first_block"])
def one_pass_kernel(
    data, grad, state_1, state_2, state_3, copy, updates, offsets, lengths, decays, grad_norm,
    scalars, lr, numbers, first_block, BLOCK: tl.constexpr, FORMULAS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Update state and weights of one block, element by element. Grid: blocks.

    state_1, state_2, state_3: float32 [n], None if the optimizer has fewer; updates: int64,
    includes this one; the others as in `first_pass_kernel`.
    """
    if tl.load(grad_norm) < float("inf"):
        block = first_block + tl.program_id(0)
        place, inside = _block_places(offsets, lengths, block, BLOCK, ALIGNMENT)
        beta = tl.load(numbers)
        share = tl.load(numbers + 1)
        eps = tl.load(numbers + 4)
        rate = tl.load(lr)
        decay = tl.where(tl.load(decays + block) != 0, tl.load(numbers + 5), 0.0)
        g = tl.load(grad + place, mask=inside, other=0.0) * tl.load(scalars)
        weight = tl.load(data + place, mask=inside, other=0.0)
        first = tl.load(state_1 + place, mask=inside, other=0.0)
        if FORMULAS == ACCLIP:
            first = beta * first + share * g
            tau = tl.load(state_2 + place, mask=inside, other=0.0)
            tau = tl.load(numbers + 2) * tau + tl.load(numbers + 3) * tl.abs(g)
            tl.store(state_2 + place, tau, mask=inside)
            ratio = tl.minimum(tl.div_rn(tau, tl.abs(first) + eps), 1.0)
            weight -= rate * (ratio * first + decay * weight)
        elif FORMULAS == MADGRAD:
            rate *= tl.sqrt_rn(tl.load(updates).to(tl.float32))
            g += decay * weight
            first += rate * g
            squares = tl.load(state_2 + place, mask=inside, other=0.0) + rate * (g * g)
            tl.store(state_2 + place, squares, mask=inside)
            start = tl.load(state_3 + place, mask=inside, other=0.0)
            weight = beta * weight + share * (start - tl.div_rn(first, _cube_root(squares) + eps))
        else:
            first = beta * first + g
            weight -= rate * (first + decay * weight)
        tl.store(state_1 + place, first, mask=inside)
        _store_weight(data, copy, place, inside, weight)


@triton.jit
def owner_sums_kernel(
    block_sums_1, block_sums_2, first_blocks, sums_1, sums_2, BLOCK: tl.constexpr
):
    """Add the block sums of each parameter in order. Grid: G.

    block_sums_1, block_sums_2: float32 [B]; first_blocks: int32 [G+1]; sums_1, sums_2: float64 [G].
    """
    owner = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    total_1 = tl.zeros([BLOCK], tl.float64)
    total_2 = tl.zeros([BLOCK], tl.float64)
    start = tl.load(first_blocks + owner)
    stop = tl.load(first_blocks + owner + 1)
    while start < stop:
        inside = start + lanes < stop
        total_1 += tl.load(block_sums_1 + start + lanes, mask=inside, other=0.0).to(tl.float64)
        total_2 += tl.load(block_sums_2 + start + lanes, mask=inside, other=0.0).to(tl.float64)
        start += BLOCK
    tl.store(sums_1 + owner, tl.sum(total_1, 0))
    tl.store(sums_2 + owner, tl.sum(total_2, 0))


@triton.jit(do_not_specialize=["first_block"])
def second_pass_kernel(
    data, exp_avg, exp_avg_sq, copy, sums_1, sums_2, offsets, lengths, decays, owners, grad_norm,
    scalars, lr, numbers, first_block, BLOCK: tl.constexpr, SCALING: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Compute data -= lr * scale * update for one block. Grid: blocks.

    data, exp_avg, exp_avg_sq: float32 [n]; sums_1, sums_2: float64 [G]; owners: int32 [B]; the
    others as in `first_pass_kernel`.
    """
    if tl.load(grad_norm) < float("inf"):
        block = first_block + tl.program_id(0)
        place, inside = _block_places(offsets, lengths, block, BLOCK, ALIGNMENT)
        m = tl.load(exp_avg + place, mask=inside, other=0.0)
        v = tl.load(exp_avg_sq + place, mask=inside, other=0.0)
        weight = tl.load(data + place, mask=inside, other=0.0)
        is_decayed = tl.load(decays + block) != 0
        update = _direction(weight, m, v, scalars, numbers, is_decayed)
        owner = tl.load(owners + block)
        sum_1 = tl.load(sums_1 + owner)
        sum_2 = tl.load(sums_2 + owner)
        if SCALING == RMS:
            sum_2 = tl.maximum(sum_2, sum_1)
            usable = sum_1 > 0.0
        else:
            usable = (sum_1 > 0.0) & (sum_2 > 0.0) & is_decayed
        scale = (tl.sqrt(tl.where(usable, sum_1, 1.0)) / tl.sqrt(tl.where(usable, sum_2, 1.0))).to(
            tl.float32
        )
        _store_weight(data, copy, place, inside, weight - tl.load(lr) * (scale * update))
