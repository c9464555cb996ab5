"""The update of one rank's shard as Triton kernels, with the two sums over the ranks between them.

The passes are those of `mlbert.optim.triton_lamb`; what they add up (the gradient's squares; weights' and updates'
squares of each parameter) is summed over the ranks before it is used. Nothing waits for the host.

Legend: B blocks, each within one parameter; G parameters, and the padding as one more; n elements of the shard.
"""

# mypy: disallow-untyped-defs=False
# (the kernel takes what Triton makes of its arguments; its docstring gives the types)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from mlbert.optim.flat import Segment
from mlbert.optim.triton_lamb import (
    BLOCK,
    NUM_WARPS,
    SUM_BLOCK,
    TritonUpdate,
    begin_kernel,
    first_pass_kernel,
    second_pass_kernel,
    sum_blocks,
    sum_squares_kernel,
)


class ShardedTritonUpdate(TritonUpdate):
    """LAMB on a shard; attributes as in `TritonUpdate`.

    Args:
        pieces: the shard's parts of parameters, back to back from element 0 to n, as segments.
        owners: which of the G parameters each piece is of, ascending.
        num_owners: G.
        spans: (start, stop) of the shard's blocks, ascending; no piece lies in two.
        over_ranks: sums a tensor over all ranks, in place.
        device, **settings: as in `TritonUpdate`.
    """

    def __init__(
        self,
        pieces: Sequence[Segment],
        owners: Sequence[int],
        num_owners: int,
        spans: Sequence[tuple[int, int]],
        over_ranks: Callable[[Tensor], Any],
        device: torch.device,
        **settings: Any,
    ) -> None:
        super().__init__(pieces, device, **settings, trust_ratio=True)
        self._over_ranks = over_ranks
        counts = [-(-piece.numel // BLOCK) for piece in pieces]
        owner_of_block = np.repeat(np.asarray(owners), counts)
        first_blocks = np.searchsorted(owner_of_block, np.arange(num_owners + 1))
        self._owners = torch.from_numpy(owner_of_block).to(device=device, dtype=torch.int32)
        self._first_blocks = torch.from_numpy(first_blocks).to(device=device, dtype=torch.int32)
        self._sums = torch.zeros(2, num_owners, dtype=torch.float64, device=device)
        # Parameters without decay keep a ratio of 1, here and on the ranks that hold nothing of one.
        decays = torch.zeros(num_owners, dtype=torch.bool)
        decays[[owner for owner, piece in zip(owners, pieces, strict=True) if piece.decay]] = True
        self._decays = decays.to(device)
        # Tables of each block on their own: a slice's address may be less aligned, and Triton would compile again.
        borders = torch.searchsorted(self._offsets.cpu(), torch.tensor([stop for _, stop in spans])).tolist()
        tables = (self._owners, self._offsets, self._lengths, self._block_decays)
        self._by_block = [
            tuple(table[first:last].clone() for table in tables)
            for first, last in zip([0, *borders], borders, strict=False)
        ]

    def launch(
        self,
        buffers: Sequence[Tensor],
        copy: Tensor | None = None,
        after_block: Callable[[int], None] = lambda block: None,
    ) -> None:
        """Queues one update of the shard on this rank; all ranks call it together. Arguments as in `TritonUpdate`.

        Args:
            after_block: called with each block's index when the kernels that write its weights are queued.
        """
        assert all(b.dtype == torch.float32 and b.numel() == self._numel for b in buffers), "float32 [n] expected"
        data, grad, exp_avg, exp_avg_sq = buffers
        many = {"BLOCK": BLOCK, "num_warps": NUM_WARPS}
        sum_squares_kernel[(len(self._grad_sums),)](grad, self._grad_sums, self._numel, **many)
        total = self._grad_sums.sum().reshape(1)
        self._over_ranks(total)
        begin_kernel[(1,)](*(total, 1, self._constants, self.updates, self.grad_norm, self._scalars), BLOCK=SUM_BLOCK)
        blocks = (self._offsets, self._lengths, self._block_decays)
        common = (self.grad_norm, self._scalars, self.lr, self.numbers)
        many["ALIGNMENT"] = self._alignment
        grid = (len(self._offsets),)
        first_pass_kernel[grid](
            data, grad, exp_avg, exp_avg_sq, None, None, *self._block_sums, *blocks, *common, **many
        )
        owner_sums_kernel[(self._sums.shape[1],)](*self._block_sums, self._first_blocks, *self._sums, BLOCK=SUM_BLOCK)
        self._over_ranks(self._sums)
        weights, updates = self._sums.sqrt()
        usable = (weights > 0) & (updates > 0) & self._decays
        ratios = torch.where(usable, weights / updates, 1.0).float()
        for index, tables in enumerate(self._by_block):
            second_pass_kernel[(len(tables[0]),)](data, exp_avg, exp_avg_sq, copy, ratios, *tables, *common, **many)
            after_block(index)


@triton.jit
def owner_sums_kernel(weight_sums, update_sums, first_blocks, weights, updates, BLOCK: tl.constexpr):
    """Adds the blocks of each parameter in order. Grid: G.

    weight_sums, update_sums: float32 [B]; first_blocks: int32 [G+1]; weights, updates: float64 [G].
    """
    owner = tl.program_id(0)
    weight, update = sum_blocks(weight_sums, update_sums, first_blocks, owner, BLOCK)
    tl.store(weights + owner, weight)
    tl.store(updates + owner, update)
