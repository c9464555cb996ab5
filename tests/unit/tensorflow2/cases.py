"""Small shapes and rows for the tests of the TensorFlow 2 implementation."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.open import open_store
from mlbert.data.formats.ragged import Ragged
from mlbert.host.errors import UserError
from stored_sets import make_rows, same_sequences
from tf2_bert.rows import Rows
from tf2_bert.store_rows import RowShape, rows_of

# The vocabulary size is not a multiple of 8: PyTorch's model pads it.
SHAPE = BertConfig(163, 48, 3, 4, 96, max_position_embeddings=64)
NO_DROPOUT = dataclasses.replace(SHAPE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def single_case() -> tuple[Ragged, list[int], Rows]:
    """Return sequences of different lengths, the number of sequences per row,
    and padded rows of one each.
    """
    ragged = make_rows([40, 7, 23, 31, 12, 5], 1, SHAPE.vocab_size)
    packs = [1] * 6
    return ragged, packs, rows_of(ragged, np.array(packs), 6, RowShape(40, 8, 1))


def packed_case() -> tuple[Ragged, list[int], Rows]:
    """Return the same with up to three sequences per row; only the last row is full."""
    ragged = make_rows([17, 9, 20, 30, 14, 11, 48], 2, SHAPE.vocab_size)
    packs = [3, 1, 2, 1]
    return ragged, packs, rows_of(ragged, np.array(packs), 4, RowShape(48, 10, 3))


def sequences_of(rows: Rows) -> Ragged:
    """Read the sequences back, token by token, from the model's inputs alone."""
    rows = type(rows)(*map(np.asarray, rows))
    found = []
    for b in range(len(rows.input_ids)):
        real = rows.masked_weights[b] > 0
        for s in np.flatnonzero(rows.next_sentence_weights[b]).tolist():
            columns = np.flatnonzero(rows.sequence_ids[b] == s + 1)
            first = rows.first_positions[b, s]
            assert columns.tolist() == list(range(first, first + len(columns)))
            assert rows.position_ids[b, columns].tolist() == list(range(len(columns)))
            mine = (
                real
                & (rows.masked_positions[b] >= first)
                & (rows.masked_positions[b] < first + len(columns))
            )
            tokens = rows.input_ids[b, columns].tolist()
            segments = rows.segment_ids[b, columns].tolist()
            is_next = bool(rows.next_sentence_labels[b, s])
            masked_positions = (rows.masked_positions[b, mine] - first).tolist()
            masked_labels = rows.masked_labels[b, mine].tolist()
            found.append((tokens, segments.count(0), is_next, masked_positions, masked_labels))
        assert not rows.input_ids[b, rows.sequence_ids[b] == 0].any()
    return Ragged.from_rows(found)


def tensors(rows: Rows) -> Rows:
    return Rows(*(tf.constant(part) for part in rows))


def context(replicas: int = 1, hosts: int = 1, host: int = 0) -> tf.distribute.InputContext:
    return tf.distribute.InputContext(hosts, host, replicas)


def batches(dataset: tf.data.Dataset, count: int | None = None) -> list[Rows]:
    """Return the first batches of a dataset, or all."""
    return list((dataset if count is None else dataset.take(count)).as_numpy_iterator())


def joined(parts: Sequence[Rows]) -> Ragged:
    return Ragged.concatenate([sequences_of(part) for part in parts])


def assert_evaluated_once(data: Any, hosts: int, replicas: int, folder: Path, count: int) -> Ragged:
    """Assert that the hosts together read the first samples of a set once,
    in equally many batches; return them.
    """
    parts = [batches(data.pipeline(context(replicas, hosts, host))) for host in range(hosts)]
    assert [len(part) for part in parts] == [data.steps(replicas) * replicas // hosts] * hosts
    rows = [batch for part in parts for batch in part]
    assert {batch.input_ids.shape for batch in rows} == {(4, data.shape.tokens)}
    assert sum(batch.next_sentence_weights.sum() for batch in rows) == data.num_examples == count
    found = joined(rows)
    assert same_sequences(found, open_store(folder).gather(np.arange(count)))
    return found


def read_error(data: Any) -> UserError:
    """Read training data that cannot be used, and return the error that the user gets."""
    dataset = data.pipeline(context())
    with pytest.raises(tf.errors.OpError) as raised:
        batches(dataset, 50)
    error = data.translate_error(raised.value)
    assert isinstance(error, UserError)
    assert "\n" not in str(error)
    return error
