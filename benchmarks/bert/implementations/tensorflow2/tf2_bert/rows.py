"""A step's input: rows of static shape, each with one sequence (as published) or several (packed).

The flat token stream of `mlbert.data.formats.ragged` is cut into rows because XLA compiles for one
shape. `sequence_ids` separates the sequences of a row; positions restart with each sequence.

Legend: B rows, L tokens per row, P predictions per row, S sequences per row.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Rows(NamedTuple):
    """Numpy arrays, tensors, or the `tf.TensorSpec` of each."""

    input_ids: Any  # int32 [B, L], 0 in empty slots
    segment_ids: Any  # int32 [B, L], 1 in sentence B
    sequence_ids: (
        Any  # int32 [B, L], index of the token's sequence in the row, from 1; 0 in empty slots
    )
    position_ids: Any  # int32 [B, L], position in its sequence
    masked_positions: Any  # int32 [B, P], column of a masked token
    masked_labels: Any  # int32 [B, P], its original id
    masked_weights: Any  # float32 [B, P], 1; 0 in empty slots
    first_positions: Any  # int32 [B, S], column of a sequence's [CLS]
    next_sentence_labels: Any  # int32 [B, S], 1 if sentence B is random
    next_sentence_weights: Any  # float32 [B, S], 1; 0 in empty slots
