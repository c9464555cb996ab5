"""TFRecords between TensorFlow and us, each way."""

from pathlib import Path

import numpy as np
import pytest

from mlbert.data.formats.padded import NAMES, Widths, padded
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.tfrecord import write_examples
from random_set import random_rows
from stored_sets import assert_same_rows
from tfrecord_examples import SIMPLE_ROW, frame, odd_examples, read_examples, simple_lists

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed (the tf extra)")

FLOATS = "masked_lm_weights"
WIDTHS = Widths(32, 5)


def read(path: Path, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    kinds = {name: tf.float32 if name == FLOATS else tf.int64 for name in sizes}
    features = {name: tf.io.FixedLenFeature([size], kinds[name]) for name, size in sizes.items()}
    rows, direct = [], []
    for record in tf.data.TFRecordDataset(str(path)):
        try:
            rows.append(tf.io.parse_single_example(record, features))
            direct.append(True)
        except tf.errors.InvalidArgumentError:  # its parser knows fewer forms than protocol buffers have
            whole = tf.train.Example.FromString(record.numpy()).SerializeToString()
            rows.append(tf.io.parse_single_example(whole, features))
            direct.append(False)
    return {name: np.stack([row[name].numpy() for row in rows]) for name in sizes} | {"direct": np.array(direct)}


def write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    def feature(name: str, row: np.ndarray) -> object:
        if name == FLOATS:
            return tf.train.Feature(float_list=tf.train.FloatList(value=row))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=row))

    with tf.io.TFRecordWriter(str(path)) as writer:
        for i in range(len(arrays["input_ids"])):
            features = tf.train.Features(feature={name: feature(name, rows[i]) for name, rows in arrays.items()})
            writer.write(tf.train.Example(features=features).SerializeToString())


def features(rows: Ragged) -> dict[str, np.ndarray]:
    types = {name: np.float32 if name == FLOATS else np.int32 for name in NAMES}
    return {name: padded(rows, name, WIDTHS).astype(types[name]) for name in NAMES}


def test_each_reads_what_the_other_wrote(tmp_path):
    write_examples(tmp_path / "ours", random_rows(60), 32, 5)
    found, expected = read(tmp_path / "ours", {name: WIDTHS.of(name) for name in NAMES}), features(random_rows(60))
    assert found["direct"].all()
    for name in NAMES:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    write(tmp_path / "theirs", features(random_rows(60, seed=1)))
    theirs = Ragged.concatenate(list(read_examples(tmp_path / "theirs", batch=16)))
    assert_same_rows(theirs, random_rows(60, seed=1))


def test_both_read_odd_encodings_alike(tmp_path):
    (tmp_path / "odd").write_bytes(frame(*odd_examples().values()))
    found = read(tmp_path / "odd", {name: len(content) for name, content in simple_lists().items()})
    direct = {name for name, parsed in zip(odd_examples(), found["direct"], strict=True) if parsed}
    assert {"unpacked", "other order", "an unknown feature", "long varints"} <= direct
    length = found["input_mask"].sum(axis=1)
    assert set(length) == {len(SIMPLE_ROW[0])}
    for row, name in enumerate(odd_examples()):
        assert found["input_ids"][row, : length[row]].tolist() == SIMPLE_ROW[0], name
        chosen = found["masked_lm_weights"][row] > 0
        assert found["masked_lm_positions"][row, chosen].tolist() == SIMPLE_ROW[3], name
        assert found["masked_lm_ids"][row, chosen].tolist() == SIMPLE_ROW[4], name
    ours = list(read_examples(tmp_path / "odd"))
    assert sum(len(rows) for rows in ours) == len(odd_examples())
