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
from sequences_of_rows import sequences_of
from stored_sets import same_sequences
from tf2_bert.rows import Rows
from tf2_bert.store_rows import RowShape, rows_of

# The vocabulary size is not a multiple of 8: PyTorch's model pads it.
SHAPE = BertConfig(163, 48, 3, 4, 96, max_position_embeddings=64)
NO_DROPOUT = dataclasses.replace(SHAPE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def sequences(lengths: Sequence[int], seed: int = 0, vocab_size: int = SHAPE.vocab_size) -> Ragged:
    """Return random sequences of these lengths (at least 5); a sixth of the tokens, at least one, are masked."""
    rng = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        tokens = rng.integers(5, vocab_size, length).tolist()
        positions = sorted(rng.choice(np.arange(1, length), max(1, length // 6), replace=False).tolist())
        labels = rng.integers(5, vocab_size, len(positions)).tolist()
        rows.append((tokens, int(rng.integers(3, length)), bool(rng.integers(2)), positions, labels))
    return Ragged.from_rows(rows)


def single_case() -> tuple[Ragged, list[int], Rows]:
    """Return sequences of different lengths, the number of sequences per row, and padded rows of one each."""
    ragged = sequences([40, 7, 23, 31, 12, 5], seed=1)
    packs = [1] * 6
    return ragged, packs, rows_of(ragged, np.array(packs), 6, RowShape(40, 8, 1))


def packed_case() -> tuple[Ragged, list[int], Rows]:
    """Return the same with up to three sequences per row; only the last row is full."""
    ragged = sequences([17, 9, 20, 30, 14, 11, 48], seed=2)
    packs = [3, 1, 2, 1]
    return ragged, packs, rows_of(ragged, np.array(packs), 4, RowShape(48, 10, 3))


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
    """Assert that the hosts together read the first samples of a set once, in equally many batches; return them."""
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
