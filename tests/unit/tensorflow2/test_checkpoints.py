"""Initial weights of a TensorFlow 2 run in all formats, and the weights that it writes for other programs."""

import dataclasses
import json
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed (the tf extra)")

from safetensors.numpy import load_file, save_file

from mlbert.config.bert_config import BertConfig
from mlbert.models.weights.checkpoint_names import VOCABULARY, tf1_names
from mlbert.models.weights.checkpoint_state import parameter_shapes
from mlbert.models.weights.convert import tf2_to_torch
from stored_sets import flip
from tf2_bert.checkpoints import copy_weights, initial_values, write_weights
from tf2_bert.model import BertPretrainer
from unit.tensorflow2.checkpoint_programs import SHAPE, cut
from user_errors import user_error

PROGRAM = Path(__file__).parents[1] / "models/weights/convert/tensorflow_program.py"
FORMS = ("tf1/model.ckpt-28252", "tf1", "pretrainer/bert_model.ckpt", "items/bert_model.ckpt.index", "folder", "padded")


@pytest.fixture(scope="module")
def values() -> dict[str, np.ndarray]:
    """Return random weights by our names, vocabulary unpadded."""
    random = np.random.default_rng(5)
    drawn = {name: random.normal(size=size).astype(np.float32) for name, size in parameter_shapes(SHAPE).items()}
    return {name: array[:197] if name in VOCABULARY else array for name, array in drawn.items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory, values) -> Path:
    """Write the same weights in all formats: those of tensorflow_program.py, and safetensors."""
    folder = tmp_path_factory.mktemp("forms")
    names = tf1_names(SHAPE.num_hidden_layers)
    np.savez(
        folder / "weights.npz",
        **{names[name]: array.T if names[name].endswith("kernel") else array for name, array in values.items()},
    )
    ones = np.ones((2, 8), np.int64)
    inputs = {"input_ids": ones, "token_type_ids": ones * 0, "attention_mask": ones, "labels": ones}
    np.savez(folder / "inputs.npz", **inputs)
    (folder / "bert_config.json").write_text(SHAPE.to_json())
    runpy.run_path(str(PROGRAM))["main"](folder)
    for name, rows in (("folder", 197), ("padded", 200)):
        (folder / name).mkdir()
        (folder / name / "bert_config.json").write_text(SHAPE.to_json())
        arrays = {
            own: np.pad(array, [(0, rows - 197), *[(0, 0)] * (array.ndim - 1)]) if own in VOCABULARY else array
            for own, array in values.items()
        }
        save_file(arrays, folder / name / "model.safetensors")
    return folder


@pytest.fixture
def model() -> BertPretrainer:
    return BertPretrainer(SHAPE, tf.float32, seed=1)


def assert_same(found, expected):
    assert {array.dtype for array in found.values()} == {np.dtype(np.float32)}
    np.testing.assert_equal(found, expected)


@pytest.mark.parametrize("form", FORMS)
def test_all_formats_give_the_same_weights(written, values, model, form):
    found, notes = initial_values(written / form, model)
    assert_same(found, values)
    assert notes == []
    model.assign(found)
    assert_same(model.values(), values)


def test_moved_checkpoint_folder_is_found(tmp_path, written, values, model):
    shutil.copytree(written / "tf1", tmp_path / "here")
    (tmp_path / "here/model.ckpt-28252.meta").unlink()
    assert_same(initial_values(tmp_path / "here", model)[0], values)


def test_heads_missing_from_the_checkpoint_keep_their_random_weights(written, values, model):
    drawn = model.values()
    found, notes = initial_values(written / "encoder_only" / "bert_model.ckpt", model)
    head = "cls.predictions.transform.dense.weight"
    np.testing.assert_array_equal(found[head], drawn[head])
    assert found[head].std() > 0
    query = "bert.encoder.layer.1.attention.self.query.weight"
    np.testing.assert_array_equal(found[query], values[query])
    assert any(note.startswith("warning: ") and note.endswith(f"has no {head}") for note in notes)
    assert found.keys() == values.keys()


def put(name, array):
    return lambda file: save_file({**load_file(file), name: array}, file)


def change_heads(file):
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_attention_heads": 8}))


def leave_only_the_list(file):
    for part in file.parent.glob("model.ckpt*"):
        part.unlink()


TF1_DATA, ITEMS = "tf1/model.ckpt-28252.data-00000-of-00001", "items/bert_model.ckpt"
OWN, CONFIG = "folder/model.safetensors", "folder/bert_config.json"


@pytest.mark.parametrize(
    ("file", "damage", "path", "code"),
    [
        (TF1_DATA, lambda file: cut(file, 20_000), "tf1/model.ckpt-28252", "checkpoint.damaged"),
        (TF1_DATA, lambda file: flip(file, 5000), "tf1/model.ckpt-28252", "checkpoint.damaged"),
        (f"{ITEMS}.data-00000-of-00001", Path.unlink, ITEMS, "checkpoint.damaged"),
        (f"{ITEMS}.index", lambda file: cut(file, 100), ITEMS, "checkpoint.damaged"),
        (f"{ITEMS}.index", Path.unlink, ITEMS, "file.missing"),
        ("text.index", lambda file: file.write_text("hello\n"), "text", "checkpoint.damaged"),
        ("foreign", Path.exists, "foreign/model.ckpt", "checkpoint.format"),
        ("incomplete", Path.exists, "incomplete/model.ckpt", "checkpoint.incomplete"),
        ("empty", Path.mkdir, "empty", "checkpoint.missing"),
        ("tf1/checkpoint", leave_only_the_list, "tf1", "file.missing"),
        ("tf1/checkpoint", lambda file: file.write_text("hello\n"), "tf1", "checkpoint.missing"),
        ("phase1.pt", lambda file: file.write_bytes(b"PK"), "phase1.pt", "checkpoint.format"),
        (OWN, lambda file: cut(file, 5000), "folder", "checkpoint.damaged"),
        (OWN, Path.unlink, OWN, "file.unreadable"),
        (OWN, put("bert.pooler.dense.weight", np.zeros((32, 31), np.float32)), "folder", "checkpoint.shape"),
        (OWN, put("bert.pooler.dense.bias", np.zeros(32, np.int32)), "folder", "checkpoint.damaged"),
        (CONFIG, change_heads, "folder", "checkpoint.shape"),
    ],
)
def test_damaged_weights_are_a_one_line_error(tmp_path, written, model, file, damage, path, code):
    folder = Path(shutil.copytree(written, tmp_path / "copy"))
    damage(folder / file)
    with user_error(code, wording=False) as caught:  # most messages include TensorFlow's text
        initial_values(folder / path, model)
    assert caught.value.subject.startswith(str(folder / path))


@pytest.mark.parametrize("form", ["tf1", "pretrainer/bert_model.ckpt", "folder/model.safetensors"])
def test_weights_of_another_shape_are_an_error(written, form):
    for name, value, code in (
        ("num_hidden_layers", 1, "checkpoint.shape"),
        ("num_hidden_layers", 3, "checkpoint.incomplete"),
        ("intermediate_size", 64, "checkpoint.shape"),
        ("vocab_size", 190, "checkpoint.shape"),
    ):
        other = BertPretrainer(dataclasses.replace(SHAPE, **{name: value}))
        with user_error(code) as caught:
            initial_values(written / form, other)
        assert caught.value.subject.startswith(str(written / form))


def test_bucket_address_survives_pathlib(model, monkeypatch):
    queried = []
    monkeypatch.setattr(tf.io.gfile, "isdir", lambda address: False)
    monkeypatch.setattr(tf.io.gfile, "exists", queried.append)
    with user_error("file.missing", "gs://bucket/model.ckpt-28252.index"):
        initial_values(Path("gs://bucket/model.ckpt-28252"), model)
    assert queried == ["gs://bucket/model.ckpt-28252.index"]


def test_written_weights_are_readable_by_all_programs(tmp_path, values, model):
    model.assign(values)
    write_weights(tmp_path / "run", model, {"accuracy": 0.5})
    assert_same(load_file(tmp_path / "run/weights/model.safetensors"), values)
    assert "| accuracy | 0.5 |" in (tmp_path / "run/weights/README.md").read_text()
    report = tf2_to_torch(tmp_path / "run/tf2/model.ckpt", tmp_path / "torch")
    assert (report.missing, len(report.taken)) == ({}, len(values))
    assert_same(load_file(tmp_path / "torch/model.safetensors"), values)
    assert BertConfig.from_json(tmp_path / "torch/bert_config.json") == SHAPE
    reader = tf.train.load_checkpoint(str(tmp_path / "run/tf2/model.ckpt"))
    assert len(reader.get_variable_to_shape_map()) == len(values) + 1
    copy_weights(tmp_path / "run", tmp_path / "copy")
    for place in ("run", "run/weights", "run/tf2/model.ckpt", "copy", "copy/tf2/model.ckpt"):
        assert_same(initial_values(tmp_path / place, BertPretrainer(SHAPE, seed=2))[0], values)


def test_unwritable_folder_is_an_error(tmp_path, model):
    (tmp_path / "run").write_text("in the way")
    with user_error("file.unwritable", tmp_path / "run"):
        write_weights(tmp_path / "run", model, {})
    with user_error("file.unwritable", tmp_path / "copy"):
        copy_weights(tmp_path / "nothing", tmp_path / "copy")
