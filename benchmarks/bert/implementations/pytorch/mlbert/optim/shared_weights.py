"""The weights of a sharded optimizer: each rank owns a shard in float32, and what the others get may be rounded.

    fp32    the weights themselves
    bf16    rounded to bfloat16: half the bytes; of the products in bfloat16 nothing changes, of LayerNorm, biases and
            embeddings all but 8 bits of the mantissa are lost
    e5m2    rounded to 8 bits (5 exponent, 2 mantissa): a quarter of the bytes, and up to 1/8 off: for experiments

In a rounded form all ranks compute with the same rounded weights, the owner too. Updates, weight decay and trust
ratios are those of the owner's exact weights, to which rounding never comes back: they change with each update even
where the rounded ones stay. Checkpoints, evaluation and the final weights take the exact ones (`exact`).

The all-gather of the third form is the option of NVIDIA's submissions (`dwu-e5m2-allgather`, in none of them switched
on); there the weights are float16 and cut off to 8 bits, here they are float32 and rounded to nearest.

Legend: N elements of the padded flat buffer; n elements of the shard.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

import torch
from torch import Tensor

GATHERED_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "e5m2": torch.float8_e5m2}


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Returns when its result is there, on a GPU for what is queued next."""


class Layout(Protocol):
    """How the padded flat buffer is shared out; see `mlbert.distributed.sharding`.

    Attributes:
        size: ranks that share it out.
        blocks: (start, stop) of each block of the buffer, ascending.
        parts: (start, stop) of this rank's part of each block.
        spans: (start, stop) of each part within the shard.
    """

    size: int
    blocks: list[tuple[int, int]]
    parts: list[tuple[int, int]]
    spans: list[tuple[int, int]]

    def take(self, buffer: Tensor) -> Tensor:
        """This rank's shard of a buffer: a copy, or for a rank alone the buffer itself."""

    def gather(self, shard: Tensor) -> Tensor:
        """All ranks' shards as one buffer: a new one, or for a rank alone its shard itself."""

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sums over the ranks that share the buffer, in place."""

    def begin_all_gather(self, buffer: Tensor, block: int) -> Pending | None:
        """Starts filling one block of a buffer with every rank's part of it."""


class SharedWeights:
    """This rank's exact weights, and the buffer in which all ranks' weights arrive.

    A rank alone whose weights are not rounded owns the buffer itself: there is nothing to share.

    Args:
        buffer: float32 [N], the weights that the model computes with; equal and exact on all ranks.
        layout: how it is shared out.
        gathered: "fp32", "bf16" or "e5m2".
        copy: [N], the buffer in the activations' type, kept up to date here; None: there is none. Where weights
            travel in that type, they arrive in it.

    Attributes:
        shard: float32 [n], the exact weights that this rank owns.
        copy_to_write: the copy where an update that changes the shard has to write it too; None: nothing to write.
    """

    def __init__(self, buffer: Tensor, layout: Layout, gathered: str = "fp32", copy: Tensor | None = None) -> None:
        self._buffer, self._layout = buffer, layout
        self._dtype = GATHERED_DTYPES[gathered]
        self._rounds = self._dtype != torch.float32
        self._copy, arrives = copy, copy is not None and copy.dtype == self._dtype
        self._sent = buffer
        if self._rounds:
            self._sent = copy if copy is not None and arrives else torch.empty_like(buffer, dtype=self._dtype)
        self._needs_copying = copy is not None and not arrives
        self._works: list[Pending | None] = []
        self.shard = layout.take(buffer)
        self._is_buffer = layout.size == 1 and not self._rounds
        self.copy_to_write = copy if self._is_buffer else None
        if layout.size == 1 and self._rounds:
            self.shard = self.shard.clone()  # the buffer will hold the rounded weights
        self._round()

    def reload(self) -> None:
        """Takes the shard anew from the buffer, which all ranks have filled with exact weights."""
        if not self._is_buffer:
            self.shard.copy_(self._layout.take(self._buffer))
        self._round()

    def begin_sharing(self, block: int) -> None:
        """Starts handing out this rank's new weights of one block; blocks go in order, from 0."""
        if self._is_buffer:
            return
        assert block == len(self._works), "blocks go in order"
        (start, stop), (first, last) = self._layout.parts[block], self._layout.spans[block]
        self._sent[start:stop].copy_(self.shard[first:last])
        self._works.append(self._layout.begin_all_gather(self._sent, block))

    def finish_sharing(self, copied: bool = False) -> None:
        """Returns when the buffer holds all ranks' new weights, on a GPU for what is queued next.

        Args:
            copied: the update has written `copy_to_write`.
        """
        for (start, stop), work in zip(self._layout.blocks if self._works else [], self._works, strict=True):
            if work is not None:
                work.wait()
            if self._rounds:
                self._buffer[start:stop].copy_(self._sent[start:stop])
        self._works.clear()
        if not copied:
            self._fill_copy()

    def exact(self) -> AbstractContextManager[object]:
        """Fills the buffer with exact weights; the returned context, at its end, rounds them again."""
        context = ExitStack()
        if self._rounds:
            self._buffer.copy_(self._layout.gather(self.shard))
            self._fill_copy()
            context.callback(self._round)
        return context

    @torch.no_grad()
    def _round(self) -> None:
        if self._rounds:
            self._sent.copy_(self._buffer)
            self._buffer.copy_(self._sent)
        self._fill_copy()

    @torch.no_grad()
    def _fill_copy(self) -> None:
        if self._copy is not None and self._needs_copying:
            self._copy.copy_(self._buffer)
