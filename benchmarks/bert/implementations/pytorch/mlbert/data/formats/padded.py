"""Sequences as padded columns, the form of the benchmark's TFRecords and of Streaming's MDS sets.

====================  ======  ================================================
input_ids             [S, L]  token ids after masking, then anything
input_mask            [S, L]  1 for each token, then 0
segment_ids           [S, L]  0 in sentence A, 1 in sentence B, then anything
masked_lm_positions   [S, P]  positions of masked tokens
masked_lm_ids         [S, P]  their original ids
masked_lm_weights     [S, P]  1 for masked tokens, 0 for unused slots
next_sentence_labels  [S, 1]  1 if sentence B is a random one
====================  ======  ================================================

Legend: S sequences, L slots for tokens, P slots for masked tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mlbert.data.formats.ragged import DTYPES, Ragged, offsets_of

MAX_ID = 65_535  # ids are stored in 16 bits
NAMES = (  # in the order in the benchmark's files
    "input_ids",
    "masked_lm_positions",
    "input_mask",
    "segment_ids",
    "masked_lm_weights",
    "masked_lm_ids",
    "next_sentence_labels",
)


class Widths(NamedTuple):
    """Slots of a sequence for tokens and for masked tokens."""

    max_seq_length: int
    max_predictions: int

    def of(self, name: str) -> int:
        """Return the slots of a column."""
        if name == "next_sentence_labels":
            return 1
        return self.max_predictions if name.startswith("masked") else self.max_seq_length


def column_problems(
    columns: Mapping[str, np.ndarray], vocab_size: int = MAX_ID + 1
) -> dict[str, np.ndarray]:
    """Check columns; ids must be below ``vocab_size``.

    Returns {problem: bool [S], True for each bad sequence}.
    """
    inside = columns["input_mask"] != 0
    used = columns["masked_lm_weights"] != 0
    lengths = inside.sum(axis=1)
    segments = np.where(inside, columns["segment_ids"], 1)  # ascending up to the end
    tokens = np.where(inside, columns["input_ids"], 0)
    labels = np.where(used, columns["masked_lm_ids"], 0)
    positions = np.where(used, columns["masked_lm_positions"], 0)
    limit = "0 to 65,535" if vocab_size > MAX_ID else f"the vocabulary of {vocab_size} entries"
    return {
        "has an input_mask that is not ones and then zeros": ~_ones_first(columns["input_mask"])
        | (lengths == 0),
        "has segment_ids that are not zeros and then ones": ~_ones_first(1 - segments),
        "has masked_lm_weights other than 0 and 1": ~_zeros_or_ones(columns["masked_lm_weights"]),
        "has masked_lm_positions outside of the sequence": _outside(
            positions, np.maximum(lengths, 1)[:, None]
        ),
        "has next_sentence_labels other than 0 and 1": ~_zeros_or_ones(
            columns["next_sentence_labels"]
        ),
        f"has input_ids outside {limit}": _outside(tokens, vocab_size),
        f"has masked_lm_ids outside {limit}": _outside(labels, vocab_size),
    }


def _outside(values: np.ndarray, end: Any) -> np.ndarray:
    return ((values < 0) | (values >= end)).any(axis=1)


def _zeros_or_ones(values: np.ndarray) -> np.ndarray:
    return ((values == 0) | (values == 1)).all(axis=1)


def _ones_first(values: np.ndarray) -> np.ndarray:
    """Return bool [S], True for rows of ``values`` ([S, n]) that are ones and then zeros."""
    return _zeros_or_ones(values) & (np.diff(values, axis=1) <= 0).all(axis=1)


def padded(rows: Ragged, name: str, widths: Widths) -> np.ndarray:
    """Return a column of sequences, [S, L], [S, P] or [S, 1] of bool, uint8 or uint16,
    with zeros as padding.
    """
    if name == "next_sentence_labels":
        return rows.next_sentence[:, None]
    counts = np.diff(rows.masked_offsets) if name.startswith("masked") else rows.lengths
    slots = np.arange(widths.of(name))
    inside = slots < counts[:, None]
    if name in ("input_mask", "masked_lm_weights"):
        return inside
    if name == "segment_ids":
        return inside & (slots >= rows.first_lengths[:, None])
    values = {"input_ids": rows.tokens, "masked_lm_positions": rows.masked_positions}
    column = np.zeros(inside.shape, np.uint16)
    column[inside] = values.get(name, rows.masked_labels)
    return column


def without_padding(columns: Mapping[str, np.ndarray]) -> Ragged:
    """Return the sequences of valid columns; the predictions stay in order."""
    inside = columns["input_mask"] != 0
    used = columns["masked_lm_weights"] != 0
    arrays = {
        "tokens": columns["input_ids"][inside],
        "offsets": offsets_of(inside.sum(axis=1)),
        "masked_positions": columns["masked_lm_positions"][used],
        "masked_labels": columns["masked_lm_ids"][used],
        "masked_offsets": offsets_of(used.sum(axis=1)),
        "first_lengths": (inside & (columns["segment_ids"] == 0)).sum(axis=1),
        "next_sentence": columns["next_sentence_labels"][:, 0],
    }
    return Ragged(**{name: array.astype(DTYPES[name]) for name, array in arrays.items()})
