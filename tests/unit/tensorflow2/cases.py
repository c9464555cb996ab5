"""Small shapes and rows for the tests of the TensorFlow 2 implementation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.ragged import Ragged
from sequences_of_rows import sequences_of
from tf2_bert.rows import Rows

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


def rows_of(ragged: Ragged, packs: Sequence[int], columns: int, predictions: int, most: int) -> Rows:
    """Return numpy arrays with ``packs[b]`` sequences in row b; 0 makes a row of padding only.

    ``columns`` is L, ``predictions`` P and ``most`` S.
    """
    names = ("input_ids", "segment_ids", "sequence_ids", "position_ids")
    tokens = {name: np.zeros((len(packs), columns), np.int32) for name in names}
    positions, labels = (np.zeros((len(packs), predictions), np.int32) for _ in range(2))
    first, random_next = (np.zeros((len(packs), most), np.int32) for _ in range(2))
    masked_weights, sequence_weights = (np.zeros((len(packs), n), np.float32) for n in (predictions, most))
    s = 0
    for row, count in enumerate(packs):
        column = masked = 0
        for number in range(count):
            length, (low, high) = int(ragged.lengths[s]), ragged.masked_offsets[s : s + 2].tolist()
            place, predicted = slice(column, column + length), slice(masked, masked + high - low)
            tokens["input_ids"][row, place] = ragged.tokens[ragged.offsets[s] : ragged.offsets[s + 1]]
            tokens["position_ids"][row, place] = np.arange(length)
            tokens["segment_ids"][row, place] = np.arange(length) >= ragged.first_lengths[s]
            tokens["sequence_ids"][row, place] = number + 1
            positions[row, predicted] = column + ragged.masked_positions[low:high].astype(np.int32)
            labels[row, predicted] = ragged.masked_labels[low:high]
            masked_weights[row, predicted] = 1
            first[row, number], random_next[row, number] = column, ragged.next_sentence[s]
            sequence_weights[row, number] = 1
            column, masked, s = column + length, masked + high - low, s + 1
    assert s == len(ragged), "the packs must contain all sequences"
    return Rows(
        *tokens.values(),
        masked_positions=positions,
        masked_labels=labels,
        masked_weights=masked_weights,
        first_positions=first,
        next_sentence_labels=random_next,
        next_sentence_weights=sequence_weights,
    )


def single_case() -> tuple[Ragged, list[int], Rows]:
    """Return sequences of different lengths, the number of sequences per row, and padded rows of one each."""
    ragged = sequences([40, 7, 23, 31, 12, 5], seed=1)
    packs = [1] * 6
    return ragged, packs, rows_of(ragged, packs, columns=40, predictions=8, most=1)


def packed_case() -> tuple[Ragged, list[int], Rows]:
    """Return the same with up to three sequences per row; only the last row is full."""
    ragged = sequences([17, 9, 20, 30, 14, 11, 48], seed=2)
    packs = [3, 1, 2, 1]
    return ragged, packs, rows_of(ragged, packs, columns=48, predictions=10, most=3)


def tensors(rows: Rows) -> Rows:
    """Return the rows as tensors."""
    return Rows(*(tf.constant(part) for part in rows))


def context(replicas: int = 1, hosts: int = 1, host: int = 0) -> tf.distribute.InputContext:
    """Return what a host's input function is told."""
    return tf.distribute.InputContext(hosts, host, replicas)


def batches(dataset: tf.data.Dataset, count: int | None = None) -> list[Rows]:
    """Return the first batches of a dataset, or all."""
    return list((dataset if count is None else dataset.take(count)).as_numpy_iterator())


def joined(parts: Sequence[Rows]) -> Ragged:
    """Return the sequences of batches."""
    return Ragged.concatenate([sequences_of(part) for part in parts])
