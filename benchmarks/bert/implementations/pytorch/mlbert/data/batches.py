"""The batch format: the tokens of S sequences, concatenated without padding.

On the host a batch is one compact buffer (`HostBatch`), which takes a single copy to the device.
The device expands it to a `Batch` (`mlbert.ops.triton.expand_batch`, or the reference here), so
positions, segments, dropout rows and 64-bit ids never cross the bus: 2.9 bytes per token instead of
30. The buffer holds:

==================  ==================  ============================================================
ids                 16 bits [T]         token ids after masking; 32 bits if the vocabulary has more
                                        than 65,536 entries
masked_labels       16 bits [M]         original ids; as ids
masked_positions    int32 [M]           index into T
cu_seqlens          int32 [S+1]         as in `Batch`
first_lengths       int32 [S]           tokens of segment 0; the rest of the sequence is segment 1
first_rows          int32 [S]           dropout row of the first token;
                                        the others follow consecutively
next_sentence       uint8 [S]           1 if sentence B is a random one
labels              float32 [S]         task labels, if the batch has any
==================  ==================  ============================================================

`StaticShape` pads a batch to fixed sizes, because a CUDA graph needs the same shapes in every step.
Padding does not affect loss, gradients or accuracy: it consists of tokens after the last sequence,
empty sequences (`cu_seqlens` repeats its last value; a task's label is 0) and masked positions with
an ignored label.

Legend: S sequences, T tokens, M masked tokens, P units (packs, or single sequences).
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

from mlbert.data.formats.order import first_slots
from mlbert.data.formats.ragged import NARROW, Ragged
from mlbert.data.formats.static_masking import MASKED_SHARE
from mlbert.ops import forms
from mlbert.ops.loss import IGNORED

EXPAND = "expand_batch"  # the op, in the registry of `mlbert.ops.forms`
IGNORED_LABEL = IGNORED  # label of padding
ALIGNMENT = 16  # bytes, so that kernels may load several elements at a time
NUMPY_TYPES = {  # PyTorch supports few unsigned types, so it sees 16-bit ids as signed
    torch.int16: np.uint16,
    torch.int32: np.int32,
    torch.uint8: np.uint8,
    torch.float32: np.float32,
}
FILLERS = {  # padding values; 0 for other tensors, and cu_seqlens repeats its last value
    "masked_labels": IGNORED_LABEL,
    "next_sentence_labels": IGNORED_LABEL,
}
# Of static shapes.
TOKEN_MULTIPLE = 128  # tiles of a GPU's matrix products
MASKED_MULTIPLE = 16  # inner dimension of an FP8 product
# Standard deviations of headroom for the number of masked tokens, which is binomial.
DEVIATIONS = 6.0
PARTS = (0.6, 0.8)  # fractions of the maximum token count, for batches of varying size


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank."""

    input_ids: Tensor  # int64 [T], token ids after masking
    segment_ids: Tensor  # int64 [T], 0 for sentence A, 1 for sentence B
    position_ids: Tensor  # int64 [T], position within the sequence, from 0
    cu_seqlens: Tensor  # int32 [S+1], sequence s holds tokens cu_seqlens[s] to cu_seqlens[s+1]
    max_seqlen: int  # longest sequence, tokens (on the host, to avoid a device synchronization)
    masked_positions: Tensor  # int64 [M], index into T, ascending
    masked_labels: Tensor  # int64 [M], the original token ids
    next_sentence_labels: Tensor  # int64 [S], 1 if sentence B is a random one
    # int32 [T], identifies each token within the optimizer step, independent of how the step is
    # split over ranks and accumulation steps. Dropout masks are keyed by it.
    dropout_rows: Tensor
    labels: Tensor | None = None  # float32 [S], task labels (classes or scores), if there are any

    @property
    def num_samples(self) -> int:
        """Number of sequences in the batch (S)."""
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the batch (T)."""
        return self.input_ids.numel()

    @property
    def num_masked(self) -> int:
        """Number of masked tokens in the batch (M)."""
        return self.masked_labels.numel()

    @classmethod
    def empty(
        cls,
        tokens: int,
        sequences: int,
        masked: int,
        max_seqlen: int,
        has_labels: bool,
        device: torch.device | str,
    ) -> Batch:
        """Return a batch of these sizes (T, S, M) in newly allocated, uninitialized memory."""

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
        """Return the tensors by field name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; `torch.utils.data.DataLoader` calls it."""
        pinned: dict[str, Any] = {name: part.pin_memory() for name, part in self.tensors().items()}
        return replace(self, **pinned)

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on another device."""
        moved: dict[str, Any] = {
            name: part.to(device, non_blocking=True) for name, part in self.tensors().items()
        }
        return replace(self, **moved)


# From the parts of a `HostBatch` to the tensors of a `Batch`, both by name.
Expand = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]


@dataclass(frozen=True)
class HostBatch:
    """The compact form of a micro-batch, which `to` expands to a `Batch`."""

    # uint8 [bytes], laid out as in the module's table; each part starts at a multiple of ALIGNMENT.
    # Usually on the host, but may be on a device.
    data: Tensor
    num_tokens: int  # T
    num_samples: int  # S
    num_masked: int  # M
    max_seqlen: int  # longest sequence, tokens
    has_labels: bool  # whether the part ``labels`` exists
    is_wide: bool = False  # whether token ids have 32 bits

    @classmethod
    def of(
        cls,
        rows: Ragged,
        sequences_per_unit: np.ndarray,
        units: np.ndarray,
        max_tokens: int,
        page_locked: bool = False,
    ) -> HostBatch:
        """Build a batch from the fields of a `mlbert.data.formats.order.MicroBatchRows`.

        Each unit has ``max_tokens`` slots, which determine the dropout rows. ``page_locked`` memory
        lets the copy to the device overlap computation; it requires a CUDA device.
        """
        labels = rows.labels
        num_tokens = len(rows.tokens)
        num_masked = len(rows.masked_labels)
        has_labels = labels is not None
        is_wide = rows.tokens.dtype.itemsize > NARROW.itemsize
        layout = _layout(num_tokens, len(rows), num_masked, has_labels, is_wide)
        num_bytes = max(part.stop for part, _ in layout.values())
        batch = cls(
            data=torch.empty(num_bytes, dtype=torch.uint8, pin_memory=page_locked),
            num_tokens=num_tokens,
            num_samples=len(rows),
            num_masked=num_masked,
            max_seqlen=int(rows.lengths.max()) if len(rows) else 0,
            has_labels=has_labels,
            is_wide=is_wide,
        )
        parts = batch.arrays()
        parts["ids"][:] = rows.tokens
        parts["masked_labels"][:] = rows.masked_labels
        # In `rows`, positions are relative to the sequence; here, to the batch.
        parts["masked_positions"][:] = rows.masked_positions
        parts["masked_positions"] += np.repeat(
            rows.offsets[:-1], np.diff(rows.masked_offsets)
        ).astype(np.int32)
        parts["cu_seqlens"][:] = rows.offsets
        parts["first_lengths"][:] = rows.first_lengths
        parts["first_rows"][:] = first_slots(rows, sequences_per_unit, units, max_tokens)
        parts["next_sentence"][:] = rows.next_sentence
        if labels is not None:
            parts["labels"][:] = labels
        return batch

    @classmethod
    def of_sequences(
        cls, rows: Ragged, numbers: np.ndarray, max_tokens: int, page_locked: bool = False
    ) -> HostBatch:
        """Build a batch in which each sequence is one unit;
        ``numbers`` (int64 [S]) determine the dropout rows.
        """
        return cls.of(rows, np.ones(len(rows), np.int64), numbers, max_tokens, page_locked)

    @classmethod
    def dummy(cls, tokens: int, page_locked: bool = False, sequences: int = 1) -> HostBatch:
        """Return a warm-up batch: each sequence has ``tokens`` (at least 2) tokens of id 0,
        one masked, and label 0.
        """
        rows = Ragged.from_rows([([0] * tokens, tokens, False, [1], [0])] * sequences)
        rows = replace(rows, labels=np.zeros(sequences, np.float32))
        return cls.of_sequences(rows, np.arange(sequences), tokens, page_locked)

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 [S+1], as in `Batch`."""
        return self.parts(self.data)["cu_seqlens"]

    def parts(self, data: Tensor) -> dict[str, Tensor]:
        """Return views of the parts by name; ``data`` is this batch's buffer or a copy of it."""
        return {name: data[part].view(dtype) for name, (part, dtype) in self._layout.items()}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return `parts` of a host buffer as NumPy arrays, in a quarter of the time."""
        data = self.data.numpy()
        return {
            name: data[part].view(NUMPY_TYPES[dtype])
            for name, (part, dtype) in self._layout.items()
        }

    @functools.cached_property
    def _layout(self) -> dict[str, tuple[slice, torch.dtype]]:
        return _layout(
            self.num_tokens, self.num_samples, self.num_masked, self.has_labels, self.is_wide
        )

    def to(self, device: torch.device | str, out: Batch | None = None) -> Batch:
        """Return the batch on a device, without waiting for queued device work.

        Writes to the tensors of ``out`` and pads the rest as described in the module's docstring;
        without ``out``, allocates tensors of the batch's sizes. The result is ready for work queued
        on the current stream afterwards.
        """
        device = torch.device(device)
        if out is None and device.type == "cpu" and not self.data.is_cuda:
            tensors = {
                name: torch.from_numpy(array) for name, array in expanded(self.arrays()).items()
            }
            return Batch(**tensors, max_seqlen=self.max_seqlen)
        assert out is None or (out.labels is not None) == self.has_labels, (
            "batch and target must both have labels, or neither"
        )
        crosses = device.type == "cuda" and not self.data.is_cuda
        data = _copy_on_side_stream(self.data, device) if crosses else self.data.to(device)
        if out is None:
            out = Batch.empty(
                self.num_tokens,
                self.num_samples,
                self.num_masked,
                self.max_seqlen,
                self.has_labels,
                device,
            )
        expansion(device)(self.parts(data), out.tensors())
        return out


def _layout(
    tokens: int, sequences: int, masked: int, has_labels: bool, is_wide: bool
) -> dict[str, tuple[slice, torch.dtype]]:
    """Return the byte range and dtype of each part by name."""
    of_ids = torch.int32 if is_wide else torch.int16
    parts = [
        ("ids", tokens, of_ids),
        ("masked_labels", masked, of_ids),
        ("masked_positions", masked, torch.int32),
        ("cu_seqlens", sequences + 1, torch.int32),
        ("first_lengths", sequences, torch.int32),
        ("first_rows", sequences, torch.int32),
        ("next_sentence", sequences, torch.uint8),
    ]
    if has_labels:
        parts.append(("labels", sequences, torch.float32))
    layout = {}
    start = 0
    for name, length, dtype in parts:
        end = start + length * dtype.itemsize
        layout[name] = (slice(start, end), dtype)
        start = -(-end // ALIGNMENT) * ALIGNMENT
    return layout


def expanded(parts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors of the expanded `Batch` as new arrays, by field name."""
    bounds = parts["cu_seqlens"]
    starts = bounds[:-1]
    lengths = bounds[1:] - bounds[:-1]
    position = np.arange(bounds[-1], dtype=np.int32)  # within the batch
    position -= starts.repeat(lengths)  # within the sequence
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


@forms.register_exact(EXPAND, "plain")
def expand_plain(parts: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
    """Expand the parts on the host and write them to ``out``, tensors by name, padded.

    Synchronizes with the device.
    """
    on_host = {name: part.cpu().numpy() for name, part in parts.items()}
    arrays = expanded(
        {name: array.view(NUMPY_TYPES[parts[name].dtype]) for name, array in on_host.items()}
    )
    for name, array in arrays.items():
        target = out[name]
        length = len(array)
        target[:length].copy_(torch.from_numpy(array))
        target[length:].fill_(FILLERS.get(name, 0))
    out["cu_seqlens"][len(arrays["cu_seqlens"]) :].fill_(len(arrays["input_ids"]))


def expansion(device: torch.device) -> Expand:
    """Return the expansion function for a device: the Triton kernel on CUDA if available,
    otherwise `expand_plain`.
    """
    return forms.fastest_exact(EXPAND, device.type)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _copy_on_side_stream(data: Tensor, device: torch.device) -> Tensor:
    """Copy page-locked ``data`` on a separate stream, and make the current stream wait for it.

    PyTorch reuses neither buffer too early: its pinned-memory allocator tracks the copy, and
    `record_stream` covers the device buffer.
    """
    stream = _copy_stream(device)
    current = torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        copy = data.to(device, non_blocking=True)
    current.wait_stream(stream)
    copy.record_stream(current)
    return copy


@dataclass(frozen=True)
class StaticShape:
    """The sizes of a padded batch."""

    tokens: int  # T; a multiple of 16 suits FP8, one of 128 the tiles of a GPU's matrix products
    sequences: int  # S
    masked: int  # M
    max_seqlen: int  # longest possible sequence, tokens
    has_labels: bool = False  # whether batches carry task labels

    @classmethod
    def of_packs(
        cls, packs: int, max_tokens: int, max_sequences: int, max_seqlen: int, max_predictions: int
    ) -> StaticShape:
        """Return the maximum sizes of ``packs`` packs.

        A pack has at most ``max_tokens`` slots and ``max_sequences`` sequences; a sequence has at
        most ``max_seqlen`` tokens, ``max_predictions`` of them masked.

        The bound on masked tokens follows from the masking rule: a sequence of L tokens has
        min(max_predictions, max(1, round(share L))) masked tokens, fewer than share L + 1. If
        `max_predictions` implies a larger share than the benchmark's, that share is used. Data
        masked by another rule can exceed the bound; see `holds`.
        """
        share = max(MASKED_SHARE, max_predictions / max_seqlen)
        masked = min(
            math.floor(share * max_tokens) + max_sequences, max_sequences * max_predictions
        )
        return cls.rounded(packs * max_tokens, packs * max_sequences, packs * masked, max_seqlen)

    @classmethod
    def of_sequences(cls, sequences: int, length: int, rate: float) -> StaticShape:
        """Return the maximum sizes of ``sequences`` sequences of at most ``length`` tokens, each
        token masked with probability ``rate``. One batch in a billion has more masked tokens.
        """
        tokens = sequences * length
        masked = rate * tokens + DEVIATIONS * math.sqrt(rate * (1 - rate) * tokens)
        return cls.rounded(tokens, sequences, math.ceil(masked), length)

    @classmethod
    def rounded(cls, tokens: int, sequences: int, masked: int, max_seqlen: int) -> StaticShape:
        """Return these sizes with tokens and masked tokens rounded up to the multiples
        that kernels prefer.
        """
        return cls(
            _rounded_up(tokens, TOKEN_MULTIPLE),
            sequences,
            _rounded_up(masked, MASKED_MULTIPLE),
            max_seqlen,
        )

    def fullest_batch(self) -> HostBatch:
        """Return a batch of equally long sequences that fill the tokens,
        with this number of masked tokens.

        No sequence is longer than `max_seqlen`, although `tokens` may have been rounded up to more
        than all of them together: positions beyond it need not exist.
        """
        parts = np.array_split(np.arange(self.tokens), self.sequences)
        lengths = [min(len(part), self.max_seqlen) for part in parts if len(part)]
        rows = []
        for length in lengths:
            masked = range(1, min(length, 1 + self.masked // len(lengths)))
            rows.append(([0] * length, length, False, masked, [0] * len(masked)))
        ragged = replace(Ragged.from_rows(rows), labels=np.zeros(len(rows), np.float32))
        return HostBatch.of_sequences(ragged, np.arange(len(rows)), max(lengths))

    @classmethod
    def over(cls, batches: Iterable[HostBatch]) -> StaticShape:
        """Return the smallest shape that fits every batch,
        with tokens and masked tokens rounded up as in `rounded`.
        """
        tokens, sequences, masked, max_seqlen, labels = zip(
            *(_sizes(batch) for batch in batches), strict=True
        )
        shape = cls.rounded(max(tokens), max(sequences), max(masked), max(max_seqlen))
        return replace(shape, has_labels=any(labels))

    def smaller_ones(self) -> tuple[StaticShape, ...]:
        """Return shapes with fewer tokens and the same number of sequences, smallest first.

        Empty if sequences are packed, because batches are always full then.
        """
        longest = self.sequences * self.max_seqlen  # `tokens` before it was rounded up
        if longest > self.tokens:
            return ()
        smaller = []
        for part in PARTS:
            tokens = _rounded_up(math.ceil(part * self.tokens), TOKEN_MULTIPLE)
            # Rounding adds at most one masked token per sequence, see `of_packs`.
            masked = math.ceil(self.masked * tokens / longest) + self.sequences
            smaller.append(
                replace(
                    self,
                    tokens=tokens,
                    masked=min(self.masked, _rounded_up(masked, MASKED_MULTIPLE)),
                )
            )
        return tuple(
            dict.fromkeys(
                static_shape for static_shape in smaller if static_shape.tokens < self.tokens
            )
        )

    def holds(self, batch: HostBatch) -> bool:
        """Return True if the batch fits all four sizes
        and has labels exactly if the shape has them.
        """
        *sizes, has_labels = _sizes(batch)
        limits = (self.tokens, self.sequences, self.masked, self.max_seqlen)
        fits = all(size <= limit for size, limit in zip(sizes, limits, strict=True))
        return fits and has_labels == self.has_labels

    def allocate(self, device: torch.device | str) -> Batch:
        """Return a new batch of these sizes for `write` to fill;
        it holds one sequence of one token.
        """
        batch = Batch.empty(
            self.tokens, self.sequences, self.masked, self.max_seqlen, self.has_labels, device
        )
        for tensor in batch.tensors().values():
            tensor.zero_()
        batch.cu_seqlens[1:] = 1
        batch.masked_labels.fill_(IGNORED_LABEL)
        batch.next_sentence_labels[1:] = IGNORED_LABEL
        return batch

    def write(self, batch: HostBatch, target: Batch) -> None:
        """Write a batch that `holds` accepts to ``target``, which `allocate` returned, and pad it.

        Ignored labels point at position 0, which exists in every batch. The loss must still be
        divided by the numbers of masked tokens and sequences of ``batch``.
        """
        assert self.holds(batch), "the batch does not fit the static shape"
        batch.to(target.input_ids.device, out=target)


def _sizes(batch: HostBatch) -> tuple[int, int, int, int, bool]:
    return batch.num_tokens, batch.num_samples, batch.num_masked, batch.max_seqlen, batch.has_labels


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
