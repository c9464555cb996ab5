"""Convert ragged sequences to rows of static shape; numpy only.

Legend: B rows, L tokens per row, P predictions per row, S sequences per row; R filled rows; N
sequences, T tokens and M predictions in total.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from mlbert.data.formats.ragged import Ragged, offsets_of
from mlbert.data.formats.static_masking import MASKED_SHARE
from mlbert.host.errors import UserError
from tf2_bert.rows import Rows


class RowShape(NamedTuple):
    """Sizes of every row."""

    tokens: int  # L
    predictions: int  # P
    sequences: int  # S


def row_shape(tokens: int, sequences: int, max_seq_length: int, max_predictions: int) -> RowShape:
    """Return the shape of rows of ``tokens`` slots and at most ``sequences`` sequences, each of at
    most ``max_seq_length`` tokens and ``max_predictions`` predictions.

    P is large enough for data made by the usual rule: a sequence of l tokens has
    min(max_predictions, max(1, round(share l))) predictions, so fewer than share l + 1, and a row
    has fewer than share L + S. The share is 0.15, as in the benchmark, or max_predictions /
    max_seq_length if that is larger. S max_predictions is a bound for any rule, but triples the
    output layer for S = 3, so it is used only if it is smaller. For data masked by another rule,
    `rows_of` may reject a row; a larger MAX_PREDICTIONS_PER_SEQ widens the rows.
    """
    share = max(MASKED_SHARE, max_predictions / max_seq_length)
    by_rule = math.floor(share * tokens) + sequences
    predictions = max_predictions if sequences == 1 else min(by_rule, sequences * max_predictions)
    return RowShape(tokens, min(predictions, tokens), sequences)


def rows_of(ragged: Ragged, per_row: np.ndarray, num_rows: int, shape: RowShape) -> Rows:
    """Lay out sequences in rows, one after another from column 0; return numpy arrays.

    Args:
        ragged: N sequences, row by row.
        per_row: int64 [R], sequences per row, which sum to N; R is at most ``num_rows``.
        num_rows: B; rows after the first R are all zeros, including weights.
        shape: L, P, S.

    Raises UserError: a row has more tokens, predictions or sequences than ``shape``.
    """
    length, predictions, sequences = shape
    assert len(per_row) <= num_rows
    assert per_row.sum() == len(ragged), "every sequence has a row"
    first = offsets_of(per_row)  # [R+1], first sequence of each row
    # [R+1]
    tokens_before = ragged.offsets[first]
    masked_before = ragged.masked_offsets[first]
    row_tokens = np.diff(tokens_before)
    row_masked = np.diff(masked_before)
    _check(per_row, sequences, "sequences", "MAX_SEQUENCES_PER_PACK", "Raise it")
    _check(
        row_tokens, length, "tokens", "MAX_SEQ_LENGTH", "Prepare the data with shorter sequences"
    )
    _check(row_masked, predictions, "predictions", "MAX_PREDICTIONS_PER_SEQ", "Raise it")

    row = np.repeat(np.arange(len(per_row)), per_row)  # [N], row of each sequence
    place = np.arange(len(ragged)) - first[row]  # [N], index within its row
    column = ragged.offsets[:-1] - tokens_before[row]  # [N], column of its first token
    lengths = ragged.lengths
    masked = np.diff(ragged.masked_offsets)
    # Index of each token in the flat [B * L]; likewise of predictions in [B * P]
    # and sequences in [B * S].
    at = np.arange(len(ragged.tokens)) + np.repeat(
        np.arange(len(per_row)) * length - tokens_before[:-1], row_tokens
    )
    shift = np.arange(len(per_row)) * predictions - masked_before[:-1]
    at_masked = np.arange(len(ragged.masked_positions)) + np.repeat(shift, row_masked)
    at_sequence = row * sequences + place
    position = np.arange(len(ragged.tokens)) - np.repeat(ragged.offsets[:-1], lengths)

    def spread(
        values: np.ndarray | int, where: np.ndarray, width: int, kind: type = np.int32
    ) -> np.ndarray:
        flat: np.ndarray = np.zeros(num_rows * width, kind)
        flat[where] = values
        return flat.reshape(num_rows, width)

    return Rows(
        input_ids=spread(ragged.tokens, at, length),
        segment_ids=spread(position >= np.repeat(ragged.first_lengths, lengths), at, length),
        sequence_ids=spread(np.repeat(place + 1, lengths), at, length),
        position_ids=spread(position, at, length),
        masked_positions=spread(
            ragged.masked_positions + np.repeat(column, masked), at_masked, predictions
        ),
        masked_labels=spread(ragged.masked_labels, at_masked, predictions),
        masked_weights=spread(1, at_masked, predictions, np.float32),
        first_positions=spread(column, at_sequence, sequences),
        next_sentence_labels=spread(ragged.next_sentence, at_sequence, sequences),
        next_sentence_weights=spread(1, at_sequence, sequences, np.float32),
    )


def zero_rows(num_rows: int, shape: RowShape) -> Rows:
    """Return dummy rows for compiling a step.

    Each is one sequence of L tokens 0 in sentence A, with all predictions at column 0 and label 0.
    Weights are 1 to avoid dividing by 0.
    """
    length, predictions, sequences = shape
    tokens = np.zeros((num_rows, length), np.int32)
    masked = np.zeros((num_rows, predictions), np.int32)
    first = np.zeros((num_rows, sequences), np.int32)
    weights = np.zeros(first.shape, np.float32)
    weights[:, 0] = 1
    return Rows(
        input_ids=tokens,
        segment_ids=tokens.copy(),
        sequence_ids=np.ones_like(tokens),
        position_ids=np.tile(np.arange(length, dtype=np.int32), (num_rows, 1)),
        masked_positions=masked,
        masked_labels=masked.copy(),
        masked_weights=np.ones(masked.shape, np.float32),
        first_positions=first,
        next_sentence_labels=first.copy(),
        next_sentence_weights=weights,
    )


def _check(found: np.ndarray, limit: int, kind: str, variable: str, remedy: str) -> None:
    """Raise UserError if any of ``found``, int64 [R], exceeds ``limit``."""
    if found.max(initial=0) > limit:
        reason = f"a row of the data has {found.max()} {kind}, but only {limit} fit"
        raise UserError("data.too-long", variable, reason, remedy)
