"""The one batch format: a flat stream of the tokens of S sequences, back to back, without padding.

Legend: S sequences, T tokens, M masked tokens.

A batch on the host in the fewest bytes: one buffer, filled once from the sequences, brought to a device by one copy.

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

Fills a batch up to fixed sizes, so that every step has the same shapes: what a CUDA graph needs.

What is added takes no part in loss, gradient and accuracy: tokens behind the last sequence, sequences of no token
(`cu_seqlens` repeats its last value; a task's label is 0) and masked positions whose label is ignored.

Legend as in `mlbert.data.loading.batches`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlbert.data.formats.masking import MASKED_SHARE
from mlbert.data.formats.order import first_slots
from mlbert.data.formats.ragged import Ragged

IGNORED_LABEL = -100  # of what fills a batch up; as in PyTorch's cross_entropy


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank."""

    input_ids: Tensor  # int64 [T], token ids after masking
    segment_ids: Tensor  # int64 [T], 0 for sentence A, 1 for sentence B
    position_ids: Tensor  # int64 [T], position within the sequence, from 0
    cu_seqlens: Tensor  # int32 [S+1], sequence s holds tokens cu_seqlens[s] to cu_seqlens[s+1]
    max_seqlen: int  # longest sequence, tokens (a host number: no device synchronisation)
    masked_positions: Tensor  # int64 [M], index into T, ascending
    masked_labels: Tensor  # int64 [M], the original token ids
    next_sentence_labels: Tensor  # int64 [S], 1 when sentence B is a random one
    # int32 [T], names each token within the optimizer step, the same however the step's batch is split over ranks and
    # accumulation steps; dropout masks are keyed by it.
    dropout_rows: Tensor
    labels: Tensor | None = None  # float32 [S], a task's labels, classes or scores; None where there are none

    @property
    def num_samples(self) -> int:
        """Sequences in the batch (S)."""
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        """Real tokens in the batch (T)."""
        return self.input_ids.numel()

    @property
    def num_masked(self) -> int:
        """Masked tokens in the batch (M)."""
        return self.masked_labels.numel()

    @classmethod
    def empty(
        cls, tokens: int, sequences: int, masked: int, max_seqlen: int, has_labels: bool, device: torch.device | str
    ) -> Batch:
        """A batch of these sizes (T, S, M) in memory of its own, to be written."""

        def empty(length: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(length, dtype=dtype, device=device)

        return cls(
            input_ids=empty(tokens),
            segment_ids=empty(tokens),
            position_ids=empty(tokens),
            cu_seqlens=empty(sequences + 1, torch.int32),
            max_seqlen=max_seqlen,
            masked_positions=empty(masked),
            masked_labels=empty(masked),
            next_sentence_labels=empty(sequences),
            dropout_rows=empty(tokens, torch.int32),
            labels=empty(sequences, torch.float32) if has_labels else None,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by their names."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        moved: dict[str, Any] = {name: part.to(device, non_blocking=True) for name, part in self.tensors().items()}
        return replace(self, **moved)


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
        """Fills a new buffer with a `mlbert.data.formats.order.MicroBatchRows` of units of ``max_tokens`` slots, which
        name the dropout rows; ``page_locked``: in memory from which a copy runs beside the computation, which needs a
        CUDA device."""
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
    def dummy(cls, tokens: int, page_locked: bool = False, sequences: int = 1) -> HostBatch:
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
        `mlbert.data.loading.batches` says; None: new ones of the batch's sizes. What is returned is complete for work
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


TOKEN_MULTIPLE = 128  # tiles of a GPU's matrix products
MASKED_MULTIPLE = 16  # inner dimension of an FP8 product
DEVIATIONS = 6.0  # of the number of masked tokens, which is binomial
PARTS = (0.6, 0.8)  # of the most tokens, for batches that vary


@dataclass(frozen=True)
class StaticShape:
    """The sizes of a filled batch."""

    tokens: int  # T; a multiple of 16 suits FP8, one of 128 the tiles of a GPU's matrix products
    sequences: int  # S
    masked: int  # M
    max_seqlen: int  # longest sequence that may occur
    has_labels: bool = False  # whether batches carry a task's labels

    @classmethod
    def of_packs(
        cls, packs: int, max_tokens: int, max_sequences: int, max_seqlen: int, max_predictions: int
    ) -> StaticShape:
        """What so many packs hold at most: of ``max_tokens`` slots and ``max_sequences`` each, with sequences of at
        most ``max_seqlen`` tokens and ``max_predictions`` masked ones.

        The bound of masked tokens follows from the rule that data is made by: a sequence of L tokens has
        min(max_predictions, max(1, round(share L))), so less than share L + 1, and `max_predictions` tells the share
        where it is above the benchmark's. Data that was masked otherwise can exceed it: see `holds`.
        """
        share = max(MASKED_SHARE, max_predictions / max_seqlen)
        masked = min(math.floor(share * max_tokens) + max_sequences, max_sequences * max_predictions)
        return cls.rounded(packs * max_tokens, packs * max_sequences, packs * masked, max_seqlen)

    @classmethod
    def of_sequences(cls, sequences: int, length: int, rate: float) -> StaticShape:
        """What so many sequences of at most that length hold, each token masked with a chance of `rate`; one time in a
        billion they have more masked ones."""
        tokens = sequences * length
        masked = rate * tokens + DEVIATIONS * math.sqrt(rate * (1 - rate) * tokens)
        return cls.rounded(tokens, sequences, math.ceil(masked), length)

    @classmethod
    def rounded(cls, tokens: int, sequences: int, masked: int, max_seqlen: int) -> StaticShape:
        """At least so many, with tokens and masked tokens rounded up to what kernels want."""
        return cls(_rounded_up(tokens, TOKEN_MULTIPLE), sequences, _rounded_up(masked, MASKED_MULTIPLE), max_seqlen)

    @classmethod
    def over(cls, batches: Iterable[HostBatch]) -> StaticShape:
        """The least that holds each of some batches, with tokens and masked tokens rounded up as `of_packs` does."""
        tokens, sequences, masked, max_seqlen, labels = zip(*(_sizes(batch) for batch in batches), strict=True)
        return cls(
            tokens=_rounded_up(max(tokens), TOKEN_MULTIPLE),
            sequences=max(sequences),
            masked=_rounded_up(max(masked), MASKED_MULTIPLE),
            max_seqlen=max(max_seqlen),
            has_labels=any(labels),
        )

    def smaller_ones(self) -> tuple[StaticShape, ...]:
        """Budgets for batches that vary, the smallest first: parts of this one's tokens, as many sequences.

        None where sequences are packed: batches are full then.
        """
        longest = self.sequences * self.max_seqlen  # `tokens` before it was rounded up
        if longest > self.tokens:
            return ()
        smaller = []
        for part in PARTS:
            tokens = _rounded_up(math.ceil(part * self.tokens), TOKEN_MULTIPLE)
            # Rounding gives a sequence one masked token more than its share at most, see `of_packs`.
            masked = math.ceil(self.masked * tokens / longest) + self.sequences
            smaller.append(replace(self, tokens=tokens, masked=min(self.masked, _rounded_up(masked, MASKED_MULTIPLE))))
        return tuple(dict.fromkeys(static_shape for static_shape in smaller if static_shape.tokens < self.tokens))

    def holds(self, batch: HostBatch) -> bool:
        """Whether the batch is within all four sizes, and has labels where the budget has them."""
        *sizes, has_labels = _sizes(batch)
        limits = (self.tokens, self.sequences, self.masked, self.max_seqlen)
        fits = all(size <= limit for size, limit in zip(sizes, limits, strict=True))
        return fits and has_labels == self.has_labels

    def allocate(self, device: torch.device | str) -> Batch:
        """A batch of these sizes with one sequence of one token, in memory of its own: what `write` fills."""
        batch = Batch.empty(self.tokens, self.sequences, self.masked, self.max_seqlen, self.has_labels, device)
        for tensor in batch.tensors().values():
            tensor.zero_()
        batch.cu_seqlens[1:] = 1
        batch.masked_labels.fill_(IGNORED_LABEL)
        batch.next_sentence_labels[1:] = IGNORED_LABEL
        return batch

    def write(self, batch: HostBatch, target: Batch) -> None:
        """Makes `target`, which `allocate` gave on any device, hold the batch, which must be held. Ignored labels look
        at a real token: position 0 exists in every batch. The loss still divides by the numbers of masked tokens and
        sequences of the batch that was given."""
        assert self.holds(batch), "the batch is larger than the budget"
        batch.to(target.input_ids.device, out=target)


def _sizes(batch: HostBatch) -> tuple[int, int, int, int, bool]:
    return batch.num_tokens, batch.num_samples, batch.num_masked, batch.max_seqlen, batch.has_labels


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
