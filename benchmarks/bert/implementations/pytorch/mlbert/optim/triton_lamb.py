"""LAMB and AdamW on flat buffers as Triton kernels. Nothing waits for the host, so a graph can hold a whole update.

    sum_squares     the gradient's sum of squares, block by block, in float64
    begin           one program adds the blocks in order: norm, clip factor, update count, bias corrections;
                    where the norm is not finite, the count stays and the kernels below return at once
    first_pass      moments; LAMB: sums of squares of weights and update, block by block;
                    AdamW: the weights too, and that is all
    trust_ratios    one program a tensor adds its blocks in order
    second_pass     the update again, from the moments, and the weights, also in bfloat16 where a copy is kept

Every sum is taken in one order, so runs are bit-equal. Learning rate, betas, count and all that follows from them are
on the device. LAMB moves 46 bytes a parameter with a bfloat16 copy, as storing the update in between would.

Legend: B blocks, each within one parameter; G parameters ("segments"); N elements of a flat buffer.
"""

# mypy: disallow-untyped-defs=False
# (kernels take what Triton makes of their arguments; their docstrings give the types)

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from mlbert.optim.flat import Segment

BLOCK = 4096  # elements
SUM_BLOCK = 1024  # block sums added at a time
NUM_WARPS = 8
MAX_ALIGNMENT = 16  # elements


class TritonUpdate:
    """The update of one layout of segments on the device.

    Args:
        segments: back to back, from offset 0.
        device: where the buffers are.
        betas, eps, weight_decay, max_grad_norm, bias_correction: as in `mlbert.optim.base.FlatOptimizer`.
        trust_ratio: LAMB; False: AdamW.

    Attributes:
        lr: float32 scalar on the device, read by `launch`.
        numbers: float32 [6] on the device, likewise: beta_1, 1 - beta_1, beta_2, 1 - beta_2, eps, weight decay.
        grad_norm: float64 scalar on the device, the last `launch`'s; not finite: it changed nothing.
        updates: int64 scalar on the device, updates made so far.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        device: torch.device,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_grad_norm: float | None,
        bias_correction: bool,
        trust_ratio: bool,
    ) -> None:
        self._trust_ratio = trust_ratio
        self._numel = sum(segment.numel for segment in segments)
        self._alignment = math.gcd(MAX_ALIGNMENT, *(n for s in segments for n in (s.offset, s.numel)))
        self._fill_tables(segments, device)
        self.lr = torch.zeros((), dtype=torch.float32, device=device)
        self.grad_norm = torch.zeros((), dtype=torch.float64, device=device)
        self.updates = torch.zeros((), dtype=torch.int64, device=device)
        # exp(t log beta) on the device; log 0 is -inf. Host numbers reach a kernel as float32 only, hence a tensor.
        logs = [math.log(beta) if beta > 0 else -math.inf for beta in betas] if bias_correction else [-math.inf] * 2
        self._constants = torch.tensor([*logs, max_grad_norm or 0.0], dtype=torch.float64, device=device)
        self._scalars = torch.zeros(3, dtype=torch.float32, device=device)
        numbers = (betas[0], 1.0 - betas[0], betas[1], 1.0 - betas[1], eps, weight_decay)
        self.numbers = torch.tensor(numbers, dtype=torch.float32, device=device)

    def _fill_tables(self, segments: Sequence[Segment], device: torch.device) -> None:
        numels = np.array([segment.numel for segment in segments], dtype=np.int64)
        starts = np.array([segment.offset for segment in segments], dtype=np.int64)
        decays = np.array([segment.decay for segment in segments], dtype=np.int32)
        counts = -(-numels // BLOCK)
        first = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        owner = np.repeat(np.arange(len(segments)), counts)
        within = (np.arange(len(owner)) - first[owner]) * BLOCK

        def table(values: np.ndarray, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(values).to(device=device, dtype=dtype)

        self._offsets = table(starts[owner] + within, torch.int64)
        self._lengths = table(np.minimum(numels[owner] - within, BLOCK), torch.int32)
        self._owners = table(owner, torch.int32)
        self._block_decays = table(decays[owner], torch.int32)
        self._first_blocks = table(first, torch.int32)
        self._decays = table(decays, torch.int32)
        self._grad_sums = torch.empty(triton.cdiv(self._numel, BLOCK), dtype=torch.float64, device=device)
        self._block_sums = torch.empty(2, len(owner), dtype=torch.float32, device=device)
        self._ratios = torch.ones(len(segments), dtype=torch.float32, device=device)

    def launch(self, buffers: Sequence[Tensor], copy: Tensor | None = None) -> None:
        """Queues one update.

        Args:
            buffers: weights, gradient, first and second moment, float32 [N] each, changed in place but the gradient.
            copy: bfloat16 [N], receives the new weights; untouched by a skipped update.
        """
        for buffer in buffers:
            assert buffer.dtype == torch.float32, f"float32 expected, not {buffer.dtype}"
            assert buffer.numel() == self._numel, f"{buffer.numel()} elements, the segments have {self._numel}"
        assert copy is None or (copy.dtype == torch.bfloat16 and copy.numel() == self._numel), "copy: bfloat16 [N]"
        data, grad, exp_avg, exp_avg_sq = buffers
        many = {"BLOCK": BLOCK, "num_warps": NUM_WARPS}
        sum_squares_kernel[(len(self._grad_sums),)](grad, self._grad_sums, self._numel, **many)
        begin_kernel[(1,)](
            *(self._grad_sums, len(self._grad_sums), self._constants, self.updates, self.grad_norm, self._scalars),
            BLOCK=SUM_BLOCK,
        )
        blocks = (self._offsets, self._lengths, self._block_decays)
        common = (self.grad_norm, self._scalars, self.lr, self.numbers)
        sums = self._block_sums if self._trust_ratio else (None, None)
        many["ALIGNMENT"] = self._alignment
        grid = (len(self._offsets),)
        direct = (None, None) if self._trust_ratio else (data, copy)
        first_pass_kernel[grid](data, grad, exp_avg, exp_avg_sq, *direct, *sums, *blocks, *common, **many)
        if self._trust_ratio:
            trust_ratio_kernel[(len(self._ratios),)](
                *(*self._block_sums, self._first_blocks, self._decays, self._ratios), BLOCK=SUM_BLOCK
            )
            second_pass_kernel[grid](
                data, exp_avg, exp_avg_sq, copy, self._ratios, self._owners, *blocks, *common, **many
            )


@triton.jit
def sum_squares_kernel(grad, sums, numel: tl.constexpr, BLOCK: tl.constexpr):
    """sums [N / BLOCK] float64 = sum of squares of each block of grad float32 [N]. Grid: N / BLOCK."""
    block = tl.program_id(0)
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(grad + place, mask=place < numel, other=0.0).to(tl.float64)
    tl.store(sums + block, tl.sum(value * value, 0))


@triton.jit
def begin_kernel(sums, num_sums, constants, updates, grad_norm, scalars, BLOCK: tl.constexpr):
    """Norm, count and what follows from them, in one program.

    sums: float64 [num_sums]; constants: float64 [3] = log beta_1, log beta_2, norm to clip to (0: no clipping);
    updates: int64; grad_norm: float64; scalars: float32 [3] = clip factor, corrections of both moments.
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
        tl.store(scalars, tl.where(limit > 0.0, limit / tl.maximum(norm, limit), 1.0).to(tl.float32))
        time = count.to(tl.float64)
        correction_1 = 1.0 / (1.0 - tl.exp(time * tl.load(constants)))
        correction_2 = 1.0 / (1.0 - tl.exp(time * tl.load(constants + 1)))
        tl.store(scalars + 1, correction_1.to(tl.float32))
        tl.store(scalars + 2, correction_2.to(tl.float32))


@triton.jit
def _block_places(offsets, lengths, BLOCK: tl.constexpr, ALIGNMENT: tl.constexpr):
    """The elements of this program's block: int64 [BLOCK] and which of them exist."""
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    # Known alignment lets a thread move 16 bytes at once.
    offset = tl.multiple_of(tl.load(offsets + block), ALIGNMENT)
    length = tl.multiple_of(tl.load(lengths + block), ALIGNMENT)
    return offset + lanes, lanes < length


@triton.jit
def _direction(weight, m, v, scalars, numbers, is_decayed):
    """Adam's direction with decay, before any trust ratio."""
    root = tl.sqrt_rn(v * tl.load(scalars + 2)) + tl.load(numbers + 4)
    update = tl.div_rn(m * tl.load(scalars + 1), root)
    return tl.where(is_decayed, update + tl.load(numbers + 5) * weight, update)


@triton.jit
def first_pass_kernel(
    data,
    grad,
    exp_avg,
    exp_avg_sq,
    new_data,
    copy,
    weight_sums,
    update_sums,
    offsets,
    lengths,
    decays,
    grad_norm,
    scalars,
    lr,
    numbers,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Moments of one block; its sums of squares (LAMB) or its new weights (new_data, AdamW). Grid: B.

    data, grad, exp_avg, exp_avg_sq, new_data: float32 [N]; copy: bfloat16 [N]; weight_sums, update_sums: float32 [B];
    new_data, copy and the sums may be None; lr, numbers: see `TritonUpdate`.
    """
    if tl.load(grad_norm) < float("inf"):
        place, inside = _block_places(offsets, lengths, BLOCK, ALIGNMENT)
        g = tl.load(grad + place, mask=inside, other=0.0) * tl.load(scalars)
        m = tl.load(exp_avg + place, mask=inside, other=0.0) * tl.load(numbers) + tl.load(numbers + 1) * g
        v = tl.load(exp_avg_sq + place, mask=inside, other=0.0) * tl.load(numbers + 2) + tl.load(numbers + 3) * (g * g)
        tl.store(exp_avg + place, m, mask=inside)
        tl.store(exp_avg_sq + place, v, mask=inside)
        weight = tl.load(data + place, mask=inside, other=0.0)
        is_decayed = tl.load(decays + tl.program_id(0)) != 0
        # Places outside have m = 0 and so an update of 0 / eps, which is NaN where eps is 0.
        update = tl.where(inside, _direction(weight, m, v, scalars, numbers, is_decayed), 0.0)
        if weight_sums is not None:
            tl.store(weight_sums + tl.program_id(0), tl.sum(weight * weight, 0))
            tl.store(update_sums + tl.program_id(0), tl.sum(update * update, 0))
        if new_data is not None:
            weight -= tl.load(lr) * update
            tl.store(new_data + place, weight, mask=inside)
        if copy is not None:
            tl.store(copy + place, weight.to(tl.bfloat16), mask=inside)


@triton.jit
def sum_blocks(weight_sums, update_sums, first_blocks, owner, BLOCK: tl.constexpr):
    """The sums, float64, of an owner's blocks first_blocks[owner] to first_blocks[owner + 1], added in order."""
    lanes = tl.arange(0, BLOCK)
    weights = tl.zeros([BLOCK], tl.float64)
    updates = tl.zeros([BLOCK], tl.float64)
    start = tl.load(first_blocks + owner)
    stop = tl.load(first_blocks + owner + 1)
    while start < stop:
        inside = start + lanes < stop
        weights += tl.load(weight_sums + start + lanes, mask=inside, other=0.0).to(tl.float64)
        updates += tl.load(update_sums + start + lanes, mask=inside, other=0.0).to(tl.float64)
        start += BLOCK
    return tl.sum(weights, 0), tl.sum(updates, 0)


@triton.jit
def trust_ratio_kernel(weight_sums, update_sums, first_blocks, decays, ratios, BLOCK: tl.constexpr):
    """||weight|| / ||update|| of one segment, 1 where it is not decayed or a norm is 0. Grid: G.

    first_blocks: int32 [G+1]; decays: int32 [G]; ratios: float32 [G].
    """
    segment = tl.program_id(0)
    weight, update = sum_blocks(weight_sums, update_sums, first_blocks, segment, BLOCK)
    usable = (weight > 0.0) & (update > 0.0) & (tl.load(decays + segment) != 0)
    ratio = tl.sqrt(tl.where(usable, weight, 1.0)) / tl.sqrt(tl.where(usable, update, 1.0))
    tl.store(ratios + segment, ratio.to(tl.float32))


@triton.jit
def second_pass_kernel(
    data,
    exp_avg,
    exp_avg_sq,
    copy,
    ratios,
    owners,
    offsets,
    lengths,
    decays,
    grad_norm,
    scalars,
    lr,
    numbers,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """data -= lr * ratio * update for one block; copy, if there is one, receives the result. Grid: B.

    data, exp_avg, exp_avg_sq: float32 [N]; copy: bfloat16 [N] or None; ratios: float32 [G]; owners: int32 [B]; lr,
    numbers: see `TritonUpdate`.
    """
    if tl.load(grad_norm) < float("inf"):
        place, inside = _block_places(offsets, lengths, BLOCK, ALIGNMENT)
        m = tl.load(exp_avg + place, mask=inside, other=0.0)
        v = tl.load(exp_avg_sq + place, mask=inside, other=0.0)
        weight = tl.load(data + place, mask=inside, other=0.0)
        is_decayed = tl.load(decays + tl.program_id(0)) != 0
        update = _direction(weight, m, v, scalars, numbers, is_decayed)
        ratio = tl.load(ratios + tl.load(owners + tl.program_id(0)))
        weight -= tl.load(lr) * (ratio * update)
        tl.store(data + place, weight, mask=inside)
        if copy is not None:
            tl.store(copy + place, weight.to(tl.bfloat16), mask=inside)
