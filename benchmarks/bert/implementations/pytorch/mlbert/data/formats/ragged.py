"""Sequences of different lengths, concatenated, with offsets instead of padding.

Legend: S sequences, T tokens, M masked tokens.

===================  ==============  =======================================================
tokens               uint16 [T]      token ids after masking; uint32 in memory, if the vocabulary
                                     has more than 65,536 entries
offsets              int64 [S+1]     sequence s holds tokens[offsets[s]:offsets[s+1]]
masked_positions     uint16 [M]      position within its sequence, ascending
masked_labels        uint16 [M]      original ids at these positions; as tokens
masked_offsets       int64 [S+1]     sequence s holds
                                     masked_*[masked_offsets[s]:masked_offsets[s+1]]
first_lengths        uint16 [S]      tokens of segment 0: [CLS], sentence A, [SEP]
next_sentence        uint8 [S]       1 if sentence B is a random one
===================  ==============  =======================================================
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

NARROW = np.dtype("<u2")  # of token ids
WIDE = np.dtype("<u4")  # of token ids of a vocabulary with more than 65,536 entries
BLOCK = 1 << 19  # elements that `Ragged.take` copies at a time

DTYPES: dict[str, np.dtype] = {
    "tokens": np.dtype("<u2"),
    "offsets": np.dtype("<i8"),
    "masked_positions": np.dtype("<u2"),
    "masked_labels": np.dtype("<u2"),
    "masked_offsets": np.dtype("<i8"),
    "first_lengths": np.dtype("<u2"),
    "next_sentence": np.dtype("<u1"),
}

# A sequence: tokens, those of segment 0, whether sentence B is a random one, masked positions,
# the original ids there.
Row = tuple[Sequence[int], int, bool, Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class Ragged:
    """Concatenated sequences; fields as in the module's table, with offsets starting at 0.

    ``labels``, float32 [S], are optional task labels, which shards do not store.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    masked_positions: np.ndarray
    masked_labels: np.ndarray
    masked_offsets: np.ndarray
    first_lengths: np.ndarray
    next_sentence: np.ndarray
    labels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.first_lengths)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [S], tokens of each sequence."""
        return np.diff(self.offsets)

    @classmethod
    def from_rows(cls, rows: Iterable[Row], dtype: np.dtype = NARROW) -> Ragged:
        """Build from single sequences with token ids of this type."""
        token_rows, first, random_next, positions, labels = list(zip(*rows, strict=True)) or [
            (),
            (),
            (),
            (),
            (),
        ]
        tokens, offsets = flattened(token_rows, dtype)
        masked_positions, masked_offsets = flattened(positions)
        return cls(
            tokens=tokens,
            offsets=offsets,
            masked_positions=masked_positions,
            masked_labels=flattened(labels, dtype)[0],
            masked_offsets=masked_offsets,
            first_lengths=np.asarray(first, DTYPES["first_lengths"]),
            next_sentence=np.asarray(random_next, DTYPES["next_sentence"]),
        )

    def take(self, indices: np.ndarray) -> Ragged:
        """Return the sequences ``indices`` (int [S']), in that order."""
        (tokens,), offsets = _take_rows(self.offsets, indices, (self.tokens,))
        masks, masked_offsets = _take_rows(
            self.masked_offsets, indices, (self.masked_positions, self.masked_labels)
        )
        positions, labels = masks
        return self._of_rows(indices, tokens, offsets, positions, labels, masked_offsets)

    def slice(self, first: int, end: int) -> Ragged:
        """Return the sequences from ``first`` up to ``end``, exclusive;
        tokens and masks are views.
        """
        offsets = self.offsets[first : end + 1]
        masked_offsets = self.masked_offsets[first : end + 1]
        tokens = slice(offsets[0], offsets[-1])
        masked = slice(masked_offsets[0], masked_offsets[-1])
        return self._of_rows(
            slice(first, end),
            self.tokens[tokens],
            offsets - offsets[0],
            self.masked_positions[masked],
            self.masked_labels[masked],
            masked_offsets - masked_offsets[0],
        )

    def _of_rows(
        self, rows: Any, tokens: Any, offsets: Any, positions: Any, labels: Any, masked_offsets: Any
    ) -> Ragged:
        """Return the sequences that ``rows`` (an index or slice) selects,
        given their tokens and masks.
        """
        first = self.first_lengths[rows]
        next_sentence = self.next_sentence[rows]
        task_labels = None if self.labels is None else self.labels[rows]
        return Ragged(
            tokens, offsets, positions, labels, masked_offsets, first, next_sentence, task_labels
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Ragged]) -> Ragged:
        """Return all sequences of ``parts``, in order; either all or none must have task labels."""
        return cls.of_ranges((part, 0, len(part)) for part in parts)

    @classmethod
    def of_ranges(cls, ranges: Iterable[tuple[Ragged, int, int]]) -> Ragged:
        """Return copies of ranges (rows, first, end), end exclusive, concatenated.

        The result is the same as with `slice` and `concatenate`, in a third of the time for short
        ranges, because offsets are joined unchanged.
        """
        parts: dict[str, list[np.ndarray]] = {name: [] for name in DTYPES}
        labels = []
        for rows, first, end in ranges:
            offsets = rows.offsets[first : end + 1]
            masked = rows.masked_offsets[first : end + 1]
            check_spans(offsets[:-1], offsets[1:], len(rows.tokens))
            check_spans(masked[:-1], masked[1:], len(rows.masked_labels))
            parts["offsets"].append(offsets)
            parts["masked_offsets"].append(masked)
            parts["tokens"].append(rows.tokens[offsets[0] : offsets[-1]])
            parts["masked_positions"].append(rows.masked_positions[masked[0] : masked[-1]])
            parts["masked_labels"].append(rows.masked_labels[masked[0] : masked[-1]])
            parts["first_lengths"].append(rows.first_lengths[first:end])
            parts["next_sentence"].append(rows.next_sentence[first:end])
            if rows.labels is not None:
                labels.append(rows.labels[first:end])
        if not parts["offsets"]:
            return cls.from_rows([])
        assert len(labels) in (0, len(parts["offsets"])), (
            "some sequences have task labels and some have none"
        )
        arrays = {name: np.concatenate(pieces) for name, pieces in parts.items()}
        # A range of n sequences has n + 1 offsets;
        # drop the difference between one range's last and the next's first.
        borders = np.cumsum([len(piece) for piece in parts["offsets"]])[:-1] - 1
        for name in ("offsets", "masked_offsets"):
            arrays[name] = offsets_of(np.delete(np.diff(arrays[name]), borders))
        return cls(**arrays, labels=np.concatenate(labels) if labels else None)


def flattened(
    rows: Sequence[Sequence[int]], dtype: np.dtype = NARROW
) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of all rows, uint16 or uint32 [T], and the start of each row, int64
    [rows+1].
    """
    flat = array("H" if dtype.itemsize == NARROW.itemsize else "I")
    for row in rows:
        flat.extend(row)
    return np.frombuffer(flat, dtype), offsets_of([len(row) for row in rows])


def ids_dtype(vocab_size: int) -> np.dtype:
    """Return the type of token ids below ``vocab_size``: uint16, or uint32 if it must be."""
    return NARROW if vocab_size <= 1 << 8 * NARROW.itemsize else WIDE


def sizes_of(rows: int, tokens: int, masked: int) -> dict[str, int]:
    """Return the lengths of the arrays of a `Ragged` with these counts,
    in the order of `DTYPES`.
    """
    sizes = {**dict.fromkeys(DTYPES, rows), "offsets": rows + 1, "masked_offsets": rows + 1}
    return {**sizes, "tokens": tokens, "masked_positions": masked, "masked_labels": masked}


def offsets_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return int64 [n+1], the running sum of ``lengths`` (int [n]) from 0."""
    result = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=result[1:])
    return result


def span_members(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return int64, the ``counts[i]`` numbers from ``starts[i]`` upwards for each i,
    concatenated.
    """
    offsets = offsets_of(counts)
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)


def check_spans(starts: np.ndarray, ends: np.ndarray, size: int | np.ndarray) -> None:
    """Raise ValueError if a span ends before it starts, or outside an array of ``size`` elements
    (one size for all spans, or one each).
    """
    if len(starts) and (starts.min() < 0 or (ends > size).any() or (ends < starts).any()):
        raise ValueError("offsets fall, or lead outside of the data")


def _take_rows(
    offsets: np.ndarray, indices: np.ndarray, values: tuple[np.ndarray, ...]
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the rows ``indices`` of ragged arrays with common offsets, and the offsets of the
    result. Raises ValueError if the offsets do not fit the arrays.
    """
    starts, ends = (np.asarray(offsets[np.asarray(indices) + place], np.int64) for place in (0, 1))
    check_spans(starts, ends, len(values[0]))
    new_offsets = offsets_of(ends - starts)
    taken = [np.empty(new_offsets[-1], array.dtype) for array in values]
    first = 0
    while first < len(
        starts
    ):  # in blocks, because an element's index takes far more memory than the element
        end = max(
            first + 1,
            int(np.searchsorted(new_offsets, new_offsets[first] + BLOCK, side="right")) - 1,
        )
        low = new_offsets[first]
        high = new_offsets[end]
        shift = np.repeat(
            starts[first:end] - new_offsets[first:end], np.diff(new_offsets[first : end + 1])
        )
        shift += np.arange(low, high)
        for source, target in zip(values, taken, strict=True):
            np.take(source, shift, out=target[low:high], mode="clip")
        first = end
    return taken, new_offsets
