"""What a step consumes: rows of static shape, each with one sequence (as published) or several (packed).

The flat token stream of `mlbert.data.formats.ragged` is cut into rows because XLA compiles for one shape. A row with
several sequences keeps them apart by `sequence_ids`; positions begin anew with each.

Legend: B rows, L tokens of a row, P predictions of a row, S sequences of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Rows(NamedTuple):
    """Numpy arrays, tensors, or the `tf.TensorSpec` of each."""

    input_ids: Any  # int32 [B, L], 0 where there is no token
    segment_ids: Any  # int32 [B, L], 1 in sentence B
    sequence_ids: Any  # int32 [B, L], which sequence of the row a token belongs to, from 1; 0 where there is none
    position_ids: Any  # int32 [B, L], place in its sequence
    masked_positions: Any  # int32 [B, P], column of a masked token
    masked_labels: Any  # int32 [B, P], its original id
    masked_weights: Any  # float32 [B, P], 1, or 0 where there is no prediction
    first_positions: Any  # int32 [B, S], column of a sequence's [CLS]
    next_sentence_labels: Any  # int32 [B, S], 1 where sentence B is a random one
    next_sentence_weights: Any  # float32 [B, S], 1, or 0 where there is no sequence
