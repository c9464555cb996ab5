"""A batch in the fewest bytes, for its way to a device: one page-locked buffer, one copy on a stream of its own.

The device makes the `Batch` from it (`mlbert.feed.triton_expand`, or the plain twin here), so positions, segments,
dropout rows and 64-bit ids never cross the bus: 2.9 bytes a token instead of 30.

==================  ==================  =============================================================
ids                 16 bits [T]         token ids after masking
masked_labels       16 bits [M]         original ids
masked_positions    int32 [M]           index into T
cu_seqlens          int32 [S+1]         as in `Batch`
first_lengths       int32 [S]           tokens of segment 0; the rest of the sequence is segment 1
first_rows          int32 [S]           dropout row of the first token; the rows of a sequence count up
next_sentence       uint8 [S]           1 when sentence B is a random one
==================  ==================  =============================================================

Legend: S sequences, T tokens, M masked tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mlbert.feed.batch import IGNORED_LABEL, Batch

ALIGNMENT = 16  # bytes, so that kernels may load several elements at a time
MAX_ID = (1 << 16) - 1

Expand = Callable[[Mapping[str, Tensor], Batch], None]


@dataclass(frozen=True)
class CompactBatch:
    """A micro-batch that `to` makes the `Batch` of, on a device.

    Attributes:
        data: uint8 [bytes], the module's table; every part begins at a multiple of ALIGNMENT. On the host, or on a
            device that keeps it.
        num_tokens, num_samples, num_masked: T, S, M.
        max_seqlen: longest sequence, tokens.
    """

    data: Tensor
    num_tokens: int
    num_samples: int
    num_masked: int
    max_seqlen: int

    @classmethod
    def of(cls, batch: Batch, page_locked: bool = False) -> CompactBatch:
        """Packs a batch on the host, in new memory; ``page_locked`` needs a CUDA device.

        Each sequence's segment ids must be zeros and then ones, its positions and dropout rows must count up, and ids
        must fit 16 bits: true of all batches that `mlbert.feed.packed.make_batch` makes. Not for filled ones.
        """
        sizes = batch.num_tokens, batch.num_samples, batch.num_masked
        ids, labels = batch.input_ids.numpy(), batch.masked_labels.numpy()
        for array in (ids, labels):
            assert array.size == 0 or 0 <= array.min() <= array.max() <= MAX_ID, "an id does not fit 16 bits"
        bounds = batch.cu_seqlens.numpy()
        zeros = np.zeros(batch.num_tokens + 1, np.int32)
        np.cumsum(batch.segment_ids.numpy() == 0, out=zeros[1:])
        rows = np.append(batch.dropout_rows.numpy(), np.int32(0))  # a sequence without tokens may begin at the end
        last_byte = max(part.stop for part, _ in _layout(*sizes).values())
        data = torch.empty(last_byte, dtype=torch.uint8, pin_memory=page_locked)
        compact = cls(data, *sizes, batch.max_seqlen)
        values = {
            "ids": ids.astype(np.uint16).view(np.int16),
            "masked_labels": labels.astype(np.uint16).view(np.int16),
            "masked_positions": batch.masked_positions.numpy(),
            "cu_seqlens": bounds,
            "first_lengths": zeros[bounds[1:]] - zeros[bounds[:-1]],
            "first_rows": rows[bounds[:-1]],
            "next_sentence": batch.next_sentence_labels.numpy(),
        }
        for name, part in compact.parts(data).items():
            part.numpy()[:] = values[name]
        return compact

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 [S+1], as `Batch` has it."""
        return self.parts(self.data)["cu_seqlens"]

    def parts(self, data: Tensor) -> dict[str, Tensor]:
        """Views of the module's table, of this batch's buffer or of a copy of it."""
        layout = _layout(self.num_tokens, self.num_samples, self.num_masked)
        return {name: data[part].view(dtype) for name, (part, dtype) in layout.items()}

    def to(self, device: torch.device | str, out: Batch | None = None) -> Batch:
        """The batch on a device; nothing waits, neither for the host nor for what the device still computes.

        Args:
            device: where to.
            out: tensors that are written, from index 0; what is longer than the batch is filled up as
                `mlbert.feed.budget.Budget.fill` does it. None: new ones of the batch's sizes.

        Returns:
            ``out``, or a new batch. It is complete for work that is queued on the current stream from now on.
        """
        device = torch.device(device)
        crosses = device.type == "cuda" and not self.data.is_cuda
        data = _copy_beside(self.data, device) if crosses else self.data.to(device)
        if out is None:
            out = self._empty(device)
        expansion(device)(self.parts(data), out)
        return out

    def _empty(self, device: torch.device) -> Batch:
        def empty(length: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(length, dtype=dtype, device=device)

        return Batch(
            input_ids=empty(self.num_tokens),
            segment_ids=empty(self.num_tokens),
            position_ids=empty(self.num_tokens),
            cu_seqlens=empty(self.num_samples + 1, torch.int32),
            max_seqlen=self.max_seqlen,
            masked_positions=empty(self.num_masked),
            masked_labels=empty(self.num_masked),
            next_sentence_labels=empty(self.num_samples),
            dropout_rows=empty(self.num_tokens, torch.int32),
        )


def _layout(tokens: int, sequences: int, masked: int) -> dict[str, tuple[slice, torch.dtype]]:
    """Name -> bytes of the buffer and type of each part."""
    parts = (
        ("ids", tokens, torch.int16),
        ("masked_labels", masked, torch.int16),
        ("masked_positions", masked, torch.int32),
        ("cu_seqlens", sequences + 1, torch.int32),
        ("first_lengths", sequences, torch.int32),
        ("first_rows", sequences, torch.int32),
        ("next_sentence", sequences, torch.uint8),
    )
    layout, start = {}, 0
    for name, length, dtype in parts:
        end = start + length * dtype.itemsize
        layout[name] = (slice(start, end), dtype)
        start = -(-end // ALIGNMENT) * ALIGNMENT
    return layout


def expand_plain(parts: Mapping[str, Tensor], out: Batch) -> None:
    """Writes the batch that the parts describe, and fills it up; on any device, without waiting for it."""
    bounds, ids = parts["cu_seqlens"], parts["ids"]
    token = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device)
    sequence = torch.searchsorted(bounds[1:], token, right=True)  # the number of sequences that end before
    position = token - bounds.index_select(0, sequence)
    segment = position >= parts["first_lengths"].index_select(0, sequence)
    row = parts["first_rows"].index_select(0, sequence) + position
    for target, values, filler in (
        (out.input_ids, ids.long() & MAX_ID, 0),
        (out.segment_ids, segment, 0),
        (out.position_ids, position, 0),
        (out.dropout_rows, row, 0),
        (out.masked_positions, parts["masked_positions"], 0),
        (out.masked_labels, parts["masked_labels"].long() & MAX_ID, IGNORED_LABEL),
        (out.next_sentence_labels, parts["next_sentence"], IGNORED_LABEL),
        (out.cu_seqlens, bounds, ids.numel()),
    ):
        target[: values.numel()].copy_(values)
        target[values.numel() :].fill_(filler)


@functools.cache
def expansion(device: torch.device) -> Expand:
    """What expands on this device: the Triton kernel on CUDA, the plain twin elsewhere and without Triton."""
    if device.type == "cuda":
        try:
            from mlbert.feed.triton_expand import expand
        except ImportError:
            return expand_plain
        return expand
    return expand_plain


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _copy_beside(data: Tensor, device: torch.device) -> Tensor:
    """The copy of page-locked ``data`` on its own stream; the current stream goes on when it is there.

    PyTorch's allocators hand neither buffer out again before its last use is over: the host's, because they know of
    the copy; the device's, because of `record_stream`.
    """
    stream, current = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        copy = data.to(device, non_blocking=True)
    current.wait_stream(stream)
    copy.record_stream(current)
    return copy
