"""TFRecords between TensorFlow and us, each way. TensorFlow runs in a process of its own, once."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlbert.data.formats.padded import NAMES, Widths, padded
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.tfrecord import write_examples
from random_set import random_rows
from stored_sets import assert_same_rows
from tfrecord_examples import SIMPLE_ROW, frame, odd_examples, read_examples, simple_lists

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed (the tf extra)", allow_module_level=True)

PROGRAM = """
import json, sys
import numpy as np
import tensorflow as tf

folder = sys.argv[1]
floats = "masked_lm_weights"

def read(path, sizes):
    kinds = {name: tf.float32 if name == floats else tf.int64 for name in sizes}
    features = {name: tf.io.FixedLenFeature([size], kinds[name]) for name, size in sizes.items()}
    rows, direct = [], []
    for record in tf.data.TFRecordDataset(path):
        try:
            rows.append(tf.io.parse_single_example(record, features))
            direct.append(True)
        except tf.errors.InvalidArgumentError:  # its parser knows fewer forms than protocol buffers have
            whole = tf.train.Example.FromString(record.numpy()).SerializeToString()
            rows.append(tf.io.parse_single_example(whole, features))
            direct.append(False)
    return {name: np.stack([row[name].numpy() for row in rows]) for name in sizes} | {"direct": direct}

def write(path, arrays):
    with tf.io.TFRecordWriter(path) as writer:
        for i in range(len(arrays["input_ids"])):
            features = {}
            for name, rows in arrays.items():
                if name == floats:
                    features[name] = tf.train.Feature(float_list=tf.train.FloatList(value=rows[i]))
                else:
                    features[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=rows[i]))
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())

jobs = json.load(open(folder + "/jobs.json"))
for name, sizes in jobs.items():
    np.savez(folder + f"/{name}.npz", **read(folder + "/" + name, sizes))
write(folder + "/theirs", dict(np.load(folder + "/arrays.npz")))
"""
WIDTHS = Widths(32, 5)
SIZES = {name: WIDTHS.of(name) for name in NAMES}


def features(rows: Ragged) -> dict[str, np.ndarray]:
    types = {name: np.float32 if "weights" in name else np.int32 for name in NAMES}
    return {name: padded(rows, name, WIDTHS).astype(types[name]) for name in NAMES}


@pytest.fixture(scope="module")
def exchange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of both sides, and the arrays that TensorFlow read."""
    folder = tmp_path_factory.mktemp("exchange")
    write_examples(folder / "ours", random_rows(60), 32, 5)
    (folder / "odd").write_bytes(frame(*odd_examples().values()))
    sizes = {name: len(content) for name, content in simple_lists().items()}
    (folder / "jobs.json").write_text(json.dumps({"ours": SIZES, "odd": sizes}))
    np.savez(folder / "arrays.npz", **features(random_rows(60, seed=1)))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, timeout=300, check=False
    )
    if "No module named" in done.stderr or "ImportError" in done.stderr:
        pytest.skip(f"TensorFlow cannot be imported: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return folder


def test_each_reads_what_the_other_wrote(exchange):
    found, expected = np.load(exchange / "ours.npz"), features(random_rows(60))
    assert found["direct"].all()
    for name in NAMES:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    theirs = Ragged.concatenate(list(read_examples(exchange / "theirs", batch=16)))
    assert_same_rows(theirs, random_rows(60, seed=1))


def test_both_read_odd_encodings_alike(exchange):
    found = np.load(exchange / "odd.npz")
    direct = {name for name, parsed in zip(odd_examples(), found["direct"], strict=True) if parsed}
    assert {"unpacked", "other order", "an unknown feature", "long varints"} <= direct
    length = found["input_mask"].sum(axis=1)
    assert set(length) == {len(SIMPLE_ROW[0])}
    for row, name in enumerate(odd_examples()):
        assert found["input_ids"][row, : length[row]].tolist() == SIMPLE_ROW[0], name
        chosen = found["masked_lm_weights"][row] > 0
        assert found["masked_lm_positions"][row, chosen].tolist() == SIMPLE_ROW[3], name
        assert found["masked_lm_ids"][row, chosen].tolist() == SIMPLE_ROW[4], name
    ours = list(read_examples(exchange / "odd"))
    assert sum(len(rows) for rows in ours) == len(odd_examples())
