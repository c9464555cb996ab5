"""Weights that a TensorFlow 2 run reads in all formats and writes, and its checkpoints:
bit-equal resume, damage.
"""

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
from mlbert.runs.progress import TrainState
from tf2_bert.checkpoints import CheckpointFolder, copy_weights, initial_values, write_weights
from tf2_bert.loss_scale import LossScale
from tf2_bert.model import BertPretrainer
from tf2_bert.optimizers import Lamb
from user_errors import user_error

# 197 is not a multiple of 8: other programs pad the vocabulary.
SHAPE = BertConfig(197, 32, 2, 4, 48, max_position_embeddings=40)
IDENTITY = {
    "model": SHAPE.to_json(),
    "optimizer": "lamb",
    "train_batch_size": 8,
    "train_data": "sha256:0",
}
PROGRAM = Path(__file__).parents[1] / "models/weights/convert/tensorflow_program.py"
FORMS = (
    "old/model.ckpt-28252",
    "old",
    "pretrainer/bert_model.ckpt",
    "items/bert_model.ckpt.index",
    "folder",
)
# The files that the tests damage.
OLD = "old/model.ckpt-28252.data-00000-of-00001"
OWN = "folder/model.safetensors"
CONFIG = "folder/bert_config.json"


@pytest.fixture(scope="module")
def values() -> dict[str, np.ndarray]:
    """Return random weights by our names, vocabulary unpadded."""
    random = np.random.default_rng(5)
    drawn = {
        name: random.normal(size=size).astype(np.float32)
        for name, size in parameter_shapes(SHAPE).items()
    }
    return {name: array[:197] if name in VOCABULARY else array for name, array in drawn.items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory, values) -> Path:
    """Write the same weights in all formats: those of tensorflow_program.py, and safetensors."""
    folder = tmp_path_factory.mktemp("forms")
    names = tf1_names(SHAPE.num_hidden_layers)
    arrays = {
        names[name]: array.T if names[name].endswith("kernel") else array
        for name, array in values.items()
    }
    np.savez(folder / "weights.npz", **arrays)
    (folder / "bert_config.json").write_text(SHAPE.to_json())
    runpy.run_path(str(PROGRAM))["main"](folder)
    (folder / "tf1").rename(folder / "old")  # it names its checkpoint by the path from before
    (folder / "old/model.ckpt-28252.meta").unlink()
    (folder / "folder").mkdir()
    (folder / "folder/bert_config.json").write_text(SHAPE.to_json())
    save_file(values, folder / "folder/model.safetensors")
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


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def put(name, array):
    return lambda file: save_file({**load_file(file), name: array}, file)


def change_heads(file):
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_attention_heads": 8}))


def leave_only_the_list(file):
    for part in file.parent.glob("model.ckpt*"):
        part.unlink()


@pytest.mark.parametrize(
    ("file", "damage", "path", "code"),
    [
        (OLD, lambda file: cut(file, 20_000), "old/model.ckpt-28252", "checkpoint.damaged"),
        ("items/bert_model.ckpt.index", Path.unlink, "items/bert_model.ckpt", "file.missing"),
        ("empty", Path.mkdir, "empty", "checkpoint.missing"),
        ("old/checkpoint", leave_only_the_list, "old", "file.missing"),
        ("old/checkpoint", lambda file: file.write_text("hello\n"), "old", "checkpoint.missing"),
        ("phase1.pt", lambda file: file.write_bytes(b"PK"), "phase1.pt", "checkpoint.format"),
        (OWN, lambda file: cut(file, 5000), "folder", "checkpoint.damaged"),
        (OWN, Path.unlink, OWN, "file.unreadable"),
        (
            OWN,
            put("bert.pooler.dense.weight", np.zeros((32, 31), np.float32)),
            "folder",
            "checkpoint.shape",
        ),
        (
            OWN,
            put("bert.pooler.dense.bias", np.zeros(32, np.int32)),
            "folder",
            "checkpoint.damaged",
        ),
        (CONFIG, change_heads, "folder", "checkpoint.shape"),
    ],
    ids=[
        "old, data cut",
        "items, no index",
        "empty folder",
        "old, only the list",
        "old, wrong list",
        "wrong pickle",
        "ours, cut",
        "ours, deleted",
        "ours, another shape",
        "ours, another dtype",
        "another number of heads",
    ],
)
def test_damaged_weights_are_a_one_line_error(tmp_path, written, model, file, damage, path, code):
    folder = Path(shutil.copytree(written, tmp_path / "copy"))
    damage(folder / file)
    with user_error(code, wording=False) as caught:  # most messages include TensorFlow's text
        initial_values(folder / path, model)
    assert caught.value.subject.startswith(str(folder / path))


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


def run_of(path, keep=2, seed=1, is_chief=True, **identity):
    """Return the objects that a run saves, and the folder for them."""
    model = BertPretrainer(SHAPE, seed=seed)
    optimizer = Lamb(
        model.parameters(), beta_1=0.9, beta_2=0.999, epsilon=1e-6, weight_decay_rate=0.01
    )
    objects = {"model": model, "optimizer": optimizer, "loss_scale": LossScale(8.0, 3, fixed=False)}
    return objects, CheckpointFolder(
        path, objects, keep=keep, identity={**IDENTITY, **identity}, is_chief=is_chief
    )


def variables(objects):
    parts = [
        *objects["model"].parameters().values(),
        *objects["optimizer"].variables,
        *objects["loss_scale"].variables,
    ]
    return [variable.numpy() for variable in parts]


def saved(path, steps=(1, 2, 3), **options):
    """Update and save a run at these steps; return its variables at each."""
    objects, folder = run_of(path, **options)
    states = {}
    for step in steps:
        shapes = enumerate(weight.shape for weight in objects["model"].parameters().values())
        gradients = [tf.random.stateless_normal(shape, [index, step]) for index, shape in shapes]
        objects["optimizer"].apply(gradients, tf.constant(0.01), tf.constant(True))
        objects["loss_scale"].update(tf.constant(step > 1))
        folder.save(TrainState(step=step, samples=8 * step, accuracy=step / 7))
        states[step] = variables(objects)
    return states


def assert_restored(path, step, states, notes=0):
    objects, folder = run_of(path, seed=9)
    state = TrainState()
    warnings = []
    assert folder.restore_newest(state, warnings.append)
    assert state == TrainState(step=step, samples=8 * step, accuracy=step / 7)
    np.testing.assert_equal(variables(objects), states[step])
    assert len(warnings) == notes


def test_resume_is_bit_equal(tmp_path):
    assert_restored(tmp_path, 3, saved(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]
    stored = [
        name.split("/")
        for name, _ in tf.train.list_variables(str(tmp_path / "step_00000003/variables"))
    ]
    of_optimizer = [parts[1] for parts in stored if parts[0] == "optimizer"]
    moments = ["m", "v"] * len(parameter_shapes(SHAPE))
    assert sorted(of_optimizer) == ["iterations", *sorted(moments)], (
        "its weights are those of the model"
    )


def test_restore_without_checkpoints_changes_nothing(tmp_path):
    """Only the chief writes any."""
    saved(tmp_path / "checkpoints", is_chief=False)
    assert not (tmp_path / "checkpoints").exists()
    objects, folder = run_of(tmp_path / "checkpoints")
    state = TrainState()
    before = variables(objects)
    assert not folder.restore_newest(state, pytest.fail)
    assert state == TrainState()
    np.testing.assert_equal(variables(objects), before)


@pytest.mark.parametrize("name", ["variables.data-00000-of-00001", "variables.index", "state.json"])
@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda file: cut(file, 200)], ids=["deleted", "cut"]
)
def test_damaged_checkpoint_is_skipped(tmp_path, name, damage):
    states = saved(tmp_path / "checkpoints")
    damage(tmp_path / "checkpoints" / "step_00000003" / name)
    assert_restored(tmp_path / "checkpoints", 2, states, notes=1)


def test_only_damaged_checkpoints_is_an_error(tmp_path):
    saved(tmp_path, steps=[1])
    (tmp_path / "step_00000001" / "variables.index").unlink()
    with user_error("checkpoint.damaged", tmp_path):
        run_of(tmp_path)[-1].restore_newest(TrainState(), str)


def test_checkpoint_of_other_settings_or_variables_is_an_error(tmp_path):
    saved(tmp_path, steps=[1])
    for change in (
        {"model": "{}"},
        {"optimizer": "adamw"},
        {"train_batch_size": 16},
        {"train_data": "sha256:1"},
    ):
        with user_error("run.other-settings", tmp_path / "step_00000001"):
            run_of(tmp_path, **change)[-1].restore_newest(TrainState(), str)
    objects = {"model": BertPretrainer(SHAPE), "optimizer": tf.Variable(0.0)}
    folder = CheckpointFolder(tmp_path, objects, keep=1, identity=IDENTITY)
    with user_error("run.other-settings", tmp_path / "step_00000001"):
        folder.restore_newest(TrainState(), str)


def test_full_disk_keeps_the_older_checkpoint(tmp_path):
    states = saved(tmp_path, steps=[1])
    (tmp_path / ".partial_step_00000002").write_text("in the way")
    with user_error("file.unwritable", tmp_path / "step_00000002"):
        saved(tmp_path, steps=[2])
    assert_restored(tmp_path, 1, states)
