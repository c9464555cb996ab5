"""A batch on the host in the fewest bytes: one buffer, filled once from the sequences, brought to a device by one copy.

The device makes the `Batch` from it (`mlbert.data.loading.triton_expand`, or the plain twin here), so positions,
segments, dropout rows and 64-bit ids never cross the bus: 2.9 bytes a token instead of 30.

==================  ==================  =============================================================
ids                 16 bits [T]         token ids after masking
masked_labels       16 bits [M]         original ids
masked_positions    int32 [M]           index into T
cu_seqlens          int32 [S+1]         as in `Batch`
first_lengths       int32 [S]           tokens of segment 0; the rest of the sequence is segment 1
first_rows          int32 [S]           dropout row of the first token; the rows of a sequence count up
next_sentence       uint8 [S]           1 when sentence B is a random one
labels              float32 [S]         a task's labels, in a batch that has them
==================  ==================  =============================================================

Legend: S sequences, T tokens, M masked tokens, P units (packs, or single sequences).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mlbert.data.formats.order import first_slots
from mlbert.data.formats.ragged import Ragged
from mlbert.data.loading.batch import IGNORED_LABEL, Batch

ALIGNMENT = 16  # bytes, so that kernels may load several elements at a time
NUMPY_TYPES = {  # PyTorch computes with few unsigned types: 16-bit ids pass through it as signed ones
    torch.int16: np.uint16,
    torch.int32: np.int32,
    torch.uint8: np.uint8,
    torch.float32: np.float32,
}
FILLERS = {  # of what is longer than the batch; 0 where nothing is named, and cu_seqlens repeats its last value
    "masked_labels": IGNORED_LABEL,
    "next_sentence_labels": IGNORED_LABEL,
}

Expand = Callable[[Mapping[str, Tensor], Batch], None]


@dataclass(frozen=True)
class HostBatch:
    """A micro-batch that `to` makes the `Batch` of, on a device."""

    # uint8 [bytes], the module's table; every part begins at a multiple of ALIGNMENT. On the host, or on a device that
    # keeps it.
    data: Tensor
    num_tokens: int  # T
    num_samples: int  # S
    num_masked: int  # M
    max_seqlen: int  # longest sequence, tokens
    has_labels: bool  # whether there is a part ``labels``

    @classmethod
    def of(
        cls, rows: Ragged, sequences_per_unit: np.ndarray, units: np.ndarray, max_tokens: int, page_locked: bool = False
    ) -> HostBatch:
        """Fills a new buffer with a `mlbert.data.formats.order.Portion` of units of ``max_tokens`` slots, which name
        the dropout rows; ``page_locked``: in memory from which a copy runs beside the computation, which needs a CUDA
        device."""
        lengths, labels = rows.lengths, rows.labels
        sizes = len(rows.tokens), len(rows), len(rows.masked_labels)
        longest = int(lengths.max()) if len(rows) else 0
        num_bytes = max(part.stop for part, _ in _layout(*sizes, labels is not None).values())
        data = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=page_locked)
        batch = cls(data, *sizes, longest, labels is not None)
        parts = batch.arrays()
        parts["ids"][:] = rows.tokens
        parts["masked_labels"][:] = rows.masked_labels
        # Positions count from the sequence's first token in `rows`, and from the batch's first token here.
        parts["masked_positions"][:] = rows.masked_positions
        parts["masked_positions"] += np.repeat(rows.offsets[:-1], np.diff(rows.masked_offsets)).astype(np.int32)
        parts["cu_seqlens"][:] = rows.offsets
        parts["first_lengths"][:] = rows.first_lengths
        parts["first_rows"][:] = first_slots(rows, sequences_per_unit, units, max_tokens)
        parts["next_sentence"][:] = rows.next_sentence
        if labels is not None:
            parts["labels"][:] = labels
        return batch

    @classmethod
    def of_sequences(cls, rows: Ragged, numbers: np.ndarray, max_tokens: int, page_locked: bool = False) -> HostBatch:
        """`of` sequences that are units by themselves; ``numbers`` (int64 [S]) name their dropout rows."""
        return cls.of(rows, np.ones(len(rows), np.int64), numbers, max_tokens, page_locked)

    @classmethod
    def made_up(cls, tokens: int, page_locked: bool = False, sequences: int = 1) -> HostBatch:
        """Sequences of so many tokens (2 or more), all of id 0, one of them masked; every label is 0. To warm up."""
        rows = Ragged.from_rows([([0] * tokens, tokens, False, [1], [0])] * sequences)
        rows = replace(rows, labels=np.zeros(sequences, np.float32))
        return cls.of_sequences(rows, np.arange(sequences), tokens, page_locked)

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 [S+1], as `Batch` has it."""
        return self.parts(self.data)["cu_seqlens"]

    def parts(self, data: Tensor) -> dict[str, Tensor]:
        """Views of the module's table, of this batch's buffer or of a copy of it."""
        return {name: data[part].view(dtype) for name, (part, dtype) in self._layout.items()}

    def arrays(self) -> dict[str, np.ndarray]:
        """`parts` of a buffer on the host, for numpy, which takes a quarter of the time to make them."""
        data = self.data.numpy()
        return {name: data[part].view(NUMPY_TYPES[dtype]) for name, (part, dtype) in self._layout.items()}

    @functools.cached_property
    def _layout(self) -> dict[str, tuple[slice, torch.dtype]]:
        return _layout(self.num_tokens, self.num_samples, self.num_masked, self.has_labels)

    def to(self, device: torch.device | str, out: Batch | None = None) -> Batch:
        """The batch on a device; nothing waits, neither for the host nor for what the device still computes.

        The tensors of ``out`` are written from index 0, and what is longer than the batch is filled up as
        `mlbert.data.loading.budget` says; None: new ones of the batch's sizes. What is returned is complete for work
        that is queued on the current stream from now on.
        """
        device = torch.device(device)
        if out is None and device.type == "cpu" and not self.data.is_cuda:
            tensors = {name: torch.from_numpy(array) for name, array in expanded(self.arrays()).items()}
            return Batch(**tensors, max_seqlen=self.max_seqlen)
        assert out is None or (out.labels is not None) == self.has_labels, "labels are here, or there, but not both"
        crosses = device.type == "cuda" and not self.data.is_cuda
        data = _copy_beside(self.data, device) if crosses else self.data.to(device)
        if out is None:
            sizes = self.num_tokens, self.num_samples, self.num_masked
            out = Batch.empty(*sizes, self.max_seqlen, self.has_labels, device)
        expansion(device)(self.parts(data), out)
        return out


def _layout(tokens: int, sequences: int, masked: int, has_labels: bool) -> dict[str, tuple[slice, torch.dtype]]:
    """Name -> bytes of the buffer and type of each part."""
    parts = [
        ("ids", tokens, torch.int16),
        ("masked_labels", masked, torch.int16),
        ("masked_positions", masked, torch.int32),
        ("cu_seqlens", sequences + 1, torch.int32),
        ("first_lengths", sequences, torch.int32),
        ("first_rows", sequences, torch.int32),
        ("next_sentence", sequences, torch.uint8),
    ]
    if has_labels:
        parts.append(("labels", sequences, torch.float32))
    layout, start = {}, 0
    for name, length, dtype in parts:
        end = start + length * dtype.itemsize
        layout[name] = (slice(start, end), dtype)
        start = -(-end // ALIGNMENT) * ALIGNMENT
    return layout


def expanded(parts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of the `Batch` that the parts describe, new arrays by their names."""
    bounds = parts["cu_seqlens"]
    starts, lengths = bounds[:-1], bounds[1:] - bounds[:-1]
    position = np.arange(bounds[-1], dtype=np.int32)  # in the batch, then in the sequence
    position -= starts.repeat(lengths)
    arrays = {
        "input_ids": parts["ids"].astype(np.int64),
        "segment_ids": (position >= parts["first_lengths"].repeat(lengths)).astype(np.int64),
        "position_ids": position.astype(np.int64),
        "cu_seqlens": bounds.copy(),
        "masked_positions": parts["masked_positions"].astype(np.int64),
        "masked_labels": parts["masked_labels"].astype(np.int64),
        "next_sentence_labels": parts["next_sentence"].astype(np.int64),
        "dropout_rows": parts["first_rows"].repeat(lengths) + position,
    }
    if "labels" in parts:
        arrays["labels"] = parts["labels"].copy()
    return arrays


def expand_plain(parts: Mapping[str, Tensor], out: Batch) -> None:
    """Writes the batch that the parts describe, and fills it up; on the host, for which a device is waited for."""
    on_host = {name: part.cpu().numpy() for name, part in parts.items()}
    arrays = expanded({name: array.view(NUMPY_TYPES[parts[name].dtype]) for name, array in on_host.items()})
    for name, array in arrays.items():
        target, length = getattr(out, name), len(array)
        target[:length].copy_(torch.from_numpy(array))
        target[length:].fill_(FILLERS.get(name, 0))
    out.cu_seqlens[len(arrays["cu_seqlens"]) :].fill_(len(arrays["input_ids"]))


@functools.cache
def expansion(device: torch.device) -> Expand:
    """What expands on this device: the Triton kernel on CUDA, the plain twin elsewhere and without Triton."""
    if device.type == "cuda":
        try:
            from mlbert.data.loading.triton_expand import expand
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
