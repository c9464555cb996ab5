"""The weights of a sharded optimizer: each rank owns a float32 shard,
and the exchange may round what the others receive.

    fp32    the exact weights
    bf16    rounded to bfloat16: half the bytes; bfloat16 products are unchanged, LayerNorm, biases
            and embeddings keep only 8 bits of the mantissa
    e5m2    rounded to 8 bits (5 exponent, 2 mantissa):
            a quarter of the bytes, errors up to 1/8; for experiments

With a rounded format, all ranks compute with the same rounded weights, including the owner.
Updates, weight decay and trust ratios use the owner's exact weights, which rounding never changes:
they move with each update even if the rounded weights stay the same. Checkpoints, evaluation and
the final weights use the exact weights (`exact`).

The e5m2 all-gather is an option of NVIDIA's submissions (`dwu-e5m2-allgather`, enabled in none of
them). There the weights are float16 truncated to 8 bits; here they are float32 rounded to nearest.

Legend: N elements of the padded flat buffer; n elements of the shard.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

import torch
from torch import Tensor

GATHERED_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "e5m2": torch.float8_e5m2}


class Pending(Protocol):
    """A collective in progress."""

    def wait(self) -> object:
        """Wait for the result; on a GPU, only later work on the stream waits."""


class Layout(Protocol):
    """How the padded flat buffer is sharded; see `mlbert.distributed.sharding`.

    Attributes:
        size: number of ranks that share the buffer.
        blocks: (start, stop) of each block of the buffer, ascending.
        parts: (start, stop) of this rank's part of each block.
        spans: (start, stop) of each part within the shard.
    """

    size: int
    blocks: list[tuple[int, int]]
    parts: list[tuple[int, int]]
    spans: list[tuple[int, int]]

    def take(self, buffer: Tensor) -> Tensor:
        """Return this rank's shard of a buffer: a copy,
        or the buffer itself if there is only one rank.
        """

    def gather(self, shard: Tensor) -> Tensor:
        """Return all ranks' shards as one new buffer,
        or the shard itself if there is only one rank.
        """

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum in place over the ranks that share the buffer."""

    def begin_all_gather(self, buffer: Tensor, block: int) -> Pending | None:
        """Start to fill one block of a buffer with every rank's part of it."""


class SharedWeights:
    """This rank's exact weights, and the buffer that receives all ranks' weights.

    If there is only one rank and weights are not rounded,
    it owns the buffer itself and nothing is exchanged.

    Args:
        buffer: float32 [N], the weights that the model computes with; equal and exact on all ranks.
        layout: how the buffer is sharded.
        gathered: "fp32", "bf16" or "e5m2".
        copy: [N], the buffer in the activations' dtype, kept up to date here (None: there is no
            copy). If weights are exchanged in that dtype, they are received directly into it.

    Attributes:
        shard: float32 [n], the exact weights that this rank owns.
        copy_to_write: the copy that an update of the shard has to write as well, or None.
    """

    def __init__(
        self, buffer: Tensor, layout: Layout, gathered: str = "fp32", copy: Tensor | None = None
    ) -> None:
        self._buffer = buffer
        self._layout = layout
        self._dtype = GATHERED_DTYPES[gathered]
        self._rounds = self._dtype != torch.float32
        self._copy = copy
        arrives = copy is not None and copy.dtype == self._dtype
        self._sent = buffer
        if self._rounds:
            self._sent = (
                copy
                if copy is not None and arrives
                else torch.empty_like(buffer, dtype=self._dtype)
            )
        self._needs_copying = copy is not None and not arrives
        self._works: list[Pending | None] = []
        self.shard = layout.take(buffer)
        self._is_buffer = layout.size == 1 and not self._rounds
        self.copy_to_write = copy if self._is_buffer else None
        if layout.size == 1 and self._rounds:
            self.shard = self.shard.clone()  # the buffer will hold the rounded weights
        self._round()

    def reload(self) -> None:
        """Reload the shard from the buffer, which must hold exact weights on all ranks."""
        if not self._is_buffer:
            self.shard.copy_(self._layout.take(self._buffer))
        self._round()

    def begin_sharing(self, block: int) -> None:
        """Start to send this rank's new weights of one block;
        blocks must follow in order, from 0.
        """
        if self._is_buffer:
            return
        assert block == len(self._works), "blocks go in order"
        start, stop = self._layout.parts[block]
        first, last = self._layout.spans[block]
        self._sent[start:stop].copy_(self.shard[first:last])
        self._works.append(self._layout.begin_all_gather(self._sent, block))

    def finish_sharing(self, copied: bool = False) -> None:
        """Wait until the buffer holds all ranks' new weights;
        on a GPU, only later work on the stream waits.

        Args:
            copied: the update has already written `copy_to_write`.
        """
        for (start, stop), work in zip(
            self._layout.blocks if self._works else [], self._works, strict=True
        ):
            if work is not None:
                work.wait()
            if self._rounds:
                self._buffer[start:stop].copy_(self._sent[start:stop])
        self._works.clear()
        if not copied:
            self._fill_copy()

    def exact(self) -> AbstractContextManager[object]:
        """Fill the buffer with exact weights; leaving the returned context rounds them again."""
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
