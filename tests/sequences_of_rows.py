"""Read sequences back from the TensorFlow implementation's rows, token by token."""

from typing import Any

import numpy as np

from mlbert.data.formats.ragged import Ragged


def sequences_of(rows: Any) -> Ragged:
    """Return the sequences of a `tf2_bert.rows.Rows`, using only the model's inputs."""
    rows = type(rows)(*map(np.asarray, rows))
    found = []
    for b in range(len(rows.input_ids)):
        real = rows.masked_weights[b] > 0
        for s in np.flatnonzero(rows.next_sentence_weights[b]).tolist():
            columns = np.flatnonzero(rows.sequence_ids[b] == s + 1)
            first = rows.first_positions[b, s]
            assert columns.tolist() == list(range(first, first + len(columns)))
            assert rows.position_ids[b, columns].tolist() == list(range(len(columns)))
            mine = real & (rows.masked_positions[b] >= first) & (rows.masked_positions[b] < first + len(columns))
            tokens, segments = rows.input_ids[b, columns].tolist(), rows.segment_ids[b, columns].tolist()
            masked = ((rows.masked_positions[b, mine] - first).tolist(), rows.masked_labels[b, mine].tolist())
            found.append((tokens, segments.count(0), bool(rows.next_sentence_labels[b, s]), *masked))
        assert not rows.input_ids[b, rows.sequence_ids[b] == 0].any()
    return Ragged.from_rows(found)
