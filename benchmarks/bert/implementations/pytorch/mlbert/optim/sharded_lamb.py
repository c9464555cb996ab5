"""LAMB with its state shared out over the ranks: each updates its shard of the weights, then all exchange them.

The update is that of `mlbert.optim.lamb`. A rank holds the moments of its shard only (8 bytes a parameter divided by
the ranks). Shards cut through tensors, so the sums of squares that a trust ratio needs are added over the ranks, one
number a tensor; every rank gets the same bits and computes the same ratios. Runs with equally many ranks are bit-equal.

    sum over ranks: gradient's sum of squares -> norm, clip factor
    moments and update of the shard
    sum over ranks: sums of squares of weights and update, [2, G] -> trust ratios
    block by block: weights of the shard, all-gather (while the next block is computed)

"Ranks" are those that share the weights out: all, or those of a node, whose twins on other nodes compute the same.
How the weights travel is in `mlbert.optim.shared_weights`.

Source of the scheme: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv 1910.02054, section 5.1 (optimizer state partitioning).

Legend: G parameters ("segments"); n elements of the shard.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mlbert.core.errors import UserError
from mlbert.optim.base import DeferredStepResult, DeviceSteps, StepResult, bias_corrections, clip_scale, norm_64
from mlbert.optim.flat import FlatParameters, Segment
from mlbert.optim.shared_weights import Layout, SharedWeights

if TYPE_CHECKING:
    from mlbert.optim.sharded_triton import ShardedTritonUpdate


@dataclass(frozen=True)
class Piece:
    """What a shard holds of one parameter, or a part of that.

    Attributes:
        start, stop: elements of the shard.
        segment: index of the parameter.
    """

    start: int
    stop: int
    segment: int


def pieces_of(parts: Sequence[tuple[int, int]], segments: Sequence[Segment]) -> list[Piece]:
    """Cuts a shard, made of the buffer's `parts` (ascending), at the borders of segments; padding is in no piece."""
    pieces, before, index = [], 0, 0
    for start, stop in parts:
        while index and segments[index].offset > start:
            index -= 1
        while index < len(segments) and segments[index].offset < stop:
            segment = segments[index]
            first, last = max(start, segment.offset), min(stop, segment.offset + segment.numel)
            if first < last:
                pieces.append(Piece(before + first - start, before + last - start, index))
            index += 1
        index = max(index - 1, 0)
        before += stop - start
    return pieces


class ShardedLamb(DeviceSteps):
    """LAMB of which every rank computes its shard; the weights and the result are those of `Lamb` on all ranks.

    Args:
        flat: the parameters, padded to the layout's multiple. At `step` this rank's shard of `padded_grad` is final.
        layout: how the padded buffers are shared out, and over which ranks.
        betas, eps, weight_decay, max_grad_norm, bias_correction: as in `FlatOptimizer`; `max_grad_norm` is for the
            norm over all ranks, after the reduction.
        implementation: "plain" (any device), "triton" (CUDA; the CPU in Triton's interpreter), "auto" or "native":
            triton on CUDA where it can be had, else plain.
        gathered: how weights travel to the other ranks, "fp32", "bf16" or "e5m2"; see `SharedWeights`.

    Attributes:
        exp_avg, exp_avg_sq: float32 [n], the moments of the shard.
        weights: the shard's float32 weights, and what becomes of them.
        implementation: the one in use, "plain" or "triton".
        device_update: the kernels of "triton", else None; with them `launch` can be captured in a graph.

    Raises:
        UserError: triton is asked for and cannot be had, or apex is asked for, which does not shard here.
    """

    def __init__(
        self,
        flat: FlatParameters,
        layout: Layout,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_grad_norm: float | None,
        bias_correction: bool = True,
        implementation: str = "auto",
        gathered: str = "fp32",
    ) -> None:
        if implementation == "apex":
            raise UserError("apex optimizer", "does not shard its state here", "Set SHARDED_OPTIMIZER=off")
        self.flat, self.betas, self.eps = flat, betas, eps
        self.weight_decay, self.max_grad_norm, self.bias_correction = weight_decay, max_grad_norm, bias_correction
        self._num_updates = 0
        self._layout = layout
        pieces = pieces_of(layout.parts, flat.segments)
        decayed = [p for p in pieces if flat.segments[p.segment].decay]
        self._blocks = [[p for p in decayed if first <= p.start < last] for first, last in layout.spans]
        self.device_update: ShardedTritonUpdate | None = None
        if implementation == "triton" or (implementation != "plain" and flat.data.is_cuda):
            self.device_update = self._load_triton(pieces, required=implementation == "triton")
        self.implementation = "triton" if self.device_update else "plain"
        self.exp_avg = torch.zeros(layout.shard_numel, dtype=torch.float32, device=flat.data.device)
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        self.weights = SharedWeights(flat.padded_data, layout, gathered)

    def _load_triton(self, pieces: Sequence[Piece], required: bool) -> ShardedTritonUpdate | None:
        device, segments = self.flat.data.device, self.flat.segments
        try:
            from triton import knobs

            from mlbert.optim.sharded_triton import ShardedTritonUpdate

            if device.type != "cuda" and not knobs.runtime.interpret:
                raise ImportError(f"it is for CUDA devices, the parameters are on {device}")
        except ImportError as error:
            if required:
                raise UserError("triton optimizer", str(error), "Choose the plain implementation or auto") from error
            return None
        parts = [Segment("", p.start, p.stop - p.start, segments[p.segment].decay) for p in pieces]
        owners = [p.segment for p in pieces]
        used, total = (pieces[-1].stop if pieces else 0), self._layout.shard_numel
        if used < total:  # padding, all of it in the last block, counts as one more parameter
            parts.append(Segment("", used, total - used, False))
            owners.append(len(segments))
        return ShardedTritonUpdate(
            parts,
            owners,
            len(segments) + 1,
            self._layout.spans,
            self._layout.all_reduce_sum,
            device,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            bias_correction=self.bias_correction,
        )

    @torch.no_grad()
    def step(self, lr: float) -> StepResult | DeferredStepResult:
        """One update with learning rate `lr` on all ranks; nothing where the gradient's norm is not finite.

        All ranks call it together. In plain form the norm decides on the host, so on a GPU this waits for the
        gradient; triton does not wait, only reading the result does.
        """
        if self.device_update is not None:
            return self._step_on_device(lr)
        grad = self._layout.take(self.flat.padded_grad)
        grad_norm = math.sqrt(float(self._layout.all_reduce_sum(norm_64(grad).square())))
        if not math.isfinite(grad_norm):
            return StepResult(grad_norm, skipped=True)
        self._num_updates += 1
        weight = self.weights.shard
        update = self._direction(weight, grad.mul_(clip_scale(grad_norm, self.max_grad_norm)))
        ratios = self._trust_ratios(weight, update)
        for block, (first, last) in enumerate(self._layout.spans):
            for piece in self._blocks[block]:
                update[piece.start : piece.stop].mul_(ratios[piece.segment])
            weight[first:last].sub_(update[first:last], alpha=lr)
            self.weights.begin_sharing(block)
        self.weights.finish_sharing()
        return StepResult(grad_norm, skipped=False)

    @torch.no_grad()
    def launch(self) -> None:
        """Queues one update, exchange of weights included, and decides nothing on the host; with triton only.

        All ranks call it together. With NCCL a graph can hold it.
        """
        assert self.device_update is not None, "triton only"
        grad = self._layout.take(self.flat.padded_grad)
        buffers = (self.weights.shard, grad, self.exp_avg, self.exp_avg_sq)
        self.device_update.launch(buffers, after_block=self.weights.begin_sharing)
        self.weights.finish_sharing()

    def exact_weights(self) -> AbstractContextManager[object]:
        """Makes `flat.data` the float32 weights, from the ranks that own them; all ranks call it together.

        Returns:
            A context at whose end the weights are again what the ranks train with.
        """
        return self.weights.exact()

    def _direction(self, weight: Tensor, grad: Tensor) -> Tensor:
        """Moments from the clipped gradient [n], then Adam's direction with decay; reuses the gradient's memory."""
        correction_1, correction_2 = bias_corrections(self.betas, self._num_updates, self.bias_correction)
        m, v = self.exp_avg, self.exp_avg_sq
        m.mul_(self.betas[0]).add_(grad, alpha=1.0 - self.betas[0])
        v.mul_(self.betas[1]).addcmul_(grad, grad, value=1.0 - self.betas[1])
        torch.mul(v, correction_2, out=grad).sqrt_().add_(self.eps)
        update = torch.div(m, grad, out=grad).mul_(correction_1)
        for piece in itertools.chain(*self._blocks):
            update[piece.start : piece.stop].add_(weight[piece.start : piece.stop], alpha=self.weight_decay)
        return update

    def _trust_ratios(self, weight: Tensor, update: Tensor) -> Tensor:
        """||weight|| / ||update|| of each parameter, the norms taken over all ranks: float32 [G]."""
        sums = torch.zeros(2, len(self.flat.segments), dtype=torch.float64, device=weight.device)
        for piece in itertools.chain(*self._blocks):
            for row, values in zip(sums, (weight, update), strict=True):
                row[piece.segment] += norm_64(values[piece.start : piece.stop]).square()
        weight_norms, update_norms = self._layout.all_reduce_sum(sums).sqrt()
        usable = (weight_norms > 0) & (update_norms > 0)
        return torch.where(usable, weight_norms / update_norms, 1.0).float()

    def state_dict(self) -> dict[str, int | Tensor]:
        """As `FlatOptimizer.state_dict`, with the moments of all ranks gathered: float32 [numel], copies.

        All ranks call it together. The state tells nothing of the number of ranks. The weights that belong to it are
        `flat.data` within `exact_weights()`.
        """
        state: dict[str, int | Tensor] = {"num_updates": self.num_updates}
        for key, shard in (("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)):
            whole = torch.zeros_like(self.flat.padded_data)
            self._layout.put(shard, whole)
            self._layout.all_gather(whole)
            state[key] = whole[: self.flat.numel].clone()
        return state

    def load_state_dict(self, state: Mapping[str, int | Tensor]) -> None:
        """Takes this rank's shard of a state that `state_dict` here or of `Lamb` gave, and of `flat.data`.

        `flat.data` must hold the weights that belong to the state, as float32 weights of all ranks.

        Raises:
            UserError: the state is incomplete or belongs to a model of another size.
        """
        for key, moment in self._take_over(state).items():
            whole = torch.zeros_like(self.flat.padded_data)
            whole[: self.flat.numel].copy_(moment)
            getattr(self, key).copy_(self._layout.take(whole))
        self.weights.reload()
